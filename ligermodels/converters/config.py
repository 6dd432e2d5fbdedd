"""config.json to the keyword arguments of a family's config class, and back.

The incoming dict is kept whole under `extra`, so that an export gives back every key. Rope and
dtype fields have an old and a new spelling: both are read, in transformers' order of precedence,
and both are written.
"""

import copy
import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ligermodels.converters.files import CONFIG, read_json
from ligermodels.errors import CheckpointError, ConfigError, printable, shown

# Known keys that change the maths and are not implemented, with the values that change nothing.
# None (null) and absence always count among these.
REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
}
QUANTISED = ("quantization_config", "compression_config")
# Read here or without a bearing on the maths: not worth showing as unknown.
HARMLESS = frozenset(
    "model_type architectures dtype torch_dtype rope_theta rope_scaling rope_parameters "
    "original_max_position_embeddings transformers_version use_cache pretraining_tp "
    "_name_or_path".split()
)
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
_HAS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_DEFAULT_THETA = 10000.0


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in `folder`/config.json, as it is.

    Raises:
        CheckpointError: there is no such folder or file.
        ConfigError: the file is not a JSON object, or has a key twice.
    """
    path = Path(folder) / CONFIG
    if not os.path.exists(path):
        what = "is missing" if os.path.isdir(folder) else "is missing: there is no such folder"
        raise CheckpointError(f"{path}: {what}")
    return read_json(path, ConfigError)


def fields_from_hf(raw: dict[str, Any], cls: Any, source: str) -> dict[str, Any]:
    """Keyword arguments for the config dataclass `cls`; `extra` holds a copy of `raw`.

    Args: source is the file that messages name.
    Raises:
        ConfigError: another model_type, a key that is not implemented, a value of the wrong type,
            an unknown rope type. Sizes are left to `cls` to judge.
    """
    model_type = raw.get("model_type")
    if model_type != cls.model_type:
        raise ConfigError(
            f"{source}: 'model_type' is {shown(model_type)}; this class reads {cls.model_type!r}"
        )
    _refuse(raw, source)
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if item.name in raw and item.name not in ("extra", "dtype", "rope_theta", "rope_scaling"):
            value = raw[item.name]
            # null means "the default", except that a model can have no such token.
            if value is None and not item.name.endswith("_token_id"):
                continue
            _check_type(item, value, source)
            fields[item.name] = copy.deepcopy(value)
    fields["rope_theta"], fields["rope_scaling"] = _rope(raw, source)
    if (dtype := _dtype(raw, source)) is not None:
        fields["dtype"] = dtype
    fields["extra"] = copy.deepcopy(raw)
    return fields


def unknown_keys(raw: dict[str, Any], cls: Any) -> dict[str, Any]:
    """The keys of a config.json that nothing here reads; they are kept, and exported again."""
    known = HARMLESS | REFUSED.keys() | {item.name for item in dataclasses.fields(cls)}
    return {key: value for key, value in raw.items() if key not in known}


def to_hf(config: Any) -> dict[str, Any]:
    """The config.json of an export.

    Keys that came in and whose meaning was not changed since come out as they were; changed
    fields, fields of a config made in Python, and absent second spellings are written.
    """
    cls = type(config)
    raw = copy.deepcopy(config.extra)
    names = {item.name for item in dataclasses.fields(cls)} - {"extra"}
    if raw:
        before = cls(**fields_from_hf(raw, cls, CONFIG))
        changed = {name for name in names if getattr(config, name) != getattr(before, name)}
    else:
        changed = names
    raw.setdefault("architectures", [f"{cls.model_type.capitalize()}ForCausalLM"])
    raw["model_type"] = cls.model_type
    for item in dataclasses.fields(cls):
        if item.name in changed - {"dtype", "rope_theta", "rope_scaling"}:
            raw[item.name] = copy.deepcopy(getattr(config, item.name))
    _write_rope(raw, config, bool(changed & {"rope_theta", "rope_scaling"}))
    if config.dtype is not None:
        for key in ("dtype", "torch_dtype"):
            if "dtype" in changed or raw.get(key) is None:
                raw[key] = config.dtype
    return raw


def _refuse(raw: dict[str, Any], source: str) -> None:
    for key in QUANTISED:
        if raw.get(key) is not None:
            method = raw[key].get("quant_method") if isinstance(raw[key], dict) else raw[key]
            raise ConfigError(
                f"{source}: {key!r}: quantised checkpoints ({shown(method)}) are not supported; "
                "load the one it was made from, in float32, bfloat16 or float16"
            )
    for key, harmless in REFUSED.items():
        value = raw.get(key)
        if value is not None and value not in harmless:
            raise ConfigError(
                f"{source}: {key!r} is {shown(value)}, which changes the maths and is not "
                "implemented"
            )


def _check_type(item: dataclasses.Field[Any], value: Any, source: str) -> None:
    """Refuse what JSON can hold and the field cannot; its default shows the type."""
    if isinstance(item.default, bool):
        expected, good = "true or false", isinstance(value, bool)
    elif isinstance(item.default, float):
        expected, good = "a finite number", _is_number(value)
    elif isinstance(item.default, str):
        expected, good = "a string", isinstance(value, str)
    elif item.name.endswith("_token_id"):
        values = value if isinstance(value, list) and item.name == "eos_token_id" else [value]
        expected = "an integer" if item.name != "eos_token_id" else "an integer or a list of them"
        good = value is None or all(_is_int(token) and abs(token) < 2**31 for token in values)
    else:
        expected, good = "an integer", value is None or _is_int(value)
    if not good:
        raise ConfigError(f"{source}: {item.name!r} is {shown(value)}, expected {expected}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    try:
        return (isinstance(value, float) or _is_int(value)) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _dtype(raw: dict[str, Any], source: str) -> str | None:
    for key in ("dtype", "torch_dtype"):
        value = raw.get(key)
        if value is not None and value != "auto":
            name = value.removeprefix("torch.") if isinstance(value, str) else value
            if name not in _DTYPES:
                raise ConfigError(
                    f"{source}: {key!r} is {shown(value)}, expected one of {', '.join(_DTYPES)}"
                )
            return name
    return None


def _rope(raw: dict[str, Any], source: str) -> tuple[float, dict[str, Any] | None]:
    """Theta, and the scaling with "rope_type" in it and without theta; None for plain rope."""
    # A non-empty rope_scaling replaces the whole of rope_parameters, its theta included.
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key), (dict, type(None))):
            raise ConfigError(f"{source}: {key!r} is {shown(raw[key])}, expected an object or null")
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(key) or {}
    scaling = {name: copy.deepcopy(value) for name, value in given.items() if value is not None}

    theta, theta_key = scaling.pop("rope_theta", None), f"{key}.rope_theta"
    if theta is None:
        theta, theta_key = raw.get("rope_theta"), "rope_theta"
    theta = _DEFAULT_THETA if theta is None else theta
    if not _is_number(theta) or theta <= 0:
        raise ConfigError(f"{source}: {theta_key!r} is {shown(theta)}, expected a positive number")

    old_spelling = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", old_spelling)
    if not isinstance(rope_type, str) or rope_type not in ROPE_NUMBERS:
        raise ConfigError(
            f"{source}: '{key}.rope_type' is {shown(rope_type)}, expected one of "
            f"{', '.join(ROPE_NUMBERS)}"
        )
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"{source}: '{key}.partial_rotary_factor' is "
            f"{shown(scaling['partial_rotary_factor'])}, which changes the maths and is not "
            "implemented"
        )
    if nested := [name for name, value in scaling.items() if isinstance(value, dict)]:
        raise ConfigError(
            f"{source}: '{key}.{printable(nested[0])}': rope per layer type is not implemented"
        )
    if rope_type == "default":
        return theta, None
    if rope_type in _HAS_ORIGINAL_LENGTH:
        original = raw.get("original_max_position_embeddings")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
    _check_rope(rope_type, scaling, raw, f"{source}: '{key}.")
    return theta, {"rope_type": rope_type, **scaling}


def check_rope_scaling(scaling: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Raise ConfigError for a `rope_scaling` of a config that no model can have.

    Args: sizes holds the config's head_dim, rope_theta and max_position_embeddings.
    """
    rope_type = scaling.get("rope_type")
    if not isinstance(rope_type, str) or rope_type not in ROPE_NUMBERS:
        raise ConfigError(
            f"config: rope_scaling has rope_type {shown(rope_type)}; known: "
            f"{', '.join(ROPE_NUMBERS)}"
        )
    _check_rope(rope_type, scaling, sizes, "config: 'rope_scaling.")


# Numbers of a rope scaling that may be absent; the last four may be 0, which stands for absent.
_OPTIONAL_NUMBERS = (
    *("factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
# Beyond these a frequency over- or underflows.
_LEAST, _MOST = 1e-6, 1e12


def _check_rope(rope_type: str, scaling: dict[str, Any], raw: dict[str, Any], where: str) -> None:
    def fault(name: str, what: str) -> ConfigError:
        return ConfigError(f"{where}{name}' {what}")

    for name in (*ROPE_NUMBERS[rope_type], *_OPTIONAL_NUMBERS):
        value = scaling.get(name)
        if value is None:
            if name in ROPE_NUMBERS[rope_type]:
                raise fault(name, f"is missing; rope type {rope_type!r} needs it")
        elif not _is_number(value) or not _LEAST <= value <= _MOST:
            if not (value == 0 and _is_number(value) and name in _OPTIONAL_NUMBERS[3:]):
                raise fault(name, f"is {shown(value)}, expected a positive number")
    if not isinstance(scaling.get("truncate", True), bool):
        raise fault("truncate", f"is {shown(scaling['truncate'])}, expected true or false")
    if rope_type == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise fault("high_freq_factor", "must be greater than low_freq_factor")
    if rope_type == "yarn" and raw.get("rope_theta") == 1:
        raise fault("rope_type", "is 'yarn', which needs a rope_theta other than 1")
    if rope_type == "dynamic" and raw.get("head_dim") == 2:
        raise fault("rope_type", "is 'dynamic', which needs a head_dim greater than 2")
    if rope_type == "longrope":
        _check_longrope(scaling, raw, fault)


def _check_longrope(
    scaling: dict[str, Any], raw: dict[str, Any], fault: Callable[[str, str], ConfigError]
) -> None:
    original = scaling.get("original_max_position_embeddings", raw.get("max_position_embeddings"))
    if isinstance(original, (int, float)) and original <= 1:
        raise fault("original_max_position_embeddings", f"is {original}, expected more than 1")
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if (
            not isinstance(factors, list)
            or not factors
            or not all(_is_number(factor) and _LEAST <= factor <= _MOST for factor in factors)
        ):
            raise fault(name, "is no list of positive numbers; rope type 'longrope' needs it")
        head_dim = raw.get("head_dim")
        if isinstance(head_dim, int) and len(factors) != head_dim // 2:
            raise fault(
                name, f"has {len(factors)} numbers, expected head_dim / 2 = {head_dim // 2}"
            )


def _write_rope(raw: dict[str, Any], config: Any, changed: bool) -> None:
    scaling = copy.deepcopy(config.rope_scaling)
    if scaling is not None and scaling["rope_type"] == "default":
        scaling = None
    if changed:
        # The new values hold the length too, and one at config level would override theirs.
        raw.pop("original_max_position_embeddings", None)
    elif scaling and raw.get("rope_theta") not in (None, config.rope_theta):
        # What came in contradicts itself and stays; the scaling, which wins, says which holds.
        scaling["rope_theta"] = config.rope_theta
    spellings: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_type": "default",
            **(scaling or {}),
            "rope_theta": config.rope_theta,
        },
    }
    for key, value in spellings.items():
        if changed or key not in raw or (not raw[key] and value is not None):
            raw[key] = value
