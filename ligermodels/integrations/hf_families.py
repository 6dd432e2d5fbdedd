"""The class of wrappers and the config of each family, and which of them a checkpoint needs."""

from pathlib import Path
from typing import Any

from ligermodels.integrations import require

require("transformers")

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import find_adapter_config_file

from ligermodels.converters import hf_config
from ligermodels.converters.files import read_json
from ligermodels.errors import ConfigError
from ligermodels.models.auto import family_named
from ligermodels.models.base import DecoderModel


def native_config(config: PreTrainedConfig, family: type[DecoderModel]) -> Any:
    """Return the native config for one of transformers.

    Raises:
        ConfigError: a key is not implemented or has a wrong value.
    """
    raw = config.to_dict()
    raw.pop("quantization_config", None)  # transformers replaces the linears itself
    return family.config_class(**hf_config.fields_from_hf(raw, family.config_class))


def raw_config(path: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the config.json at a path or hub id, or of an adapter's model."""
    known = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download")
    given = {name: options[name] for name in known if name in options}
    raw, _ = PreTrainedConfig.get_config_dict(path, **given)
    if not raw.get("model_type") and (adapter := find_adapter_config_file(path, **given)):
        # transformers loads the model that an adapter belongs to, and then the adapter.
        model = read_json(Path(adapter), ConfigError)["base_model_name_or_path"]
        for name in ("revision", "subfolder"):  # They are the adapter's own.
            given.pop(name, None)
        raw, _ = PreTrainedConfig.get_config_dict(model, **given)
    return raw


def class_at(path: Any, base: type, options: dict[str, Any]) -> Any:
    """Return the class of wrappers for the config.json at a path or hub id."""
    raw = raw_config(path, options)
    if "text_config" in raw:
        raise ConfigError(
            f"{path}: it is a checkpoint of a text model and other towers, which this class "
            "cannot load here; for the text model alone use "
            "LigerForCausalLM.from_native(AutoLiger.from_hf(...))"
        )
    return class_of(family_named(raw.get("model_type"), path), base)


def class_of(family: type[DecoderModel], base: type) -> Any:
    """Return the subclass of a wrapper class for one family."""
    if getattr(base, "family", family) is not family:
        raise ConfigError(f"{base.__name__} is the class of another family than {family.__name__}")
    if hasattr(base, "family"):
        return base
    if (family, base) not in _made:
        _made[family, base] = _make_class(family, base)
    return _made[family, base]


_made: dict[tuple[type, type], Any] = {}
_MODULE = f"{__package__}.hf_model"  # where pickle looks for the classes


def _make_class(family: type[DecoderModel], base: type) -> Any:
    model_type = family.config_class.model_type
    config_class: Any = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None
    if config_class is None:
        own = {"model_type": model_type, "__module__": _MODULE}
        config_class = type(f"{family.__name__}Config", (PreTrainedConfig,), own)
    members: dict[str, Any] = {
        "family": family,
        "config_class": config_class,
        "__module__": _MODULE,
        "__doc__": f"`{base.__name__}` of the family {family.__name__}.",
    }
    return type(family.__name__ + base.__name__.removeprefix("Liger"), (base,), members)
