"""Write the file of a new family: what config.json and the weights' headers tell, and what is open.

The file is for a decoder whose tensors are named as those of Llama: `family.py.jinja` has its text.
What the headers cannot tell is listed in its docstring, and `check_family` then finds out which of
the answers are wrong.
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import jinja2

from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.hf_config import read_config
from ligermodels.errors import ConfigError, short_repr
from ligermodels.models.config import ModelConfig

# What a layer may have that this file cannot begin with -> the file to begin with.
_ELSEWHERE = {
    r"experts\.|block_sparse_moe": "experts: ligermodels/models/qwen3_moe.py",
    r"qkv_proj|query_key_value|c_attn|gate_up_proj": "packed tensors: ligermodels/models/phi3.py",
    r"fc1|c_fc": "an MLP without a gate: examples/families/starcoder2.py",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PRE, _POST = "input_layernorm", "post_attention_layernorm"
_BEFORE, _AFTER = "pre_feedforward_layernorm", "post_feedforward_layernorm"
_NORMS = ((_PRE, _POST), (_POST, _AFTER), (_PRE, _POST, _BEFORE, _AFTER), (_PRE,))
# Other names of the norms' epsilon.
_EPSILON = ("layer_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
# Keys of config.json that the file reads besides those of `ModelConfig`: those of arguments of
# `Attention`, of arguments of `build`, and others.
_OF_ATTENTION = {
    "sliding_window": "sliding_window=config.sliding_windows[layer_index]",
    "partial_rotary_factor": "rotary_dim=config.rotary_dim",
    "attention_multiplier": "scale=config.attention_multiplier",
    "query_pre_attn_scalar": "scale=config.query_pre_attn_scalar**-0.5",
    "attn_logit_softcapping": "softcap=config.attn_logit_softcapping",
}
_OF_BUILD = {
    "embedding_multiplier": "embedding_scale=config.embedding_multiplier",
    "logits_scaling": "logit_scale=1 / config.logits_scaling",
    "logit_scale": "logit_scale=config.logit_scale",
    "final_logit_softcapping": "logit_softcap=config.final_logit_softcapping",
}
_USED = ("attention_bias", "mlp_bias", "layer_types", "residual_multiplier")
# Keys of every config of transformers that change nothing here.
_SILENT = frozenset(
    "model_type architectures dtype torch_dtype rope_theta rope_scaling rope_parameters use_cache "
    "transformers_version pretraining_tp _name_or_path id2label label2id return_dict "
    "chunk_size_feed_forward max_window_layers".split()
)
_KINDS = {bool: "bool", int: "int", float: "float", str: "str", list: "list[str]"}


def skeleton(name: str, folder: Path) -> str:
    """Return the text of the file of a family.

    Args: name: of the file, such as olmo2; folder: a local checkpoint of the family.
    Raises:
        ConfigError: the tensors are not named as those of Llama, or a layer has what this file
            cannot begin with; the message says what to begin with instead.
        CheckpointError: the folder has no config.json, or no weights.
    """
    raw = read_config(folder)
    shapes = {key: tuple(each.shape) for key, each in Checkpoint(folder).tensors.items()}
    start = "model.layers.0."
    layer = {key.removeprefix(start): s for key, s in shapes.items() if key.startswith(start)}
    for pattern, where in _ELSEWHERE.items():
        if odd := next((key for key in layer if re.search(pattern, key)), None):
            raise ConfigError(f"{folder}: {start}{odd}: the family has {where} is where to begin")
    parts = {key.rpartition(".")[0].rpartition(".")[2] for key in layer}
    if missing := [each for each in _PROJECTIONS if each not in parts]:
        raise ConfigError(
            f"{folder}: no {missing[0]} in {start[:-1]}: the tensors are not named as those of "
            "Llama, and the weight map has to be written by hand (docs/adding_a_family.md)"
        )
    norms = tuple(n for n in (_PRE, _POST, _BEFORE, _AFTER) if n in parts)
    if norms not in _NORMS:
        raise ConfigError(
            f"{folder}: a layer has the norms {short_repr(norms)}, for which there is no pattern; "
            "begin with a file of examples/families"
        )
    defaults, whose = _defaults(raw)
    for each in (raw, defaults):  # transformers 5 keeps it among rope's values
        rope = each.get("rope_parameters")
        if isinstance(rope, dict) and "partial_rotary_factor" in rope:
            each["partial_rotary_factor"] = rope["partial_rotary_factor"]
    both = {**defaults, **raw}
    used = [k for k in (*_USED, *_OF_ATTENTION, *_OF_BUILD) if both.get(k) is not None]
    activation = next((k for k in ("hidden_activation", "hidden_act") if k in raw), "hidden_act")
    epsilon = next((key for key in _EPSILON if key in both), None)
    if epsilon is not None:
        defaults["rms_norm_eps"] = both[epsilon]
    biased = {each for each in parts if f"{each}.bias" in {k.split(".", 1)[-1] for k in layer}}
    usual = "".join(x.capitalize() for x in str(raw.get("model_type")).split("_")) + "ForCausalLM"
    own = next(iter(raw.get("architectures") or ()), usual)
    head = both.get("head_dim") or both["hidden_size"] // both["num_attention_heads"]
    q_norm = layer.get("self_attn.q_norm.weight")
    norm = "LayerNorm" if f"{norms[0]}.bias" in layer else "RMSNorm"

    def bias(key: str, part: str) -> str:
        # A checkpoint that sets the key shows which of the projections it is for.
        there = part in biased
        return f"config.{key}" if key in used and (there or not raw.get(key)) else str(there)

    known = {each.name for each in fields(ModelConfig)} | {activation, epsilon, *used} | _SILENT
    odd_keys = {k: v for k, v in raw.items() if k not in known and v not in (None, False)}
    strange = sorted(parts - {*norms, "q_norm", "k_norm", *_PROJECTIONS} - {""})
    answers = [
        f"{len(shapes)} tensors, {raw.get('num_hidden_layers')} layers",
        "the head is " + ("stored" if "lm_head.weight" in shapes else "tied"),
        f"norms of a layer: {', '.join(norms)} ({norm})",
        f"shape of the norm of queries: {q_norm or 'there is none'}",
        f"projections with a bias: {', '.join(sorted(biased)) or 'none'}",
        f"keys that are used: {', '.join([activation, *used])}",
    ]
    usual_keys = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    usual_keys |= {"model.norm.bias"} if norm == "LayerNorm" else set()
    around = [k for k in shapes if not k.startswith("model.layers.") and k not in usual_keys]
    questions = [
        *(
            f"Does {k}, which is {short_repr(v)}, change the computation?"
            for k, v in odd_keys.items()
        ),
        *(f"What does {each} of a layer compute?" for each in strange),
        *(f"What does {key} compute? It is outside of the layers." for key in around[:5]),
        *(f"Why does {x} differ from layer 0 in {y}?" for x, y in _other_layers(shapes).items()),
    ]
    if layer["self_attn.q_proj.weight"][0] != head * both["num_attention_heads"]:
        questions.append("What are the rows of q_proj beside queries? An output_gate, perhaps.")
    template = Path(__file__).with_name("family.py.jinja").read_text("utf-8")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(template).render(
        title="".join(word.capitalize() for word in re.split(r"[_\W]+", name)),
        source=folder.name,
        model_type=raw.get("model_type"),
        architecture="" if own == usual else own,
        activation=activation,
        epsilon=epsilon,
        square=head * both["num_attention_heads"] == both["hidden_size"],
        whose=whose,
        fields=_fields(raw, defaults, (activation, *used)),
        used=used,
        norm=norm,
        norms=norms,
        _PRE=_PRE,
        over_heads=q_norm is not None and q_norm != (head,),
        head_norms=q_norm == (head,),
        qkv_bias=bias("attention_bias", "q_proj"),
        out_bias=bias("attention_bias", "o_proj"),
        mlp_bias=bias("mlp_bias", "down_proj"),
        of_attention=[x for key, x in _OF_ATTENTION.items() if key in used],
        of_build=[x for key, x in _OF_BUILD.items() if key in used],
        answers=_listed(answers),
        questions=_listed(questions),
    )


def _fields(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], more: Iterable[str]
) -> dict[str, tuple[str, str]]:
    """Return the annotation and the default of each field that `ModelConfig` lacks or has else."""
    base = {
        x.name: (x.type.__name__ if isinstance(x.type, type) else str(x.type), x.default)
        for x in fields(ModelConfig)
    }
    found = {}
    for key in (*base, *more):
        value = None if key == "layer_types" else defaults.get(key, raw.get(key))
        kind, usual = base.get(key, ("", MISSING))
        if key in ("dtype", "extra", "rope_scaling", "attention_dropout") or value == usual:
            continue
        if not kind:
            kind = _KINDS.get(type(raw.get(key) if value is None else value), "int")
            optional = value is None or key == "sliding_window"
            kind += " | None" * optional
        found[key] = kind, json.dumps(value) if isinstance(value, str) else repr(value)
    return found


def _other_layers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the first layer that has other tensors or shapes than layer 0, and one of them."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key):
            layers.setdefault(found[1], {})[found[2]] = shape
    for number, layer in sorted(layers.items(), key=lambda item: int(item[0])):
        if odd := sorted(layer.items() ^ layers["0"].items()):
            return {f"layer {number}": odd[0][0]}
    return {}


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(textwrap.fill(f"- {x}", 96, subsequent_indent="  ") for x in lines)


def _defaults(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the defaults of transformers' config class, or else the values of this config.json."""
    known = None
    with contextlib.suppress(ImportError):
        from ligermodels.integrations.hf_reference import config_defaults

        known = config_defaults(str(raw.get("model_type")))
    found, whose = (dict(raw), "this checkpoint's") if known is None else (known, "HF's")
    rope = found.get("rope_parameters") or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    found.setdefault("rope_theta", theta or raw.get("rope_theta", 10000.0))
    # What ModelConfig derives by itself.
    if found.get("num_key_value_heads") == found.get("num_attention_heads"):
        found["num_key_value_heads"] = None
    if found.get("head_dim") == found["hidden_size"] // found["num_attention_heads"]:
        found["head_dim"] = None
    return found, whose
