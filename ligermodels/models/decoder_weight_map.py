"""The weight map that all families share, with options for their differences."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ligermodels.converters.weight_map import (
    Entry,
    Towers,
    WeightMap,
    expert_entry,
    linear_entries,
    norm_entries,
    packed_entry,
)
from ligermodels.models.config import ModelConfig

LayerEntries = Callable[[int, str, str], Iterable[Entry]]
"""A function that returns the entries of a part of a layer.

Its arguments are the layer's index, the part's name in the model and its name in the checkpoint,
such as (3, "layers.3.mlp", "model.layers.3.mlp").
"""
# The layout with a tensor for each expert, of a family whose main layout has one for all.
ONE_BY_ONE = "one by one"


def attention_entries(
    config: ModelConfig,
    name: str,
    hf: str,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norms: bool = False,
) -> list[Entry]:
    """Return the entries of an `Attention` whose HF tensors are q_proj, k_proj, v_proj and o_proj.

    Args:
        name, hf: the names of the module in the model and in the checkpoint.
        qkv_bias, out_bias: whether these projections have a bias.
        head_norms: whether q and k have norms over head_dim, q_norm and k_norm.
    """
    hidden, head = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    qkv = (f"{hf}.q_proj", q_rows), (f"{hf}.k_proj", kv_rows), (f"{hf}.v_proj", kv_rows)
    norms = ("q_norm", "k_norm") if head_norms else ()
    return [
        *linear_entries(f"{name}.qkv_proj", hidden, *qkv, bias=qkv_bias),
        *(entry for n in norms for entry in norm_entries(f"{name}.{n}", f"{hf}.{n}", head)),
        *linear_entries(f"{name}.o_proj", q_rows, (f"{hf}.o_proj", hidden), bias=out_bias),
    ]


def mlp_entries(
    config: ModelConfig, name: str, hf: str, *, inner: int | None = None, bias: bool = False
) -> list[Entry]:
    """Return the entries of a `GatedMLP` whose HF tensors are gate_proj, up_proj and down_proj.

    Args:
        name, hf: the names of the module in the model and in the checkpoint.
        inner: width of gate and up; the default is config.intermediate_size.
        bias: whether the projections have a bias.
    """
    hidden, inner = config.hidden_size, inner or config.intermediate_size
    gate_up = (f"{hf}.gate_proj", inner), (f"{hf}.up_proj", inner)
    return [
        *linear_entries(f"{name}.gate_up_proj", hidden, *gate_up, bias=bias),
        *linear_entries(f"{name}.down_proj", inner, (f"{hf}.down_proj", hidden), bias=bias),
    ]


def packed_attention_entries(config: ModelConfig, name: str, hf: str) -> list[Entry]:
    """Return the entries of an `Attention` whose HF tensors are qkv_proj and o_proj, as in Phi-3.

    Args: name, hf: the names of the module in the model and in the checkpoint.
    """
    hidden, head = config.hidden_size, config.head_dim
    q_rows = config.num_attention_heads * head
    rows = q_rows + 2 * config.num_key_value_heads * head
    return [
        *linear_entries(f"{name}.qkv_proj", hidden, (f"{hf}.qkv_proj", rows)),
        *linear_entries(f"{name}.o_proj", q_rows, (f"{hf}.o_proj", hidden)),
    ]


def packed_mlp_entries(
    config: ModelConfig, name: str, gate_up: str, down: str, inner: int
) -> list[Entry]:
    """Return the entries of a `GatedMLP` whose HF tensors are two, gate and up together in one.

    Args:
        name: the name of the module in the model.
        gate_up, down: the names of the linears in the checkpoint.
        inner: width of gate and up.
    """
    hidden = config.hidden_size
    return [
        *linear_entries(f"{name}.gate_up_proj", hidden, (gate_up, 2 * inner)),
        *linear_entries(f"{name}.down_proj", inner, (down, hidden)),
    ]


def experts_entries(
    config: ModelConfig,
    name: str,
    hf: str,
    *,
    count: int,
    inner: int,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Entry]:
    """Return the entries of an `Experts` whose HF tensors are those of each expert alone.

    The router's weight is `gate.weight` there, and the experts' are `experts.0.gate_proj.weight`
    and so on.

    Args:
        name, hf: the names of the module in the model and in the checkpoint.
        count: number of experts.
        inner: width of gate and up of one expert.
        projections: HF's names of gate, up and down.
    """
    hidden, (gate, up, down) = config.hidden_size, projections
    each = [f"{hf}.experts.{expert}" for expert in range(count)]
    gate_up = [(f"{expert}.{which}.weight", inner) for expert in each for which in (gate, up)]
    return [
        *linear_entries(f"{name}.router", hidden, (f"{hf}.gate", count)),
        packed_entry(f"{name}.gate_up_proj", (hidden,), *gate_up),
        packed_entry(
            f"{name}.down_proj", (inner,), *((f"{e}.{down}.weight", hidden) for e in each)
        ),
    ]


def fused_experts_entries(
    config: ModelConfig, name: str, hf: str, *, count: int, inner: int
) -> list[Entry]:
    """Return the entries of an `Experts` whose HF tensors are those of all experts together.

    They are `experts.gate_up_proj` (experts, 2 * inner, hidden) and `experts.down_proj` (experts,
    hidden, inner). The arguments are those of `experts_entries`.
    """
    hidden, source = config.hidden_size, f"{hf}.experts"
    return [
        *linear_entries(f"{name}.router", hidden, (f"{hf}.gate", count)),
        expert_entry(f"{name}.gate_up_proj", (hidden,), f"{source}.gate_up_proj", count, 2 * inner),
        expert_entry(f"{name}.down_proj", (inner,), f"{source}.down_proj", count, hidden),
    ]


def decoder_weight_map(
    config: ModelConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    norms: Sequence[str] | Mapping[str, str] = ("input_layernorm", "post_attention_layernorm"),
    norm_bias: bool = False,
    final_norm: bool = True,
    attention: LayerEntries | None = None,
    mlp: LayerEntries | None = None,
    mlp_layouts: Mapping[str, LayerEntries] | None = None,
    towers: Towers | None = None,
) -> WeightMap:
    """Return the weight map of a decoder with packed q/k/v and gate/up.

    It has an entry for the head unless the head is tied; the other parameters are only renamed.

    Args:
        qkv_bias, out_bias, mlp_bias: whether these projections have a bias.
        head_norms: whether q and k have norms over head_dim.
        norms: names of a block's norms over the hidden size, or a dict to HF's names where these
            differ. An export writes the first one before attention and the others after it. Norms
            without a weight, as in OLMo, are left out: `norms=()`.
        norm_bias: whether these norms and the final norm have a bias.
        final_norm: whether the final norm has a weight.
        attention, mlp: a function that returns the entries of a layer's `self_attn` or `mlp`, for a
            family where they differ from `attention_entries` and `mlp_entries`.
        mlp_layouts: name of another layout that a checkpoint may have -> a function that returns
            the entries of a layer's `mlp` in it.
        towers: the other tensors that a checkpoint of the family may hold, such as a vision tower.
    """
    hidden = config.hidden_size
    embedding = ("model.embed_tokens.weight", config.vocab_size)
    entries: list[Entry] = [packed_entry("embed_tokens.weight", (hidden,), embedding)]

    def default_attention(index: int, name: str, hf: str) -> Iterable[Entry]:
        return attention_entries(
            config, name, hf, qkv_bias=qkv_bias, out_bias=out_bias, head_norms=head_norms
        )

    def default_mlp(index: int, name: str, hf: str) -> Iterable[Entry]:
        return mlp_entries(config, name, hf, bias=mlp_bias)

    attention, mlp = attention or default_attention, mlp or default_mlp
    hf_norms = norms if isinstance(norms, Mapping) else dict(zip(norms, norms))
    for i in range(config.num_hidden_layers):
        block, hf = f"layers.{i}", f"model.layers.{i}"
        of_norms = [
            norm_entries(f"{block}.{name}", f"{hf}.{norm}", hidden, bias=norm_bias)
            for name, norm in hf_norms.items()
        ]
        entries += [
            *(entry for each in of_norms[:1] for entry in each),
            *attention(i, f"{block}.self_attn", f"{hf}.self_attn"),
            *(entry for each in of_norms[1:] for entry in each),
            *mlp(i, f"{block}.mlp", f"{hf}.mlp"),
        ]
    if final_norm:
        entries += norm_entries("norm", "model.norm", hidden, bias=norm_bias)
    aliases = {}
    if config.tie_word_embeddings:
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    else:
        entries += linear_entries("head.proj", hidden, ("lm_head", config.vocab_size))
    layouts = {
        layout: tuple(
            entry
            for i in range(config.num_hidden_layers)
            for entry in made(i, f"layers.{i}.mlp", f"model.layers.{i}.mlp")
        )
        for layout, made in (mlp_layouts or {}).items()
    }
    ignored = ("rotary_emb.inv_freq",)
    return WeightMap(tuple(entries), aliases, ignored, towers=towers, layouts=layouts)
