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
class Table:
    """A family's parameters at the sizes of one config.

    Attributes:
        entries: every native parameter, in the order in which an export writes them.
        aliases: HF names that may be stored a second time, and the name they must equal.
        ignored: endings of HF names that carry nothing the model needs.
    """

    entries: tuple[Entry, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

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


def llama_table(config: Any) -> Table:
    """Llama: renames, packed q/k/v and gate/up, a head of its own unless tied."""
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

    def norm(name: str, source: str) -> None:
        entries.append(packed(f"{name}.weight", (), (f"{source}.weight", hidden)))

    for i in range(config.num_hidden_layers):
        block, hf = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
        norm(f"{block}.input_layernorm", f"{hf}.input_layernorm")
        linear(
            f"{block}.self_attn.qkv_proj",
            hidden,
            config.attention_bias,
            (f"{attention}.q_proj", q_rows),
            (f"{attention}.k_proj", kv_rows),
            (f"{attention}.v_proj", kv_rows),
        )
        linear(
            f"{block}.self_attn.o_proj",
            q_rows,
            config.attention_bias,
            (f"{attention}.o_proj", hidden),
        )
        norm(f"{block}.post_attention_layernorm", f"{hf}.post_attention_layernorm")
        linear(
            f"{block}.mlp.gate_up_proj",
            hidden,
            config.mlp_bias,
            (f"{mlp}.gate_proj", inner),
            (f"{mlp}.up_proj", inner),
        )
        linear(f"{block}.mlp.down_proj", inner, config.mlp_bias, (f"{mlp}.down_proj", hidden))

    norm("norm", "model.norm")
    aliases = {}
    if config.tie_word_embeddings:
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    else:
        linear("head.proj", hidden, False, ("lm_head", config.vocab_size))
    return Table(tuple(entries), aliases, ignored=("rotary_emb.inv_freq",))


TABLES: dict[str, Callable[[Any], Table]] = {"llama": llama_table}


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
