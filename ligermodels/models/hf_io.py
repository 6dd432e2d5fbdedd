"""Between a model and an HF folder: allocation, and what of a model can be written."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ligermodels.converters import export as writer
from ligermodels.converters import hf_config, hub
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.safetensors_file import DTYPES
from ligermodels.converters.weight_map import Table, table_for
from ligermodels.errors import CheckpointError, SaveError, listing
from ligermodels.layers import RotaryEmbedding

if TYPE_CHECKING:
    from ligermodels.models.base import DecoderModel

Model = TypeVar("Model", bound="DecoderModel")


def load(
    cls: type[Model],
    path: str | os.PathLike[str],
    dtype: torch.dtype | None,
    device: torch.device,
    revision: str | None,
    allow_nonfinite: bool,
) -> Model:
    """`DecoderModel.from_hf`: headers, plan, comparison, and only then memory, tensor by tensor."""
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}; expected one of {[*DTYPES.values()]}")
    folder = hub.resolve(path, revision=revision)
    config = cls.config_class.from_hf(folder)
    table = table_for(config)
    checkpoint = Checkpoint(folder, allow_nonfinite=allow_nonfinite)
    stored = checkpoint.plan(table)
    checkpoint.check_aliases(table)
    if left_out := checkpoint.left_out:
        counts = ", ".join(f"{count} of {start}*" for start, count in left_out.items())
        warnings.warn(
            f"{folder}: loading the text model alone; tensors left out: {counts}", stacklevel=3
        )
    if dtype is None:
        _check_one_dtype(stored, checkpoint, table)
    with torch.device("meta"):
        model = cls(config)
    weights: dict[str, Tensor] = {}
    for entry in tqdm(table.entries, desc="Loading weights", unit="tensor", disable=None):
        weight = torch.empty(entry.shape, dtype=dtype or stored[entry.name], device=device)
        checkpoint.read(entry, weight)
        weights[entry.name] = weight
    model.load_state_dict(weights, assign=True)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.to_empty(device=device)  # not in the table: derived from the config
    if dtype is not None:
        config.dtype = _name(dtype)
    model.source_folder = folder
    model.source_dtype = model.embed_tokens.weight.dtype
    return model


def _check_one_dtype(stored: dict[str, torch.dtype], checkpoint: Checkpoint, table: Table) -> None:
    """Refuse embeddings and projections of several dtypes; norms may have one of their own."""
    entries = [entry for entry in table if "norm" not in entry.name]
    first = entries[0]
    for entry in entries:
        if stored[entry.name] != stored[first.name]:
            info = checkpoint.tensors[entry.spans[0].source]
            raise CheckpointError(
                f"{info.path}: {entry.spans[0].source!r} is stored in "
                f"{_name(stored[entry.name])}, but {first.spans[0].source!r} in "
                f"{_name(stored[first.name])}; choose one for all: from_hf(..., dtype=...)"
            )


def save(model: "DecoderModel", folder: str | os.PathLike[str], max_shard_size: int) -> None:
    """`DecoderModel.save_hf`."""
    config = model.config
    _check_config(model, folder)
    dtype = model.embed_tokens.weight.dtype
    if dtype != model.source_dtype:
        config = dataclasses.replace(config, dtype=_name(dtype))
    table = table_for(config)
    # Weights tied by hand stand under both names, as an untied config says.
    weights = dict(model.named_parameters(remove_duplicate=False))
    _check_savable(weights, {entry.name: entry.shape for entry in table}, folder)
    writer.save(
        folder,
        hf_config.to_hf(config),
        table,
        lambda name: weights[name].detach(),
        source_folder=model.source_folder,
        max_shard_size=max_shard_size,
    )


# What may change after the modules were made: nothing there is computed from it.
_FREE = {
    *("vocab_size", "initializer_range", "dtype", "extra"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
# The other rope types compute with max_position_embeddings, or may.
_ROPES_OF_ANY_LENGTH = ("default", "linear", "proportional")


def _check_config(model: "DecoderModel", folder: str | os.PathLike[str]) -> None:
    """Refuse to export a config that is not the one the model computes with."""
    config, built_from = model.config, model.built_from
    if getattr(model, "config_class", None) is not type(config):
        raise SaveError(
            f"{Path(folder)}: {type(model).__name__} does not declare {type(config).__name__} as "
            f"its config_class: as {config.model_type!r} other programs might compute something "
            "else; save its state_dict() instead"
        )
    rope = (built_from.rope_scaling or {}).get("rope_type", "default")
    free = _FREE | ({"max_position_embeddings"} if rope in _ROPES_OF_ANY_LENGTH else set())
    for name in (field.name for field in dataclasses.fields(config)):
        now, then = getattr(config, name), getattr(built_from, name)
        if name not in free and now != then:
            raise SaveError(
                f"{Path(folder)}: config.{name} is {now!r}, but the model was built with {then!r} "
                "and still computes with that; set it back, or build a model from the new config"
            )


def _check_savable(
    weights: dict[str, torch.nn.Parameter],
    expected: dict[str, tuple[int, ...]],
    folder: str | os.PathLike[str],
) -> None:
    where = Path(folder)
    if odd := sorted(weights.keys() ^ expected.keys()):
        raise SaveError(
            f"{where}: parameter {odd[0]!r} does not belong to this architecture or is missing "
            f"({len(odd)} such); merge adapters first (peft: merge_and_unload), and undo wrappers "
            f"around projections\n{listing(odd)}"
        )
    for name, shape in expected.items():
        weight = weights[name]
        if hasattr(weight, "full_tensor"):
            raise SaveError(
                f"{where}: parameter {name!r} is sharded; gather the weights first "
                "(torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "full_state_dict=True) and load them into a model on one rank"
            )
        if tuple(weight.shape) != shape:
            raise SaveError(
                f"{where}: parameter {name!r} has shape {tuple(weight.shape)}, but the config asks "
                f"for {shape}; change model.config along with the model"
            )
        if weight.is_meta:
            raise SaveError(f"{where}: parameter {name!r} is on the meta device: it has no values")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
