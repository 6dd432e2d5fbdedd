"""Medusa's heads in a file beside the model, with the names of Medusa's own checkpoints.

Block j of head i is `i.j.linear.weight` and `i.j.linear.bias`, and the projection of a head with n
blocks is `i.n.weight`. Heads that share the model's projection have none in the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ligermodels.converters.files import names_if_present
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.converters.save_dir import sync_file, sync_folder
from ligermodels.errors import CheckpointError, SaveError, first_line
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.models.base import DecoderModel

HEADS_NAME = "medusa_lm_head.safetensors"
_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


def save_heads(heads: MedusaHeads, folder: str | Path) -> None:
    """Write the heads into the folder of their model.

    Raises:
        SaveError: a value is not finite, or the file cannot be written.
    """
    write_heads(tensors_of(heads), folder)


def write_heads(tensors: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write the tensors of heads, by their names in the file, as `save_heads` does."""
    file = Path(folder) / HEADS_NAME
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise SaveError(f"{file.name}: {name} has values that are infinite or NaN")
    part = file.with_name(file.name + ".part")
    try:
        save_file(tensors, part, {"format": "pt"})
        sync_file(part)
        os.replace(part, file)
        sync_folder(file.parent)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{file}: the heads cannot be written: {first_line(error)}") from error


def load_heads(model: DecoderModel, folder: str | Path) -> MedusaHeads | None:
    """Return the heads that a model's folder holds, on the model's device; None if it has none.

    Raises:
        CheckpointError: the file cannot be read, does not belong to the model, or has a value that
            is not finite.
    """
    found = _open(model, Path(folder) / HEADS_NAME)
    if found is None:
        return None
    heads, opened = found
    with torch.no_grad():
        for name, tensor in tensors_of(heads).items():
            tensor.copy_(_values(opened, name))
    return heads


def read_heads(model: DecoderModel, folder: str | Path) -> dict[str, Tensor] | None:
    """Return the heads' tensors as they are stored, by name; None if the folder holds no heads.

    Nothing is allocated for the heads' modules.

    Raises:
        CheckpointError: as `load_heads`.
    """
    empty, _ = type(model).on_meta(model.built_from)
    found = _open(empty, Path(folder) / HEADS_NAME)
    if found is None:
        return None
    _, opened = found
    return {name: _values(opened, name) for name in opened.tensors}


def _open(model: DecoderModel, file: Path) -> tuple[MedusaHeads, SafetensorsFile] | None:
    """Return new heads of the file's shapes, and the file; None if there is no file."""
    # A dead link has the name, too: it is an error, and no absent file.
    if HEADS_NAME not in (names_if_present(file.parent, CheckpointError) or ()):
        return None
    opened = SafetensorsFile(file)
    stored = opened.tensors
    places = [match for name in stored if (match := _NAME.fullmatch(name))]
    linears = [match for match in places if match[3]]
    count, blocks = (1 + max((int(x[group]) for x in linears), default=-1) for group in (1, 2))
    # Names of high numbers must not make as many heads.
    if len(places) != len(stored) or not len(linears) == count * blocks * 2 > 0:
        raise CheckpointError(
            f"{file}: the tensors are not those of Medusa's heads, each with as many blocks"
        )
    tied = len(places) == len(linears)
    heads = MedusaHeads(model.head, count, num_blocks=blocks, tied=tied)
    shapes = {name: tuple(x.shape) for name, x in tensors_of(heads).items()}
    found = {name: tuple(x.shape) for name, x in stored.items()}
    if wrong := sorted(n for n in {**shapes, **found} if shapes.get(n) != found.get(n)):
        raise CheckpointError(
            f"{file}: {wrong[0]} has the shape {found.get(wrong[0])}; these {count} heads of this "
            f"model need {shapes.get(wrong[0])}"
        )
    return heads, opened


def _values(file: SafetensorsFile, name: str) -> Tensor:
    """Read a tensor of finite values."""
    values = file.tensor(name)
    if not values.isfinite().all():
        raise CheckpointError(f"{file.path}: {name} has values that are infinite or NaN")
    return values


def tensors_of(heads: MedusaHeads) -> dict[str, Tensor]:
    """Return the parameters of the heads, by the names in the file."""
    found: dict[str, Tensor] = {}
    for i, blocks in enumerate(heads.blocks):
        assert isinstance(blocks, nn.Sequential)
        parts = [*blocks]
        for j, block in enumerate(parts):
            found |= {f"{i}.{j}.{name}": x for name, x in block.named_parameters()}
        if not heads.tied:
            own = heads.head(i).proj.named_parameters()
            found |= {f"{i}.{len(parts)}.{name}": x for name, x in own}
    return found
