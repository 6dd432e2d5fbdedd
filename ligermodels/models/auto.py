"""The registry of families: it finds the model class for the model_type of a config.json."""

import contextlib
import dataclasses
import os
import pkgutil
import warnings
from importlib import import_module, metadata
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ligermodels import models
from ligermodels.converters import hf_config, hub
from ligermodels.converters.files import ADAPTER_CONFIG_NAME, is_adapter, read_json_if_present
from ligermodels.converters.save_dir import read_one_version
from ligermodels.errors import (
    CheckpointError,
    ConfigError,
    LigerError,
    did_you_mean,
    first_line,
    short_repr,
)
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
        fault = "is missing" if model_type is None else f"{short_repr(model_type)} is not supported"
        raise ConfigError(
            f"{where}: model_type {fault}; these are supported: "
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
