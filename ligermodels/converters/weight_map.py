"""The one table that says where each native parameter lives in an HF checkpoint.

A native parameter is a list of row spans of HF tensors; loading, reading the rows of one rank and
exporting all walk the same spans. A family is a function from its config to a `Table`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ligermodels.errors import ConfigError


@dataclass(frozen=True)
class Span:
    """`rows` rows of the HF tensor `source` from `source_row` on are the native rows from `row`."""

    source: str
    source_row: int
    row: int
    rows: int


@dataclass(frozen=True)
class Entry:
    """A native parameter: its name in the state dict, its shape, and the spans that fill it."""

    name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Towers:
    """How a checkpoint of several towers spells the text model's names, and what else it holds.

    Attributes:
        spellings: beginnings of names, and what stands in their place in the text model alone.
        left_out: beginnings of the names of the other towers.
    """

    spellings: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]

    def text_name(self, name: str) -> str:
        """The tensor's name in a checkpoint of the text model alone."""
        for theirs, alone in self.spellings:
            if name.startswith(theirs):
                return alone + name.removeprefix(theirs)
        return name


@dataclass(frozen=True)
class Table:
    """A family's parameters at the sizes of one config.

    Attributes:
        entries: every native parameter, in the order in which an export writes them.
        aliases: HF names that may be stored a second time, and the name they must equal.
        ignored: endings of HF names that carry nothing the model needs.
        towers: what else a checkpoint of the family may hold; None for nothing.
    """

    entries: tuple[Entry, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    towers: Towers | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every HF tensor that the entries are made of, in export order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            for span in entry.spans:
                rows = span.source_row + span.rows
                if span.source in shapes:
                    rows = max(rows, shapes[span.source][0])
                shapes[span.source] = (rows, *entry.shape[1:])
        return shapes

    def parts(self) -> dict[str, list[tuple[Entry, Span]]]:
        """The way back: every HF tensor's pieces in the native parameters, by source row."""
        parts: dict[str, list[tuple[Entry, Span]]] = {}
        for entry in self.entries:
            for span in entry.spans:
                parts.setdefault(span.source, []).append((entry, span))
        for pieces in parts.values():
            pieces.sort(key=lambda piece: piece[1].source_row)
        return parts


def packed(name: str, width: tuple[int, ...], *pieces: tuple[str, int]) -> Entry:
    """The HF tensors `pieces`, (name, rows) each, stacked in this order; rows are `width` wide."""
    spans, row = [], 0
    for source, rows in pieces:
        spans.append(Span(source, 0, row, rows))
        row += rows
    return Entry(name, (row, *width), tuple(spans))


def decoder_table(
    config: Any,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    towers: Towers | None = None,
) -> Table:
    """Every family: renames, packed q/k/v and gate/up, a head of its own unless tied.

    Args: which projections have a bias, whether q and k have norms over head_dim, the names of a
        block's norms over the hidden size, which are HF's and ours, and what else is stored.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    entries = [
        packed("embed_tokens.weight", (hidden,), ("model.embed_tokens.weight", config.vocab_size))
    ]

    def linear(name: str, width: int, bias: bool, *pieces: tuple[str, int]) -> None:
        entries.append(
            packed(f"{name}.weight", (width,), *((f"{hf}.weight", n) for hf, n in pieces))
        )
        if bias:
            entries.append(packed(f"{name}.bias", (), *((f"{hf}.bias", n) for hf, n in pieces)))

    def norm(name: str, source: str, size: int = hidden) -> None:
        entries.append(packed(f"{name}.weight", (), (f"{source}.weight", size)))

    for i in range(config.num_hidden_layers):
        block, hf = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
        norm(f"{block}.{norms[0]}", f"{hf}.{norms[0]}")
        linear(
            f"{block}.self_attn.qkv_proj",
            hidden,
            qkv_bias,
            (f"{attention}.q_proj", q_rows),
            (f"{attention}.k_proj", kv_rows),
            (f"{attention}.v_proj", kv_rows),
        )
        if head_norms:
            for name in ("q_norm", "k_norm"):
                norm(f"{block}.self_attn.{name}", f"{attention}.{name}", config.head_dim)
        linear(f"{block}.self_attn.o_proj", q_rows, out_bias, (f"{attention}.o_proj", hidden))
        for name in norms[1:]:
            norm(f"{block}.{name}", f"{hf}.{name}")
        linear(
            f"{block}.mlp.gate_up_proj",
            hidden,
            mlp_bias,
            (f"{mlp}.gate_proj", inner),
            (f"{mlp}.up_proj", inner),
        )
        linear(f"{block}.mlp.down_proj", inner, mlp_bias, (f"{mlp}.down_proj", hidden))

    norm("norm", "model.norm")
    aliases = {}
    if config.tie_word_embeddings:
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    else:
        linear("head.proj", hidden, False, ("lm_head", config.vocab_size))
    return Table(tuple(entries), aliases, ignored=("rotary_emb.inv_freq",), towers=towers)


def _biased(config: Any, **options: Any) -> Table:
    """All four projections of attention have a bias if config.attention_bias."""
    bias = config.attention_bias
    return decoder_table(config, qkv_bias=bias, out_bias=bias, **options)


def llama_table(config: Any) -> Table:
    """Llama: biases where the config asks for them."""
    return _biased(config, mlp_bias=config.mlp_bias)


def _qwen2(config: Any) -> Table:
    return decoder_table(config, qkv_bias=True)


def _qwen3(config: Any) -> Table:
    return _biased(config, head_norms=True)


_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


# As published, and as transformers 5 writes them.
_GEMMA3_TOWERS = Towers(
    spellings=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    left_out=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)


def _gemma2(config: Any) -> Table:
    return _biased(config, norms=_SANDWICH)


def _gemma3(config: Any) -> Table:
    return _biased(config, norms=_SANDWICH, head_norms=True, towers=_GEMMA3_TOWERS)


TABLES: dict[str, Callable[[Any], Table]] = {
    "llama": llama_table,
    "mistral": decoder_table,
    "gemma": _biased,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def table_for(config: Any) -> Table:
    """The table of the config's family.

    Raises:
        ConfigError: the family has none.
    """
    if config.model_type not in TABLES:
        raise ConfigError(
            f"model_type {config.model_type!r} has no conversion table; "
            f"there is one for {', '.join(sorted(TABLES))}"
        )
    return TABLES[config.model_type](config)
