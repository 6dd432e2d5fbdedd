"""The registry of families: it finds the model class for the model_type of a config.json."""

import contextlib
import dataclasses
import os
import pkgutil
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from typing_extensions import Unpack

from ligermodels import models
from ligermodels.converters import hf_config, hub
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.files import (
    ADAPTER_CONFIG_NAME,
    is_adapter,
    read_json_if_present,
)
from ligermodels.converters.hub import HubOptions
from ligermodels.converters.load_pretrained import LoadReport, Source, load_into
from ligermodels.converters.save_dir import read_one_version
from ligermodels.errors import (
    CheckpointError,
    ConfigError,
    LigerError,
    did_you_mean,
    first_line,
    short_repr,
)
from ligermodels.layers import Attention
from ligermodels.layers.fusion import pre_norm_names
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig
from ligermodels.models.hf_model import check_class, check_device
from ligermodels.models.module_map import names_in

Model = TypeVar("Model", bound=DecoderModel)

# The entry points of installed packages that have their own families.
ENTRY_POINTS = "ligermodels.families"

_imported = False
_registered: dict[str, type[DecoderModel]] = {}


def register(cls: type[Model]) -> type[Model]:
    """Make a model class known to `AutoLiger`, `load_pretrained` and the command line.

    Use it as a decorator or call it. The class must have a `config_class` and a `weight_map`. The
    `model_type` of the config class (or its `wrapper_type`, if set) is the model_type in a
    config.json. If a class is defined again, as in a notebook, it replaces its first definition.

    The weight map is checked here: `WeightMap.check` compares it with the parameters of small
    models, which are made from `config_class.small()` and from this config with each of its
    booleans negated.

    Returns: the class, unchanged.
    Raises:
        ConfigError: cls is not a class of models, another class is registered under the same
            model_type, the config_class has no model_type, weight_map is not a static method or is
            wrong, or no small model can be made.
    """
    if not (isinstance(cls, type) and issubclass(cls, DecoderModel)):
        raise ConfigError(
            f"register: {short_repr(cls)} is no model class; pass a class that inherits from "
            "DecoderModel"
        )
    outside = cls.__module__.rpartition(".")[0] != models.__name__
    if outside:
        _import_families()  # so that the check below finds a conflict with one of them
    check_class(cls)
    config_class = cls.config_class
    if getattr(config_class, "model_type", None) is None:
        raise ConfigError(
            f"{_full_name(cls)}: {config_class.__name__} has no model_type; set it to the "
            "model_type in the family's config.json"
        )
    fields = {name: getattr(config_class, name) for name in ("model_type", "wrapper_type")}
    for field, model_type in fields.items():
        known = _registered.get(model_type)
        if known is not None and _full_name(known) != _full_name(cls):
            raise ConfigError(
                f"model_type {model_type!r} belongs to {_full_name(known)}; {_full_name(cls)} "
                f"needs another {field} in its config class"
            )
    if outside:  # the tests check those of this package
        check_weight_map(cls)
    _registered.update({name: cls for name in fields.values() if name is not None})
    return cls


def check_weight_map(cls: type[DecoderModel]) -> None:
    """Compare the weight map of a class with the parameters of small models.

    Raises:
        ConfigError: the map does not fit the parameters, or no small model can be made.
    """
    variant, known = "small config", set[str]()
    try:
        for name, config in small_variants(cls.config_class.small()).items():
            variant = name
            known |= names_in(cls.on_meta(config)[0])
    except Exception as error:
        kind = "" if isinstance(error, LigerError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"{_full_name(cls)}, {variant} (with {cls.config_class.__name__}.small_fields): "
            f"{kind}{error}"
        ) from error
    given = (cls.hf_names or {}, *cls.expert_layouts.values())
    for name in chain.from_iterable(given):
        if name not in known:
            raise ConfigError(
                f"{_full_name(cls)}: hf_names has {name!r}, but no module or parameter of a small "
                f"model is called so{did_you_mean(name, known)}"
            )


def small_variants(config: ModelConfig) -> dict[str, ModelConfig]:
    """Return a small config, and copies of it in which one boolean each has its other value.

    A value that the config refuses is left out.
    """
    variants = {"small config": config}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool):
            with contextlib.suppress(ConfigError):
                change: dict[str, Any] = {field.name: not value}
                variants[f"{field.name}={not value}"] = dataclasses.replace(config, **change)
    return variants


def families() -> dict[str, type[DecoderModel]]:
    """Return every registered model class by model_type, sorted by model_type."""
    _import_families()
    return dict(sorted(_registered.items()))


class AutoLiger:
    """Load a checkpoint with the model class for the model_type in its config.json."""

    @staticmethod
    def from_hf(
        path: str | os.PathLike[str], *, revision: str | None = None, **options: Any
    ) -> DecoderModel:
        """Load a local folder or hub id. See `DecoderModel.from_hf` for arguments and errors.

        A local folder may hold a LoRA in PEFT's format instead of a model. Then the model that its
        config names is loaded, and the adapter is added to the weights.
        """
        hub_options = hub.split_hub_options(options)
        folder = hub.resolve(path, revision=revision, **hub_options)
        local = Path(folder)
        if is_adapter(local):
            return _with_adapter(local, options, hub_options)
        return read_one_version(folder, family_of).from_hf(folder, **options)


def load_pretrained(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    ignore_mismatched_sizes: bool = False,
    allow_nonfinite: bool = False,
    revision: str | None = None,
    **hub_options: Unpack[HubOptions],
) -> LoadReport:
    """Copy the parameters of a checkpoint into any module that has them, by name and shape.

    The names are those of ligermodels' own models, with packed q, k, v and packed gate, up:
    `AutoLiger.from_hf(path).named_parameters()` lists them. The module keeps its dtypes and
    devices. All values are read and checked before the module is changed, so an error leaves it
    unchanged. Until then the values are in host memory, in the module's dtypes.

    Values are copied without arithmetic. Two parameters with the same name and shape do not match
    if they mean different things: weights of norms with different `offset` (Gemma's is 1), of
    embeddings with different `scale`, of `Attention` layers with different heads, and of norms in
    different places. For example, Llama's post_attention_layernorm comes before the MLP. In a block
    with norms around its sub-layers (Gemma 2) the norm before the MLP is pre_feedforward_layernorm,
    so rename it. Activations, rope and windows are not compared with the checkpoint's.

    If the checkpoint ties the head to its embedding, it stores no head, so an untied head of the
    module is new. A parameter that the module has under two names is loaded under both.

    Args:
        module: a module with parameters. They must not be sharded or on the meta device.
        path: a local folder, or a hub id, of any supported family.
        rename: a function from a name in the checkpoint to the name in the module. If it returns
            None, that parameter is not loaded.
        ignore_mismatched_sizes: whether to leave parameters that do not match unchanged and report
            them. By default they raise CheckpointError.
        allow_nonfinite: whether to accept NaN and infinite weights.
        revision: branch, tag or commit of a hub id.
        hub_options: token, cache_dir and local_files_only: see `HubOptions`.
    Returns: a report of the parameters that were loaded, are new, do not match or are not used.
    Raises:
        ConfigError: config.json is damaged, belongs to no supported family, or needs a feature that
            is not implemented.
        CheckpointError: `from_hf` would raise it; a parameter does not match (the message has the
            file, the key and both shapes); the module and the checkpoint have no name in common;
            two parameters have the same target; or a target cannot be written to.
    """
    folder = hub.resolve(path, revision=revision, **hub_options)

    def read(real: Path) -> tuple[type[DecoderModel], ModelConfig, Checkpoint]:
        family = family_of(real)
        checkpoint = Checkpoint(real, allow_nonfinite=allow_nonfinite)
        return family, family.config_class.from_hf(real), checkpoint

    family, config, checkpoint = read_one_version(folder, read)
    model, weight_map = family.on_meta(config)
    checkpoint.plan(weight_map)
    checkpoint.check_aliases(weight_map)
    return load_into(
        module,
        Source(folder, checkpoint, model, weight_map, _meaning),
        rename=rename,
        ignore_mismatched_sizes=ignore_mismatched_sizes,
    )


def _meaning(module: nn.Module, name: str) -> dict[str, str]:
    """Return the properties of a parameter's module that decide what its values mean."""
    path, _, child = name.rpartition(".")[0].rpartition(".")
    parent = module.get_submodule(path)
    owner = parent.get_submodule(child)
    meaning = {}
    if isinstance(offset := getattr(owner, "offset", 0.0), (int, float)):
        meaning["offset"] = f"{offset:g}"
    if isinstance(owner, nn.Embedding):
        meaning["scale"] = f"{getattr(owner, 'scale', 1.0):g}"
    if isinstance(parent, Attention) and child in ("qkv_proj", "o_proj"):
        heads = f"{parent.num_heads} and {parent.num_kv_heads} of size {parent.head_dim}"
        meaning["heads (of queries, of keys)"] = heads
    if child in ("post_attention_layernorm", "pre_feedforward_layernorm"):
        before_mlp = child in pre_norm_names(parent)
        meaning["its place"] = "before the MLP" if before_mlp else "after attention"
    return meaning


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with the tokenizer of a checkpoint.

    It is the folder itself, but for an adapter without a tokenizer, as PEFT writes it: that of the
    model that it belongs to.

    Raises:
        CheckpointError: adapter_config.json names no model that can be found.
    """
    from ligermodels.adapters.published import TOKENIZER, base_of

    if not is_adapter(folder) or os.path.lexists(folder / TOKENIZER):
        return folder
    where = folder / ADAPTER_CONFIG_NAME
    return base_of(where, read_json_if_present(where, CheckpointError) or {})


def _with_adapter(
    folder: Path, options: dict[str, Any], hub_options: hub.HubOptions
) -> DecoderModel:
    """Return the model of an adapter with the adapter added to its weights."""
    from ligermodels.adapters.published import with_adapter

    if check_device(options.get("device", "cpu")).type == "meta":
        raise CheckpointError(
            f"{folder}: an adapter cannot be added to weights that are read later; load it on "
            "another device, or convert it to a whole checkpoint first (ligermodels convert)"
        )
    return with_adapter(folder, hub_options, lambda base: AutoLiger.from_hf(base, **options))


def family_of(folder: str | os.PathLike[str]) -> type[DecoderModel]:
    """Return the model class for a checkpoint folder.

    Raises:
        ConfigError: its config.json cannot be read, or no class is registered for its model_type.
    """
    raw = hf_config.read_config(folder)
    return family_named(raw.get("model_type"), os.path.join(folder, "config.json"))


def family_named(model_type: Any, where: str) -> type[DecoderModel]:
    """Return the model class that is registered for a model_type.

    Args: where: what names it, for the error.
    Raises:
        ConfigError: no class is registered for it.
    """
    known = families()
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"{where}: model_type {short_repr(model_type)} is not supported; these are supported: "
            f"{', '.join(known)}; import the file of a family of your own first (--import on the "
            "command line)"
        )
    return known[model_type]


def _import_families() -> None:
    """Import every module of this package, so that each family registers itself.

    Then load the families of installed packages. An entry point is a module that registers its
    families when it is imported, or a model class.
    """
    global _imported
    if _imported:
        return
    _imported = True  # A module that is imported below may call this function.
    for module in pkgutil.iter_modules(models.__path__):
        import_module(f"{models.__name__}.{module.name}")
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            found = entry_point.load()
            if isinstance(found, type):
                register(found)
        except Exception as error:  # A broken package must not keep the others from loading.
            warnings.warn(
                f"the entry point {entry_point.name!r} = {entry_point.value!r} of the group "
                f"{ENTRY_POINTS!r} cannot be loaded: {first_line(error)}; update or uninstall its "
                "package",
                stacklevel=2,
            )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
