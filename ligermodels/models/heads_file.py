"""Medusa's heads in a file beside the model, with the names of Medusa's own checkpoints.

Block j of head i is `i.j.linear.weight` and `i.j.linear.bias`, and the projection of a head with n
blocks is `i.n.weight`. Heads that share the model's projection have none in the file.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ligermodels.errors import CheckpointError, SaveError, first_line
from ligermodels.models.base import DecoderModel
from ligermodels.models.heads import MedusaHeads

HEADS_NAME = "medusa_lm_head.safetensors"
_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


def save_heads(heads: MedusaHeads, folder: str | Path) -> None:
    """Write the heads into the folder of their model.

    Raises:
        SaveError: the file cannot be written.
    """
    file = Path(folder) / HEADS_NAME
    tensors = {name: x.detach().cpu().contiguous() for name, x in _tensors(heads).items()}
    part = file.with_name(file.name + ".part")
    try:
        save_file(tensors, part, {"format": "pt"})
        part.replace(file)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{file}: the heads cannot be written: {first_line(error)}") from error


def load_heads(model: DecoderModel, folder: str | Path) -> MedusaHeads | None:
    """Return the heads that a model's folder holds, on the model's device; None if it has none.

    Raises:
        CheckpointError: the file cannot be read, or does not belong to the model.
    """
    file = Path(folder) / HEADS_NAME
    if not file.exists():
        return None
    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: the file cannot be read: {first_line(error)}") from error
    places = [match for name in stored if (match := _NAME.fullmatch(name))]
    linears = [match for match in places if match[3]]
    if len(places) != len(stored) or not linears:
        raise CheckpointError(f"{file}: the file holds other tensors than Medusa's heads")
    count, blocks = (1 + max(int(match[group]) for match in linears) for group in (1, 2))
    tied = len(places) == len(linears)
    heads = MedusaHeads(model.head, count, num_blocks=blocks, tied=tied)
    wanted = _tensors(heads)
    shapes = {name: tuple(x.shape) for name, x in wanted.items()}
    found = {name: tuple(x.shape) for name, x in stored.items()}
    if wrong := sorted(n for n in {**shapes, **found} if shapes.get(n) != found.get(n)):
        raise CheckpointError(
            f"{file}: {wrong[0]} has the shape {found.get(wrong[0])}; these {count} heads of this "
            f"model need {shapes.get(wrong[0])}"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(stored[name])
    return heads


def _tensors(heads: MedusaHeads) -> dict[str, Tensor]:
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
