"""Load a model from an HF checkpoint: `from_hf`."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from typing_extensions import Self, Unpack

from ligermodels.converters import hub, huge_pages
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.checkpoint_files import (
    ADAPTER_CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    copied_files,
)
from ligermodels.converters.dtypes import dtype_name
from ligermodels.converters.files import read_json_if_present
from ligermodels.converters.hub import HubOptions
from ligermodels.converters.safetensors_file import DTYPES
from ligermodels.converters.save_dir import read_one_version
from ligermodels.converters.source import Source
from ligermodels.converters.weight_map import WeightMap
from ligermodels.errors import CheckpointError, first_line
from ligermodels.layers import RotaryEmbedding
from ligermodels.models.config import ModelConfig
from ligermodels.models.hf_model import HFModel, WithoutInitialValues, check_class


class LoadableModel(HFModel):
    """A model that loads HF checkpoints."""

    @classmethod
    def from_hf(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        allow_nonfinite: bool = False,
        **hub_options: Unpack[HubOptions],
    ) -> Self:
        """Load an HF checkpoint.

        Args:
            path: a local folder, or a hub id such as "meta-llama/Llama-3.2-1B".
            dtype: dtype of the parameters, or its name, such as "bfloat16" or "bf16". By default,
                and with "auto", each keeps the dtype of the checkpoint.
            device: device of the parameters. They are loaded onto it tensor by tensor. On "meta"
                names and shapes are checked, and no values are read: `ligermodels.shard` then gives
                each rank its part of the parameters and reads only that.
            revision: branch, tag or commit of a hub id.
            allow_nonfinite: whether to accept NaN and infinite weights.
            hub_options: token, cache_dir and local_files_only: see `HubOptions`.
        Raises:
            ValueError: dtype is not a dtype that parameters can have, or there is no such device.
            ConfigError: config.json is damaged, belongs to another family, or needs a feature that
                is not implemented.
            CheckpointError: weights are missing, unexpected, mis-shaped, damaged or quantised,
                a tokenizer or generation file is damaged, or the repository does not exist or
                denies access. Names and shapes are checked before anything large is allocated.
        """
        dtype = _parameter_dtype(dtype)
        device = check_device(device)
        check_class(cls)
        folder = hub.resolve(path, revision=revision, **hub_options)

        def read(real: Path) -> tuple[ModelConfig, Checkpoint, dict[str, bytes], dict[str, Any]]:
            config = cls.config_class.from_hf(real)
            checkpoint = Checkpoint(real, allow_nonfinite=allow_nonfinite)
            generation = read_json_if_present(real / GENERATION_CONFIG_NAME, CheckpointError)
            return config, checkpoint, copied_files(real), generation or {}

        config, checkpoint, source_files, generation_config = read_one_version(folder, read)
        model, weight_map = cls.on_meta(config)
        stored = checkpoint.plan(weight_map)
        reads_now = device.type != "meta"
        if reads_now:
            checkpoint.check_aliases(weight_map)
        if left_out := checkpoint.left_out:
            counts = ", ".join(f"{count} of {start}*" for start, count in left_out.items())
            warnings.warn(
                f"{folder}: loading the text model alone; tensors left out: {counts}", stacklevel=2
            )
        if os.path.lexists(folder / ADAPTER_CONFIG_NAME):
            warnings.warn(
                f"{folder / ADAPTER_CONFIG_NAME}: this adapter beside the model is not added to it",
                stacklevel=2,
            )
        if dtype is None:
            _check_one_dtype(stored, checkpoint, weight_map)
        constants = checkpoint.constants()
        for name, value in weight_map.constants.items():
            if name in constants and not constants[name].is_close(value):
                raise CheckpointError(
                    f"{checkpoint.tensors[name].path}: {name!r} does not hold the constant of "
                    f"{cls.__name__}'s weight map, {value.tolist()}; the model would compute "
                    "something else than the checkpoint's"
                )
        weights: dict[str, Tensor] = {
            entry.name: huge_pages.empty(entry.shape, dtype or stored[entry.name], device)
            for entry in weight_map
        }
        if reads_now:
            reads = checkpoint.read_all([(entry, weights[entry.name]) for entry in weight_map])
            for _ in tqdm(reads, "Loading weights", len(weights), unit="tensor", disable=None):
                pass
        _set_parameters(model, weights)
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.to_empty(device=device)  # recomputes its buffers from the config
        if reads_now:
            model.compute_buffers(device)
        if dtype is not None:
            config.dtype = name_of(dtype)
        model.source = Source(
            folder=folder,
            dtype=model.embed_tokens.weight.dtype,
            constants=constants,
            files=source_files,
            generation_config=generation_config,
            unread=None if reads_now else checkpoint,
        )
        return model

    def compute_buffers(self, device: torch.device | str | None = None) -> None:
        """Give the buffers the values of a new model: one made on the meta device has none.

        Args: device: the device for the buffers; None keeps each on its device.
        """
        own = [
            (f"{path}.{name}" if path else name, module, name, buffer)
            for path, module in self.named_modules()
            if not isinstance(module, RotaryEmbedding)  # it computes its buffers itself
            for name, buffer in module.named_buffers(recurse=False)
        ]
        if not own:
            return
        with torch.device("cpu"), WithoutInitialValues():  # the weights take no memory yet
            values = dict(type(self)(self.built_from).named_buffers())
        for path, module, name, buffer in own:
            if path in values:
                setattr(module, name, values[path].to(device or buffer.device))


def _set_parameters(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Replace each parameter, in all modules that have it, by one with the values in `weights`."""
    parameters = dict(model.named_parameters())
    new = {id(x): nn.Parameter(weights[name], x.requires_grad) for name, x in parameters.items()}
    for module in model.modules():
        for key, x in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, key, new[id(x)])


def _check_one_dtype(
    stored: dict[str, torch.dtype], checkpoint: Checkpoint, weight_map: WeightMap
) -> None:
    """Raise if embeddings and projections are stored in several dtypes; norms may differ."""
    entries = [entry for entry in weight_map if "norm" not in entry.name]
    first = entries[0]
    for entry in entries:
        if stored[entry.name] != stored[first.name]:
            info = checkpoint.tensors[entry.spans[0].source]
            raise CheckpointError(
                f"{info.path}: {entry.spans[0].source!r} is stored in "
                f"{name_of(stored[entry.name])}, but {first.spans[0].source!r} in "
                f"{name_of(stored[first.name])}; choose one dtype for all: from_hf(..., dtype=...)"
            )


def check_device(device: torch.device | str) -> torch.device:
    """Return the device, or raise ValueError if this machine or PyTorch has none of this name."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        gpus = [f"'cuda:{index}'" for index in range(torch.cuda.device_count())]
        known = ", ".join(["'cpu'", "'meta'", *(["'cuda'"] if gpus else []), *gpus])
        raise ValueError(
            f"device is {device!r}, which cannot be used ({first_line(error).rstrip('.')}); "
            f"expected one of {known}, or another device of this PyTorch. A model is loaded onto "
            "one device; `ligermodels.shard` divides one loaded onto 'meta' among several"
        ) from None
    return found


def _parameter_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that parameters shall have, or None if they keep theirs."""
    if dtype is None or dtype == "auto":
        return None
    names = {name_of(known): known for known in DTYPES.values()}
    found = names.get(dtype_name(dtype)) if isinstance(dtype, str) else dtype
    if found not in names.values():
        raise ValueError(f"dtype is {dtype!r}; expected one of {[*names.values()]}, or its name")
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a config.json, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
