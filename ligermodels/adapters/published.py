"""Published adapters: the model that one belongs to, and the adapter added to its weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ligermodels.adapters import peft_format
from ligermodels.converters import hub
from ligermodels.converters.files import (
    ADAPTER_CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    copied_files,
    is_adapter,
    read_json_if_present,
)
from ligermodels.converters.save_dir import read_one_version
from ligermodels.errors import CheckpointError, short_repr
from ligermodels.models.base import DecoderModel

TOKENIZER = "tokenizer.json"  # the file that holds a tokenizer


def base_of(where: Path, config: dict[str, Any], hub_options: hub.HubOptions | None = None) -> Path:
    """Return the folder of the model that an adapter belongs to, by its config at `where`."""
    base, revision = (config.get(key) for key in ("base_model_name_or_path", "revision"))
    if not isinstance(base, str) or not isinstance(revision, str | None):
        raise CheckpointError(
            f"{where}: base_model_name_or_path is {short_repr(base)}, but must name the model that "
            f"the adapter belongs to (revision: {short_repr(revision)})"
        )
    try:
        source = hub.resolve(base, revision=revision, **(hub_options or {}))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: base_model_name_or_path: {error}") from error
    if is_adapter(source):
        raise CheckpointError(
            f"{where}: base_model_name_or_path is {short_repr(base)}, which is an adapter, too; "
            "convert that to a whole checkpoint first (ligermodels convert)"
        )
    return source


def with_adapter(
    folder: Path, hub_options: hub.HubOptions, load: Callable[[Path], DecoderModel]
) -> DecoderModel:
    """Return the model of an adapter with the adapter added to its weights.

    Args: load: returns the model of a folder, on any device but meta.
    Raises:
        CheckpointError: the adapter cannot be read, names no model that can be found, does not
            belong to it, or gives weights that are not finite.
    """

    def read(real: Path) -> tuple[Any, ...]:
        generation = read_json_if_present(real / GENERATION_CONFIG_NAME, CheckpointError)
        return *peft_format.read_adapter(real), copied_files(real), generation

    weights, config, files, generation_config = read_one_version(folder, read)
    where = folder / ADAPTER_CONFIG_NAME
    model = load(base_of(where, config, hub_options))
    weight_map = model.hf_map()
    try:
        peft_format.add_lora(dict(model.named_parameters()), weights, config, weight_map)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
        raise CheckpointError(
            f"{where}: a value does not have PEFT's form: {error}; correct the file"
        ) from error
    model.source.folder = None  # its weights are others, and a tool would take that folder for them
    if TOKENIZER in files:  # It may have learned other tokens.
        kept = {GENERATION_CONFIG_NAME} & model.source.files.keys()
        model.source.files = {name: model.source.files[name] for name in kept}
    model.source.files |= files
    if generation_config is not None:
        model.source.generation_config = generation_config
    return model
