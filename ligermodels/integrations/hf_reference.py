"""Models and configs of transformers for the checks of a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ligermodels.integrations import require

require("transformers")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def new_model(folder: Path, model_type: str) -> Any:
    """Return a model of transformers with the config of a folder, in float32, or None.

    There is none for a model_type that transformers does not know.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if model_type not in CONFIG_MAPPING:
        return None
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder),
        attn_implementation="eager",
        dtype=torch.float32,
    )


def config_defaults(model_type: str) -> dict[str, Any] | None:
    """Return the values of a config that sets nothing, or None for an unknown model_type."""
    return CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else None
