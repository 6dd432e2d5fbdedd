"""Translate a config.json to the keyword arguments of a family's config class, and back.

`extra` keeps the whole incoming dict, so an export writes every key again. The rope fields (see
`hf_rope`) and the dtype have an old and a new spelling. Both spellings are read, in transformers'
order of precedence, and both are written.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from typing_extensions import Self, Unpack

from ligermodels.converters import hf_rope, hub
from ligermodels.converters.files import (
    CONFIG_NAME,
    FLOAT_DTYPES,
    is_adapter,
    is_int,
    is_number,
    is_token_id,
    read_json_if_present,
)
from ligermodels.converters.hub import HubOptions
from ligermodels.converters.save_dir import read_one_version
from ligermodels.errors import CheckpointError, ConfigError, short_repr

# Keys that change the computation, and the values of each that do not change it. A family that
# does not implement the key refuses any other value. An absent key and a null change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
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
QUANTIZER = "quantization_config"
_QUANTISED = (QUANTIZER, "compression_config")
# These keys are read in this module, or do not affect the computation. They do not count as
# unknown.
_HARMLESS = frozenset(
    "model_type architectures dtype torch_dtype rope_theta rope_scaling rope_parameters "
    "original_max_position_embeddings transformers_version use_cache pretraining_tp "
    "_name_or_path _sliding_window_pattern".split()
)
# What integrations/auto_map.py adds to a checkpoint: a key of auto_map, and the name of a module.
AUTO_CLASS, SHELL_FILE = "AutoModelForCausalLM", "modeling_ligermodels"
# The values of these keys in a wrapper's config also hold for its text model.
_OF_WRAPPER = ("tie_word_embeddings", "bos_token_id", "eos_token_id")


class HFConfig(hf_rope.RopeConfig):
    """The base class of all families' configs, which are dataclasses of HF's fields.

    `extra` holds the whole config.json of the checkpoint.
    """

    model_type: ClassVar[str]
    # The name of transformers' model class. None means the capitalised model_type + "ForCausalLM".
    architecture: ClassVar[str | None] = None
    # The model_type of a multimodal config.json whose text_config is a config of this family.
    wrapper_type: ClassVar[str | None] = None
    # Whether a model from such a checkpoint is saved as one: with the wrapper's config.json, and
    # with the towers that its weight map keeps. Otherwise it is saved as the text model alone.
    keeps_wrapper: ClassVar[bool] = False
    # Fields for which a JSON null means: derive the value.
    null_is_derived: ClassVar[tuple[str, ...]] = ()
    # Fields that an export always writes, even if the checkpoint's config.json lacks them.
    written: ClassVar[tuple[str, ...]] = ()
    # Fields that an export leaves out where they are None, as a null would mean something else.
    absent_if_none: ClassVar[tuple[str, ...]] = ()
    # Other keys of config.json -> the field that each of them means.
    key_aliases: ClassVar[dict[str, str]] = {}
    # The sizes among the fields, and the largest value of each.
    largest: ClassVar[dict[str, int]] = {}
    # The values of quantization_config.quant_method that a load of the family decodes.
    quantizations: ClassVar[tuple[str, ...]] = ()
    # Keys of config.json that change the computation and are not fields of the family -> the values
    # that it computes. Any other value is refused.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    extra: dict[str, Any]
    dtype: str | None

    def __init__(self, **fields: Any) -> None:
        """Set the fields; each family's dataclass has its own."""

    @property
    def sliding_windows(self) -> list[int | None]:
        """For each layer, the number of keys that a query sees, including its own; None for all."""
        return [None] * self.num_hidden_layers

    @property
    def cache_widths(self) -> list[int]:
        """The size of the keys of a token in each layer's cache; that of its values is the same."""
        return [self.num_key_value_heads * self.head_dim] * self.num_hidden_layers

    @classmethod
    def from_hf(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        **hub_options: Unpack[HubOptions],
    ) -> Self:
        """Read the config.json of a checkpoint. For a hub id, this downloads no weights.

        Args:
            path: a local folder, or a hub id such as "meta-llama/Llama-3.2-1B".
            revision: branch, tag or commit of a hub id.
            hub_options: token, cache_dir and local_files_only: see `HubOptions`.
        Raises:
            ConfigError: a key is damaged, unknown or not implemented; the message names the file
                and the key.
            CheckpointError: there is no such folder or repository, or it has no config.json.
        """
        folder = Path(path)
        if revision is not None or not os.path.isdir(folder):
            folder = hub.resolve(path, revision=revision, weights=False, **hub_options)
        raw = read_one_version(folder, read_config)
        try:
            return cls(**fields_from_hf(raw, cls))
        except ConfigError as error:
            absent = absent_sizes(raw, cls, str(error))
            note = absent and f" ({absent})"
            raise ConfigError(f"{folder / 'config.json'}: {error}{note}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of all fields except `extra`, and of model_type."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        del values["extra"]
        return {"model_type": self.model_type, **values}


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in `folder`/config.json unchanged.

    Raises:
        CheckpointError: the folder or the file does not exist.
        ConfigError: the file is not a JSON object, or has a key twice.
    """
    path = Path(folder) / CONFIG_NAME
    found = read_json_if_present(path, ConfigError)
    if found is None:
        what = "there is no such folder"
        if is_adapter(Path(folder)):
            what = "the file is missing: the folder holds an adapter, and no model"
        elif os.path.lexists(path.with_name("run.json")):
            what = "the file is missing: this is the folder of a run, whose model is in model/"
        elif os.path.isdir(folder):
            what = "the file is missing; choose a folder that holds a Hugging Face checkpoint"
        raise CheckpointError(f"{path}: {what}")
    return found


def text_config(raw: dict[str, Any], config_class: type[HFConfig]) -> dict[str, Any]:
    """Return the config of the text model: a wrapper's "text_config", otherwise `raw` itself.

    The wrapper's dtype, tied heads and special tokens also hold for its text model. The padding
    token is an exception: the text model computes with it, so its own value comes first.

    Raises:
        ConfigError: the wrapper holds another model, is quantised, or computes other logits than
            its text model alone.
    """
    if config_class.wrapper_type is None or raw.get("model_type") != config_class.wrapper_type:
        return raw
    _refuse_quantised(raw, config_class)
    given = {} if raw.get("text_config") is None else raw["text_config"]
    if not isinstance(given, dict):
        raise ConfigError(f"'text_config' is {short_repr(given)}, expected an object")
    if given.get("model_type", config_class.model_type) != config_class.model_type:
        raise ConfigError(
            f"'text_config.model_type' is {short_repr(given['model_type'])}, expected "
            f"{config_class.model_type!r}"
        )
    if given.get("final_logit_softcapping") is not None and not config_class.keeps_wrapper:
        # transformers caps the logits of a text model, but not those of the wrapper.
        raise ConfigError(
            "'text_config.final_logit_softcapping' is "
            f"{short_repr(given['final_logit_softcapping'])}, which a "
            f"{config_class.wrapper_type!r} model ignores, but an export of its text model would "
            "apply it; set it to null"
        )
    text = {**copy.deepcopy(given), "model_type": config_class.model_type}
    text.pop("architectures", None)
    for keys in (("dtype", "torch_dtype"), *((key,) for key in _OF_WRAPPER)):
        said = {key: copy.deepcopy(raw[key]) for key in keys if raw.get(key) is not None}
        if said:
            text = {key: value for key, value in text.items() if key not in keys} | said
    if "pad_token_id" in raw:
        text.setdefault("pad_token_id", raw["pad_token_id"])
    return text


def kept_config(raw: dict[str, Any], config_class: type[HFConfig]) -> dict[str, Any]:
    """Return the part of a config.json that a save writes again: `text_config`, or all of it."""
    return raw if config_class.keeps_wrapper else text_config(raw, config_class)


def fields_from_hf(raw: dict[str, Any], config_class: type[HFConfig]) -> dict[str, Any]:
    """Return the keyword arguments for `config_class`. Its `extra` gets a copy of `raw`.

    If `raw` is of a wrapper, they come from the text model's config: see `text_config`. So does
    `extra`, unless the family keeps the wrapper.

    Args: raw is the config.json.
    Raises:
        ConfigError: the model_type is another one, a key is not implemented, a value has the wrong
            type, or the rope type is unknown. `config_class` itself checks the sizes.
    """
    extra = copy.deepcopy(kept_config(raw, config_class))
    raw = text_config(raw, config_class)
    model_type = raw.get("model_type")
    if model_type != config_class.model_type:
        raise ConfigError(
            f"'model_type' is {short_repr(model_type)}; this class reads "
            f"{config_class.model_type!r}; use AutoLiger to load other families"
        )
    raw = _without_aliases(raw, config_class)
    _refuse_quantised(raw, config_class)
    _refuse(raw, config_class)
    hints = get_type_hints(config_class)
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(config_class):
        name = item.name
        if name not in raw or name in ("extra", "dtype", *hf_rope.FIELDS):
            continue
        if raw[name] is None and name == "attention_dropout":
            continue  # A null means 0 in every family.
        optional = item.default is None or name in config_class.null_is_derived
        hint = hints[name] | None if optional else hints[name]
        if fault := _type_fault(name, raw[name], hint):
            raise ConfigError(fault)
        fields[name] = copy.deepcopy(raw[name])
    fields |= hf_rope.fields_from_hf(raw, config_class)
    if (dtype := _dtype(raw)) is not None:
        fields["dtype"] = dtype
    fields["extra"] = extra
    return fields


def _without_aliases(raw: dict[str, Any], config_class: type[HFConfig]) -> dict[str, Any]:
    """Return a copy of `raw` in which the keys of `key_aliases` have the names of their fields."""
    found = dict(raw)
    for key, name in config_class.key_aliases.items():
        if key in found:
            value = found.pop(key)
            if found.setdefault(name, value) != value:
                raise ConfigError(
                    f"{key!r} is {short_repr(value)}, but {name!r}, which means the same, is "
                    f"{short_repr(found[name])}; remove one of them"
                )
    return found


def unknown_keys(raw: dict[str, Any], config_class: type[HFConfig]) -> dict[str, Any]:
    """Return the keys of a config.json that ligermodels does not read. An export writes them again.

    If `raw` is of a wrapper, these are the keys of its text model.
    """
    known = (
        _HARMLESS
        | _REFUSED.keys()
        | {QUANTIZER}
        | {item.name for item in dataclasses.fields(config_class)}
    )
    known |= config_class.key_aliases.keys() | config_class.refused.keys()
    raw = text_config(raw, config_class)
    return {key: value for key, value in raw.items() if key not in known}


def absent_sizes(raw: dict[str, Any], config_class: type[HFConfig], named_in: str = "") -> str:
    """Return "'hidden_size' is missing and is taken as 4096" and so on, or "" if none is missing.

    Args: raw: the config.json; named_in: a text, if only the sizes that it names count.
    """
    keys = raw.keys() | (raw["text_config"] if isinstance(raw.get("text_config"), dict) else {})
    given = {config_class.key_aliases.get(key, key) for key in keys}
    return ", ".join(
        f"{item.name!r} is missing and is taken as {item.default}"
        for item in dataclasses.fields(config_class)
        if item.name in config_class.largest and item.name not in given and is_int(item.default)
        if item.name != "max_position_embeddings" and (not named_in or item.name in named_in)
    )


def to_hf(config: HFConfig) -> dict[str, Any]:
    """Return the config.json of an export.

    A key of the checkpoint keeps its value, unless its field was changed later. Changed fields,
    all fields of a config that was made in Python, and missing second spellings are added. The
    config of a quantizer is left out, because a load has decoded what it describes.
    """
    config_class = type(config)
    raw = copy.deepcopy(config.extra)
    if raw.get("model_type") not in (None, config_class.model_type, config_class.wrapper_type):
        raw = {}  # the fields of another family's config were copied into this one
    names = {item.name for item in dataclasses.fields(config_class)} - {"extra"}
    if raw:
        before = config_class(**fields_from_hf(raw, config_class))
        changed = {name for name in names if getattr(config, name) != getattr(before, name)}
    else:
        changed = names
    if config_class.keeps_wrapper and raw.get("model_type") == config_class.wrapper_type:
        return _into_wrapper(raw, config, changed)
    auto_map = raw.get("auto_map")
    if isinstance(auto_map, dict) and f"{SHELL_FILE}." in str(auto_map.get(AUTO_CLASS)):
        # The checkpoint names an HF wrapper, and an export does not have the file with its class.
        # transformers has written the hub id, if there is one, before the module's name.
        raw.pop("architectures", None)
        del auto_map[AUTO_CLASS]
        if not auto_map:
            del raw["auto_map"]
    for key in _QUANTISED:
        raw.pop(key, None)
    raw.setdefault("architectures", [architecture(config_class)])
    raw["model_type"] = config_class.model_type
    added = changed - {"dtype", *hf_rope.FIELDS} | set(config_class.written) - raw.keys()
    raw |= _values(config, added)
    hf_rope.fields_to_hf(raw, config, bool(changed.intersection(hf_rope.FIELDS)))
    if config.dtype is not None:
        for key in ("dtype", "torch_dtype"):
            if "dtype" in changed or raw.get(key) is None:
                raw[key] = config.dtype
    return raw


def _values(config: HFConfig, names: Collection[str]) -> dict[str, Any]:
    """Return the values of fields as config.json has them, under all their keys."""
    hints = get_type_hints(type(config))
    values: dict[str, Any] = {}
    for name in (item.name for item in dataclasses.fields(type(config))):
        value = copy.deepcopy(getattr(config, name))
        if name in names and not (value is None and name in config.absent_if_none):
            hint = hints[name]
            # transformers refuses an integer for a field that it declares as a float.
            is_float = float in (hint, *get_args(hint)) and is_int(value)
            keys = [key for key, field in config.key_aliases.items() if field == name]
            values |= dict.fromkeys([name, *keys], float(value) if is_float else value)
    return values


def _into_wrapper(
    raw: dict[str, Any], config: HFConfig, changed: Collection[str]
) -> dict[str, Any]:
    """Write changed fields into the config.json of a wrapper, where the text model has them."""
    text = raw["text_config"] = raw.get("text_config") or {}
    values = _values(config, set(changed) - {"dtype", *hf_rope.FIELDS})
    text |= values
    raw |= {key: value for key, value in values.items() if key in raw}
    if not set(changed).isdisjoint(hf_rope.FIELDS):
        hf_rope.fields_to_hf(text, config, True)
    if "dtype" in changed:
        for each in (raw, text):
            each |= {key: config.dtype for key in ("dtype", "torch_dtype") if key in each}
        raw.setdefault("dtype", config.dtype)
    for key in _QUANTISED:
        raw.pop(key, None)
    return raw


def architecture(config_class: type[HFConfig]) -> str:
    """Return the name of transformers' model class."""
    if config_class.architecture is not None:
        return config_class.architecture
    words = config_class.model_type.removesuffix("_text").split("_")
    return "".join(word.capitalize() for word in words) + "ForCausalLM"


def _refuse_quantised(raw: dict[str, Any], config_class: type[HFConfig]) -> None:
    for key in _QUANTISED:
        if raw.get(key) is not None:
            method = raw[key].get("quant_method") if isinstance(raw[key], dict) else raw[key]
            if method in config_class.quantizations or _is_float8(raw[key]):
                continue
            raise ConfigError(
                f"{key!r}: quantised checkpoints ({short_repr(method)}) are not supported; "
                "load the checkpoint that it was made from, in float32, bfloat16 or float16"
            )


def _is_float8(quantizer: Any) -> bool:
    """Whether weights are in the format that `save_hf(float8=True)` writes; a load decodes it."""
    kind = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return (
        isinstance(quantizer, dict)
        and kind.items() <= quantizer.items()
        and not quantizer.get("transform_config")
    )


def _refuse(raw: dict[str, Any], config_class: type[HFConfig]) -> None:
    implemented = {item.name for item in dataclasses.fields(config_class)} - {"attention_dropout"}
    for key, harmless in (_REFUSED | config_class.refused).items():
        value = raw.get(key)
        if key not in implemented and value is not None and value not in harmless:
            accepted = " or ".join(map(json.dumps, (*harmless, None)))
            raise ConfigError(
                f"{key!r} is {short_repr(value)}, which changes the computation and is not "
                f"implemented; choose a checkpoint where it is {accepted}"
            )


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_item, value))


# Annotation of a field -> its name in messages, and a function that says whether a value fits.
_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", is_int),
    float: ("a finite number", is_number),
    str: ("a string", _is_str),
    list[int]: ("a list of integers", lambda value: _is_list(value, is_int)),
    list[str]: ("a list of strings", lambda value: _is_list(value, _is_str)),
    dict[str, Any]: ("a dict", lambda value: isinstance(value, dict)),
    NoneType: ("null", lambda value: value is None),
}


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return (hint,) if hint in _TYPES else get_args(hint) or (hint,)


def _type_fault(name: str, value: Any, hint: Any) -> str | None:
    """Return why a field with the annotation `hint` cannot hold a value, or None if it can."""
    kinds = _kinds(hint)
    good = any(_TYPES[kind][1](value) for kind in kinds)
    if good and name.endswith("_token_id"):
        tokens = value if isinstance(value, list) else [value]
        good = all(token is None or is_token_id(token) for token in tokens)
    expected = " or ".join(_TYPES[kind][0] for kind in kinds)
    return None if good else f"{name!r} is {short_repr(value)}, expected {expected}"


@cache
def _hints(config_class: type[HFConfig]) -> dict[str, Any]:
    return get_type_hints(config_class)


def type_faults(config: HFConfig) -> Iterator[str]:
    """Yield a message for each field whose value does not fit its annotation."""
    for name, hint in _hints(type(config)).items():  # type: ignore[arg-type]
        if name in config.__dataclass_fields__ and set(_kinds(hint)) <= _TYPES.keys():
            if fault := _type_fault(name, getattr(config, name), hint):
                yield fault


def _dtype(raw: dict[str, Any]) -> str | None:
    for key in ("dtype", "torch_dtype"):
        value = raw.get(key)
        if value is not None and value != "auto":
            name = value.removeprefix("torch.") if isinstance(value, str) else value
            if name not in FLOAT_DTYPES.values():
                raise ConfigError(
                    f"{key!r} is {short_repr(value)}, expected one of "
                    f"{', '.join(FLOAT_DTYPES.values())}"
                )
            return name
    return None
