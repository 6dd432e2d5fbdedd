"""The weight map that all families share, with options for their differences."""

from ligermodels.converters.weight_map import Entry, Towers, WeightMap, linear, norm, packed
from ligermodels.models.config import ModelConfig


def decoder_weight_map(
    config: ModelConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    towers: Towers | None = None,
) -> WeightMap:
    """Return the weight map of a decoder with packed q/k/v and gate/up.

    It has an entry for the head unless the head is tied; the other parameters are only renamed.

    Args:
        qkv_bias, out_bias, mlp_bias: whether these projections have a bias.
        head_norms: whether q and k have norms over head_dim.
        norms: names of a block's norms over the hidden size, which are the same in HF. An export
            writes the first one before attention and the others after it.
        towers: the other tensors that a checkpoint of the family may hold, such as a vision tower.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    embedding = ("model.embed_tokens.weight", config.vocab_size)
    entries: list[Entry] = [packed("embed_tokens.weight", (hidden,), embedding)]
    for i in range(config.num_hidden_layers):
        block, hf = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
        qkv = (
            (f"{attention}.q_proj", q_rows),
            (f"{attention}.k_proj", kv_rows),
            (f"{attention}.v_proj", kv_rows),
        )
        gate_up = (f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)
        o_proj, down_proj = (f"{attention}.o_proj", hidden), (f"{mlp}.down_proj", hidden)
        entries += [
            norm(f"{block}.{norms[0]}", f"{hf}.{norms[0]}", hidden),
            *linear(f"{block}.self_attn.qkv_proj", hidden, *qkv, bias=qkv_bias),
            *(
                norm(f"{block}.self_attn.{name}", f"{attention}.{name}", config.head_dim)
                for name in ("q_norm", "k_norm")
                if head_norms
            ),
            *linear(f"{block}.self_attn.o_proj", q_rows, o_proj, bias=out_bias),
            *(norm(f"{block}.{name}", f"{hf}.{name}", hidden) for name in norms[1:]),
            *linear(f"{block}.mlp.gate_up_proj", hidden, *gate_up, bias=mlp_bias),
            *linear(f"{block}.mlp.down_proj", inner, down_proj, bias=mlp_bias),
        ]
    entries.append(norm("norm", "model.norm", hidden))
    aliases = {}
    if config.tie_word_embeddings:
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    else:
        entries += linear("head.proj", hidden, ("lm_head", config.vocab_size))
    return WeightMap(tuple(entries), aliases, ignored=("rotary_emb.inv_freq",), towers=towers)
