"""Write the file of a new family: what config.json and the weights' headers tell, and what is open.

The file is for a decoder whose tensors are named as those of Llama. What the headers cannot tell is
listed in its docstring, and `check_family` then finds out which of the answers are wrong.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

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
# Other names of the norms' epsilon.
_EPSILON = ("layer_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
# Keys of config.json that the file reads besides those of `ModelConfig` -> how it uses them.
_USED = {
    "attention_bias": "",
    "mlp_bias": "",
    "sliding_window": "",
    "layer_types": "",
    "partial_rotary_factor": "rotary_dim=config.rotary_dim",
    "attention_multiplier": "scale=config.attention_multiplier",
    "query_pre_attn_scalar": "scale=config.query_pre_attn_scalar**-0.5",
    "attn_logit_softcapping": "softcap=config.attn_logit_softcapping",
    "embedding_multiplier": "embedding_scale=config.embedding_multiplier",
    "logits_scaling": "logit_scale=1 / config.logits_scaling",
    "logit_scale": "logit_scale=config.logit_scale",
    "final_logit_softcapping": "logit_softcap=config.final_logit_softcapping",
    "residual_multiplier": "",
}
# Keys of every config of transformers that change nothing here.
_SILENT = frozenset(
    "model_type architectures dtype torch_dtype rope_theta rope_scaling rope_parameters use_cache "
    "transformers_version pretraining_tp _name_or_path id2label label2id return_dict "
    "chunk_size_feed_forward max_window_layers layer_norm_eps".split()
)
_OF_BUILD = ("embedding_multiplier", "logits_scaling", "logit_scale", "final_logit_softcapping")
_PRE, _POST = "input_layernorm", "post_attention_layernorm"
_BEFORE, _AFTER = "pre_feedforward_layernorm", "post_feedforward_layernorm"
# A layer's norms -> what its forward computes. `x` and `residual` are a pair to be added.
_FORWARDS = {
    (_PRE, _POST): """\
        x, residual = self.self_attn(pre_norm(self.input_layernorm, x, residual), context)
        x, residual = self.mlp(pre_norm(self.post_attention_layernorm, {x}, residual))
        return {x}, residual
""",
    (_POST, _AFTER): """\
        x = x if residual is None else x + residual
        x = x + {post}self.post_attention_layernorm(self.self_attn(x, context))
        return {post}self.post_feedforward_layernorm(self.mlp(x)), x
""",
    (_PRE, _POST, _BEFORE, _AFTER): """\
        x, residual = self.self_attn(pre_norm(self.input_layernorm, x, residual), context)
        x = {post}self.post_attention_layernorm(x)
        x, residual = self.mlp(pre_norm(self.pre_feedforward_layernorm, x, residual))
        return {post}self.post_feedforward_layernorm(x), residual
""",
    (_PRE,): """\
        x = x if residual is None else x + residual
        normed = self.input_layernorm(x)
        return {post}(self.self_attn(normed, context) + self.mlp(normed)), x
""",
}
_FILE = '''\
"""{title}: a family that `ligermodels new-family` has begun.

Read from {source}:
{answers}

Open, because neither config.json nor the names and shapes of the tensors tell it:
{questions}
"""

{imports}

@dataclass(kw_only=True)
class {title}Config(lm.ModelConfig):
    """Fields of its `config.json`, under HF's names and with {whose} defaults."""

    model_type: ClassVar[str] = "{model_type}"
{attributes}
{fields}
{property}

def weight_map(config: {title}Config) -> lm.WeightMap:
    """Return the map from parameters to the tensors of a checkpoint."""
{map}


{norm_class}class {title}Block(nn.Module):
    """A layer, with the norms {norms}."""

    def __init__(self, config: {title}Config, layer_index: int) -> None:
        super().__init__()
        hidden, eps, head = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.self_attn = Attention(
            *(hidden, heads, kv_heads, head),
{attention}
        )
        self.mlp = GatedMLP(
            hidden, config.intermediate_size, bias={mlp_bias}, activation=config.activation
        )
{norm_lines}

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the output, like that of the inputs."""
{forward}

@lm.register
class Liger{title}(lm.DecoderModel):
    """The model, built from fused layers."""

    config_class = {title}Config
    config: {title}Config
    weight_map = staticmethod(weight_map)

    def __init__(self, config: {title}Config) -> None:
        super().__init__(config)
{build}

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer."""
        return {title}Block(self.config, layer_index)
'''
_ALL_HEADS = '''\
class AllHeadsNorm({norm}):
    """A norm over all heads of a token at once."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (batch, seq, heads, head_dim)."""
        return super().forward(x.flatten(-2)).view_as(x)


'''
_ATTENTION = """\

    def attention(index: int, name: str, hf: str) -> Iterator[lm.Entry]:
{entries}
        heads = {{"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}}
        for norm, count in heads.items():
            size = count * config.head_dim
            yield from lm.norm_entries(f"{{name}}.{{norm}}", f"{{hf}}.{{norm}}", size)

"""
_ALWAYS_OPEN = (
    "Do norms subtract the mean? Then they are LayerNorm(hidden, eps, bias=False).",
    "Is 1 added to the norms' weights? Then pass offset=1.0.",
    "Do norms multiply by the weight before they round? Then pass casting_mode='gemma'.",
    "Does rope rotate neighbours (x[..., ::2]) and not halves? Then interleaved_rope=True.",
    "Is nn.Embedding made without padding_idx? Then trains_padding=True of build.",
)


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
    wanted = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
    wanted |= {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    if missing := sorted(wanted - layer.keys()):
        raise ConfigError(
            f"{folder}: {start}{missing[0]} is missing: the tensors are not named as those of "
            "Llama, and the weight map has to be written by hand (docs/adding_a_family.md)"
        )
    norms = tuple(n for n in (_PRE, _POST, _BEFORE, _AFTER) if f"{n}.weight" in layer)
    if norms not in _FORWARDS:
        raise ConfigError(
            f"{folder}: a layer has the norms {short_repr(norms)}, for which there is no pattern; "
            "begin with a file of examples/families"
        )
    return _written(name, folder, raw, shapes, layer, norms)


def _written(
    name: str,
    folder: Path,
    raw: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    layer: Mapping[str, tuple[int, ...]],
    norms: tuple[str, ...],
) -> str:
    title = "".join(word.capitalize() for word in re.split(r"[_\W]+", name))
    defaults, whose = _defaults(raw)
    known = {each.name for each in fields(ModelConfig)}
    used = [key for key in _USED if raw.get(key, defaults.get(key)) is not None]
    activation = next((k for k in ("hidden_activation", "hidden_act") if k in raw), "hidden_act")
    epsilon = next((key for key in _EPSILON if key in {**defaults, **raw}), None)
    norm_bias = f"{norms[0]}.bias" in layer
    norm = "LayerNorm" if norm_bias else "RMSNorm"
    head, rows = (
        defaults.get("head_dim") or raw.get("head_dim"),
        layer["self_attn.q_proj.weight"][0],
    )
    head = head or rows // raw["num_attention_heads"]
    q_norm = layer.get("self_attn.q_norm.weight")
    over_heads = q_norm is not None and q_norm != (head,)

    has = {part: f"{part}.bias" in layer for part in ("self_attn.q_proj", "self_attn.o_proj")}
    bias = {
        part: "config.attention_bias" if "attention_bias" in used else str(there)
        for part, there in has.items()
    }
    if raw.get("attention_bias") and has["self_attn.q_proj"] and not has["self_attn.o_proj"]:
        bias["self_attn.o_proj"] = "False"
    mlp_bias = "config.mlp_bias" if "mlp_bias" in used else str("mlp.down_proj.bias" in layer)

    attention = [f"bias={bias['self_attn.q_proj']},"]
    if bias["self_attn.o_proj"] != bias["self_attn.q_proj"]:
        attention.append(f"out_bias={bias['self_attn.o_proj']},")
    if q_norm is not None:
        kind = "AllHeadsNorm" if over_heads else norm
        sizes = ("heads * head", "kv_heads * head") if over_heads else ("head", "head")
        attention += [f"{x}_norm={kind}({size}, eps)," for x, size in zip("qk", sizes)]
    attention += [f"{_USED[key]}," for key in used if _USED[key] and key not in _OF_BUILD]
    if "sliding_window" in used:
        attention.append("sliding_window=config.sliding_windows[layer_index],")
    attention.append("layer_index=layer_index,")

    made = [f"norm={norm}(config.hidden_size, config.rms_norm_eps),"]
    made += [f"{_USED[key]}," for key in used if key in _OF_BUILD]
    attributes = [f'    activation_field = "{activation}"'] * (activation != "hidden_act")
    usual = "".join(x.capitalize() for x in str(raw.get("model_type")).split("_")) + "ForCausalLM"
    if (own := next(iter(raw.get("architectures") or ()), usual)) != usual:
        attributes.append(f'    architecture = "{own}"')
    if epsilon is not None:
        attributes.append(
            f'    key_aliases: ClassVar[dict[str, str]] = {{"{epsilon}": "rms_norm_eps"}}'
        )
        defaults = {**defaults, "rms_norm_eps": defaults.get(epsilon, raw.get(epsilon, 1e-6))}

    told = {each.name: each.default for each in fields(ModelConfig)}
    lines = []
    for key in (*told, activation, *used):
        value = defaults.get(key, raw.get(key))
        if key in ("dtype", "extra", "rope_scaling", "attention_dropout") or (
            told.get(key, MISSING) == value
        ):
            continue
        if key == "layer_types" or (value is None and key in told):
            value = None
        kinds = {bool: "bool", int: "int", float: "float", str: "str"}
        kind = kinds.get(type(raw.get(key) if value is None else value), "int")
        if key in ("sliding_window", "layer_types", "pad_token_id", "bos_token_id"):
            kind = "list[str] | None" if key == "layer_types" else "int | None"
        elif key == "eos_token_id":
            kind = "int | list[int] | None"
        elif value is None and key not in told:
            kind += " | None"
        lines.append(f"    {key}: {kind} = {_text(value)}")

    windows = ""
    if "sliding_window" in used:
        body = "return [self.sliding_window] * self.num_hidden_layers"
        if "layer_types" in used:
            body = (
                'types = self.layer_types or ["full_attention"] * self.num_hidden_layers\n'
                "        return windows_from_types(types, self.sliding_window)"
            )
        windows = (
            "\n    @property\n    def sliding_windows(self) -> list[int | None]:\n"
            f'        """The window of each layer."""\n        {body}\n'
        )
    arguments = [
        *(
            f"norms=({', '.join(map(_text, norms))}{',' * (len(norms) == 1)}),"
            for _ in range(norms != (_PRE, _POST))
        ),
        *(
            f"{k}={v},"
            for k, v in (
                ("qkv_bias", bias["self_attn.q_proj"]),
                ("out_bias", bias["self_attn.o_proj"]),
                ("mlp_bias", mlp_bias),
                ("norm_bias", str(norm_bias)),
                ("head_norms", str(q_norm is not None and not over_heads)),
            )
            if v != "False"
        ),
    ]
    of_map = ""
    if over_heads:
        flags = [x for x in arguments if x.startswith(("qkv_", "out_"))]
        arguments = ["attention=attention,", *(x for x in arguments if x not in flags)]
        start = "        yield from lm.attention_entries"
        of_map = _ATTENTION.format(entries=_call(start, ["config,", "name,", "hf,", *flags]))
    of_map += _call("    return lm.decoder_weight_map", ["config,", *arguments])
    factor = "config.residual_multiplier * " if "residual_multiplier" in used else ""
    forward = _FORWARDS[norms]
    forward = forward.replace("{x}", "self.factor * x" if factor else "x")
    forward = forward.replace("{post}", "self.factor * " if factor else "")
    of_layer = {key.rpartition(".")[0].split(".")[-1] for key in layer}
    left = sorted(
        of_layer
        - {*norms, "q_norm", "k_norm"}
        - {f"{x}_proj" for x in "qkvo"}
        - {"gate_proj", "up_proj", "down_proj"}
    )
    harmless = known | {activation, epsilon, *used} | _SILENT
    odd = {k: v for k, v in raw.items() if k not in harmless and v is not None and v is not False}
    answers = [
        f"{len(shapes)} tensors, {raw.get('num_hidden_layers')} layers; the head is "
        + ("stored" if "lm_head.weight" in shapes else "tied"),
        f"norms of a layer: {', '.join(norms)} ({norm})",
        "queries and keys are normed "
        + ("not" if q_norm is None else "over all heads" if over_heads else "in each head"),
        f"biases: q, k, v {has['self_attn.q_proj']}, o {has['self_attn.o_proj']}, MLP "
        f"{'mlp.down_proj.bias' in layer}",
        f"keys that are used: {', '.join([activation, *used])}",
    ]
    questions = [
        *(
            f"config.json: {key} is {short_repr(value)}. Does it change what is computed?"
            for key, value in odd.items()
        ),
        *(f"{key}: a layer has this module. What does it compute?" for key in left),
        *_ALWAYS_OPEN,
    ]
    imports = _imports(norm, over_heads, "pre_norm(" in forward, "windows_from_types" in windows)
    return _FILE.format(
        title=title,
        source=folder.name,
        imports=imports,
        whose=whose,
        norms=", ".join(norms),
        model_type=raw.get("model_type"),
        answers=_listed(answers),
        questions=_listed(questions),
        attributes="\n".join(attributes),
        fields="\n".join(lines),
        property=windows,
        map=of_map,
        norm_class=_ALL_HEADS.format(norm=norm) if over_heads else "",
        attention="\n".join(f"            {x}" for x in attention),
        mlp_bias=mlp_bias,
        norm_lines="\n".join(
            [f"        self.{x} = {norm}(hidden, eps)" for x in norms]
            + ["        self.factor = config.residual_multiplier"] * bool(factor)
        ),
        forward=forward,
        build=_call("        self.build", made),
    )


def _listed(lines: list[str]) -> str:
    return "\n".join(textwrap.fill(f"- {x}", 96, subsequent_indent="  ") for x in lines)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _call(start: str, arguments: list[str]) -> str:
    """Return a call in one line, or with a line for each argument if that is too long."""
    line = f"{start}({' '.join(arguments).rstrip(',')})"
    space = " " * (len(start) - len(start.lstrip()))
    inner = "".join(f"{space}    {each}\n" for each in arguments)
    return line if len(line) <= 100 else f"{start}(\n{inner}{space})"


def _defaults(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the defaults of transformers' config class, or else the values of this config.json."""
    try:
        from transformers import CONFIG_MAPPING

        found, whose = CONFIG_MAPPING[raw["model_type"]]().to_dict(), "HF's"
    except (ImportError, KeyError):
        found, whose = dict(raw), "this checkpoint's"
    rope = found.get("rope_parameters") or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    found.setdefault("rope_theta", theta or raw.get("rope_theta", 10000.0))
    # What ModelConfig derives by itself.
    if found.get("num_key_value_heads") == found.get("num_attention_heads"):
        found["num_key_value_heads"] = None
    if found.get("head_dim") == found["hidden_size"] // found["num_attention_heads"]:
        found["head_dim"] = None
    return found, whose


def _imports(norm: str, over_heads: bool, fuses: bool, types: bool) -> str:
    first = ["from collections.abc import Iterator"] * over_heads
    layers = ["Attention", "AttentionContext", "GatedMLP", norm, *["pre_norm"] * fuses]
    return "\n".join(
        [
            *first,
            "from dataclasses import dataclass",
            "from typing import ClassVar",
            "",
            "from torch import Tensor, nn",
            "",
            "import ligermodels as lm",
            f"from ligermodels.layers import {', '.join(layers)}",
            *["from ligermodels.models.config import windows_from_types"] * types,
            "",
        ]
    )
