"""From a config.json's model_type to the class that computes it."""

import os
from typing import Any

from ligermodels.converters import hf_config, hub
from ligermodels.errors import ConfigError, shown
from ligermodels.models.base import DecoderModel
from ligermodels.models.gemma import LigerGemma
from ligermodels.models.gemma2 import LigerGemma2
from ligermodels.models.gemma3 import LigerGemma3
from ligermodels.models.llama import LigerLlama
from ligermodels.models.mistral import LigerMistral
from ligermodels.models.qwen2 import LigerQwen2
from ligermodels.models.qwen3 import LigerQwen3

FAMILIES: dict[str, type[DecoderModel]] = {
    cls.config_class.model_type: cls
    for cls in (
        LigerLlama,
        LigerMistral,
        LigerGemma,
        LigerGemma2,
        LigerGemma3,
        LigerQwen2,
        LigerQwen3,
    )
}
# Published with a vision tower, of which the text model alone is loaded.
FAMILIES |= {
    cls.config_class.wrapper_type: cls
    for cls in list(FAMILIES.values())
    if cls.config_class.wrapper_type is not None
}


class AutoLiger:
    """Loads a checkpoint with the class its config names."""

    @staticmethod
    def from_hf(
        path: str | os.PathLike[str], *, revision: str | None = None, **options: Any
    ) -> DecoderModel:
        """Load a local folder or hub id; arguments and errors as `DecoderModel.from_hf`."""
        folder = hub.resolve(path, revision=revision)
        return family_of(folder).from_hf(folder, **options)


def family_of(folder: str | os.PathLike[str]) -> type[DecoderModel]:
    """The model class for a checkpoint folder.

    Raises:
        ConfigError: its config.json cannot be read or names no supported model_type.
    """
    raw = hf_config.read_config(folder)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{os.path.join(folder, 'config.json')}: model_type {shown(model_type)} is not "
            f"supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
