"""The registry of families: it finds the model class for the model_type of a config.json."""

import functools
import inspect
import os
import pkgutil
from importlib import import_module
from types import FunctionType
from typing import Any, TypeVar

from ligermodels import models
from ligermodels.converters import hf_config, hub
from ligermodels.converters.atomic_dir import read_one_version
from ligermodels.errors import ConfigError, shown
from ligermodels.models.base import DecoderModel

Model = TypeVar("Model", bound=DecoderModel)

_registered: dict[str, type[DecoderModel]] = {}


def register(cls: type[Model]) -> type[Model]:
    """Make a model class known to `AutoLiger`, `load_pretrained` and the command line.

    Use it as a decorator or call it. The class must have a `config_class` and a `weight_map`. The
    `model_type` of the config class (or its `wrapper_type`, if set) is the model_type in a
    config.json. If a class is defined again, as in a notebook, it replaces its first definition.

    Returns: the class, unchanged.
    Raises:
        ConfigError: another class is registered under the same model_type, the config_class has no
            model_type, or weight_map is not a static method.
    """
    if cls.__module__.rpartition(".")[0] != models.__name__:
        _import_families()  # so that the check below finds a conflict with one of them
    config_class = getattr(cls, "config_class", None)
    if getattr(config_class, "model_type", None) is None:
        raise ConfigError(
            f"{_full_name(cls)}: config_class is {config_class!r}; expected a subclass of "
            "ModelConfig that sets model_type"
        )
    if isinstance(inspect.getattr_static(cls, "weight_map"), FunctionType):
        raise ConfigError(
            f"{_full_name(cls)}: weight_map is called with the config alone, without self; declare "
            "it as `weight_map = staticmethod(weight_map)`"
        )
    fields = {name: getattr(config_class, name) for name in ("model_type", "wrapper_type")}
    for field, model_type in fields.items():
        known = _registered.get(model_type)
        if known is not None and _full_name(known) != _full_name(cls):
            raise ConfigError(
                f"model_type {model_type!r} belongs to {_full_name(known)}; {_full_name(cls)} "
                f"needs another {field} in its config class"
            )
    _registered.update({name: cls for name in fields.values() if name is not None})
    return cls


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
        """Load a local folder or hub id. See `DecoderModel.from_hf` for arguments and errors."""
        folder = hub.resolve(path, revision=revision)
        cls = read_one_version(folder, lambda: family_of(folder))
        while True:
            try:
                return cls.from_hf(folder, **options)
            except ConfigError:
                now = read_one_version(folder, lambda: family_of(folder))
                if now is cls:
                    raise
                cls = now  # A save has just replaced the checkpoint by one of another family.


def family_of(folder: str | os.PathLike[str]) -> type[DecoderModel]:
    """Return the model class for a checkpoint folder.

    Raises:
        ConfigError: its config.json cannot be read, or no class is registered for its model_type.
    """
    raw = hf_config.read_config(folder)
    model_type = raw.get("model_type")
    known = families()
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"{os.path.join(folder, 'config.json')}: model_type {shown(model_type)} is not "
            f"supported; these are supported: {', '.join(known)}"
        )
    return known[model_type]


@functools.cache
def _import_families() -> None:
    """Import every module of this package, so that each family registers itself."""
    for module in pkgutil.iter_modules(models.__path__):
        import_module(f"{models.__name__}.{module.name}")


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
