"""config.json to the keyword arguments of a family's config class, and back.

The incoming dict is kept whole under `extra`, so that an export gives back every key. Rope (see
`rope`) and dtype fields have an old and a new spelling: both are read, in transformers' order of
precedence, and both are written.
"""

import copy
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from ligermodels.converters import hf_rope as rope
from ligermodels.converters.files import CONFIG, read_json
from ligermodels.converters.hf_rope import is_int, is_number
from ligermodels.errors import CheckpointError, ConfigError, shown

# Known keys that change the maths, with the values that change nothing; refused with any other
# value by families that do not implement them. None (null) and absence always change nothing.
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
    "per_layer_config": ({},),
}
QUANTISED = ("quantization_config", "compression_config")
# Read here or without a bearing on the maths: not worth showing as unknown.
HARMLESS = frozenset(
    "model_type architectures dtype torch_dtype rope_theta rope_scaling rope_parameters "
    "original_max_position_embeddings transformers_version use_cache pretraining_tp "
    "_name_or_path _sliding_window_pattern".split()
)
_DTYPES = ("float64", "float32", "float16", "bfloat16")


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


def text_config(raw: dict[str, Any], cls: Any, source: str) -> dict[str, Any]:
    """The config of the text model alone: `raw` itself, unless that is a wrapper with a tower.

    A wrapper's own words on dtype, tied heads and special tokens hold for the text model, too;
    only the padding token is the text model's, which computes with it.

    Raises:
        ConfigError: a wrapper around something else, one that is quantised, or one whose logits
            are no wrapped model's.
    """
    if cls.wrapper_type is None or raw.get("model_type") != cls.wrapper_type:
        return raw
    _refuse_quantised(raw, source)
    given = {} if raw.get("text_config") is None else raw["text_config"]
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: 'text_config' is {shown(given)}, expected an object")
    if given.get("model_type", cls.model_type) != cls.model_type:
        raise ConfigError(
            f"{source}: 'text_config.model_type' is {shown(given['model_type'])}, expected "
            f"{cls.model_type!r}"
        )
    if given.get("final_logit_softcapping") is not None:
        # transformers caps the logits of the text model by itself, and not those of the wrapper
        raise ConfigError(
            f"{source}: 'text_config.final_logit_softcapping' is "
            f"{shown(given['final_logit_softcapping'])}, which a {cls.wrapper_type!r} does not "
            "apply and an export of its text model would; set it to null"
        )
    text = {**copy.deepcopy(given), "model_type": cls.model_type}
    text.pop("architectures", None)
    for keys in (("dtype", "torch_dtype"), *((key,) for key in _OF_WRAPPER)):
        said = {key: copy.deepcopy(raw[key]) for key in keys if raw.get(key) is not None}
        if said:
            text = {key: value for key, value in text.items() if key not in keys} | said
    if "pad_token_id" in raw:
        text.setdefault("pad_token_id", raw["pad_token_id"])
    return text


_OF_WRAPPER = ("tie_word_embeddings", "bos_token_id", "eos_token_id")


def fields_from_hf(raw: dict[str, Any], cls: Any, source: str) -> dict[str, Any]:
    """Keyword arguments for the config dataclass `cls`; `extra` holds a copy of `raw`.

    Of a wrapper both are its text model's, see `text_config`.

    Args: source is the file that messages name.
    Raises:
        ConfigError: another model_type, a key that is not implemented, a value of the wrong type,
            an unknown rope type. Sizes are left to `cls` to judge.
    """
    raw = text_config(raw, cls, source)
    model_type = raw.get("model_type")
    if model_type != cls.model_type:
        raise ConfigError(
            f"{source}: 'model_type' is {shown(model_type)}; this class reads {cls.model_type!r}"
        )
    _refuse_quantised(raw, source)
    _refuse(raw, cls, source)
    hints = get_type_hints(cls)
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        name = item.name
        if name not in raw or name in ("extra", "dtype", *rope.FIELDS):
            continue
        if raw[name] is None and name == "attention_dropout":
            continue  # as 0, everywhere
        optional = item.default is None or name in cls.null_is_derived
        _check_type(name, raw[name], hints[name] | None if optional else hints[name], source)
        fields[name] = copy.deepcopy(raw[name])
    fields |= rope.fields_from_hf(raw, cls, source)
    if (dtype := _dtype(raw, source)) is not None:
        fields["dtype"] = dtype
    fields["extra"] = copy.deepcopy(raw)
    return fields


def unknown_keys(raw: dict[str, Any], cls: Any) -> dict[str, Any]:
    """The keys of a config.json that nothing here reads; they are kept, and exported again.

    Of a wrapper's: those of its text model.
    """
    known = HARMLESS | REFUSED.keys() | {item.name for item in dataclasses.fields(cls)}
    raw = text_config(raw, cls, CONFIG)
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
    spelt = cls.model_type.removesuffix("_text").capitalize()
    hints = get_type_hints(cls)
    raw.setdefault("architectures", [cls.architecture or f"{spelt}ForCausalLM"])
    raw["model_type"] = cls.model_type
    for item in dataclasses.fields(cls):
        name = item.name
        if name in changed - {"dtype", *rope.FIELDS} or (name in cls.written and name not in raw):
            value = copy.deepcopy(getattr(config, name))
            # transformers takes no integer where it wants a float.
            is_float = float in (hints[name], *get_args(hints[name])) and is_int(value)
            raw[name] = float(value) if is_float else value
    rope.write(raw, config, bool(changed.intersection(rope.FIELDS)))
    if config.dtype is not None:
        for key in ("dtype", "torch_dtype"):
            if "dtype" in changed or raw.get(key) is None:
                raw[key] = config.dtype
    return raw


def _refuse_quantised(raw: dict[str, Any], source: str) -> None:
    for key in QUANTISED:
        if raw.get(key) is not None:
            method = raw[key].get("quant_method") if isinstance(raw[key], dict) else raw[key]
            raise ConfigError(
                f"{source}: {key!r}: quantised checkpoints ({shown(method)}) are not supported; "
                "load the one it was made from, in float32, bfloat16 or float16"
            )


def _refuse(raw: dict[str, Any], cls: Any, source: str) -> None:
    implemented = {item.name for item in dataclasses.fields(cls)} - {"attention_dropout"}
    for key, harmless in REFUSED.items():
        value = raw.get(key)
        if key not in implemented and value is not None and value not in harmless:
            raise ConfigError(
                f"{source}: {key!r} is {shown(value)}, which changes the maths and is not "
                "implemented"
            )


_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", is_int),
    float: ("a finite number", is_number),
    str: ("a string", lambda value: isinstance(value, str)),
    list[int]: (
        "a list of them",
        lambda value: isinstance(value, list) and all(map(is_int, value)),
    ),
    list[str]: (
        "a list of strings",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
    NoneType: ("null", lambda value: value is None),
}


def _check_type(name: str, value: Any, hint: Any, source: str) -> None:
    """Refuse what JSON can hold and a field annotated with `hint` cannot."""
    kinds = get_args(hint) if hint not in _TYPES else (hint,)
    good = any(_TYPES[kind][1](value) for kind in kinds)
    if good and name.endswith("_token_id"):
        good = all(
            token is None or abs(token) < 2**31
            for token in (value if isinstance(value, list) else [value])
        )
    if not good:
        expected = " or ".join(_TYPES[kind][0] for kind in kinds)
        raise ConfigError(f"{source}: {name!r} is {shown(value)}, expected {expected}")


def check_types(config: Any) -> None:
    """Refuse a field of a config made in Python that its annotation does not allow.

    Raises:
        ConfigError: naming the field, its value and what is expected.
    """
    hints = get_type_hints(type(config))
    for item in dataclasses.fields(config):
        if item.name in ("extra", "rope_scaling"):
            value, expected = getattr(config, item.name), "a dict"
            if not isinstance(value, dict) and (item.name == "extra" or value is not None):
                raise ConfigError(f"config: {item.name!r} is {shown(value)}, expected {expected}")
        elif set(get_args(hints[item.name]) or (hints[item.name],)) <= _TYPES.keys():
            _check_type(item.name, getattr(config, item.name), hints[item.name], "config")


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
