"""Exporting: HF tensors taken out of native parameters, in shards, with config and tokenizer."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.converters.atomic_dir import replace_dir
from ligermodels.converters.checkpoint_files import (
    CHAT_TEMPLATE_DIR,
    CONFIG_NAME,
    COPIED_FILES,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SHARD_NAME,
    copied_files,
)
from ligermodels.converters.files import read_json, sync_file, write_json
from ligermodels.converters.safetensors_file import DTYPES
from ligermodels.converters.weight_map import Table
from ligermodels.errors import CheckpointError, SaveError

_SPELLING = {dtype: name for name, dtype in DTYPES.items()}
Piece = tuple[str, int, int]  # native name, first row, end


class _Plan:
    """HF tensors of an export: name, shape, dtype, and the native rows they are made of."""

    def __init__(self, table: Table, dtypes: Mapping[str, torch.dtype]) -> None:
        self.native = {e.name: (e.shape, dtypes[e.name]) for e in table}
        self.shapes = table.source_shapes()
        self.pieces: dict[str, list[Piece]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for source, parts in table.parts().items():
            self.pieces[source] = [(e.name, s.row, s.row + s.rows) for e, s in parts]
            self.dtypes[source] = dtypes[parts[0][0].name]

    def nbytes(self, name: str) -> int:
        return torch.Size(self.shapes[name]).numel() * self.dtypes[name].itemsize

    def shards(self, max_size: int) -> list[list[str]]:
        """Names per file: in table order, a new file where the next tensor would not fit."""
        shards: list[list[str]] = [[]]
        size = 0
        for name in self.shapes:
            if shards[-1] and size + self.nbytes(name) > max_size:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += self.nbytes(name)
        return shards


def save(
    folder: str | os.PathLike[str],
    config_dict: Mapping[str, Any],
    table: Table,
    get_tensor: Callable[[str], Tensor],
    *,
    source_folder: str | os.PathLike[str] | None = None,
    max_shard_size: int = 5 * 10**9,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write an HF checkpoint, replacing what `folder` held in one step.

    Needs memory for one native parameter on the CPU. Files in `folder` that are no part of a
    checkpoint stay; so do its tokenizer files, unless `source_folder` brings its own.

    Args:
        config_dict: what becomes config.json; see `converters.config.to_hf`.
        get_tensor: native name -> parameter, of any float dtype on any device.
        source_folder: where tokenizer and generation files are copied from, bit for bit.
        max_shard_size: bytes of tensors per file; a larger tensor has a file of its own.
        dtypes: of the parameters by native name; spares a call of get_tensor each.
    Raises:
        SaveError: disk full, no permission, not a folder; the old content is still there.
    """
    if max_shard_size < 1:
        raise SaveError(f"{folder}: max_shard_size is {max_shard_size}, expected at least 1 byte")
    target = Path(folder).expanduser().resolve()
    source = target if source_folder is None else Path(source_folder)
    copied = [] if source_folder is None else copied_files(source)
    if dtypes is None:
        dtypes = {entry.name: get_tensor(entry.name).dtype for entry in table}
    plan = _Plan(table, dtypes)
    for name, dtype in plan.dtypes.items():
        if dtype not in _SPELLING:
            raise SaveError(f"{folder}: {name!r} is {dtype}, which an export does not hold")
    try:
        with replace_dir(target, _owned(target, bool(copied))) as fresh:
            write_json(fresh / CONFIG_NAME, config_dict)
            _write_weights(fresh, plan, get_tensor, max_shard_size)
            for name in copied:
                copy = fresh / name
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, copy)
                sync_file(copy)
    except OSError as fault:  # a SaveError of ours among them
        raise SaveError(
            f"{folder}: could not be saved: {fault.strerror or fault}; what was there is unchanged"
        ) from fault


def _owned(target: Path, brings_tokenizer: bool) -> Callable[[str], bool]:
    """Which files of the old folder a new checkpoint replaces, even by nothing."""
    stale = {CONFIG_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME}
    if brings_tokenizer:
        # A tokenizer.json left from another model would win over this one's tokenizer.model.
        stale.update(COPIED_FILES, [CHAT_TEMPLATE_DIR])
    with contextlib.suppress(CheckpointError):  # a damaged index is replaced all the same
        weight_map = read_json(target / SAFE_WEIGHTS_INDEX_NAME, CheckpointError).get("weight_map")
        named = weight_map.values() if isinstance(weight_map, dict) else ()
        # Not whatever a hostile index names: the user's files stay.
        stale.update(n for n in named if isinstance(n, str) and n.endswith(".safetensors"))
    return lambda name: name in stale or SHARD_NAME.fullmatch(name) is not None


def _write_weights(
    folder: Path, plan: _Plan, get_tensor: Callable[[str], Tensor], max_shard_size: int
) -> None:
    shards = plan.shards(max_shard_size)
    if len(shards) == 1:
        return _write_shard(folder / SAFE_WEIGHTS_NAME, shards[0], plan, get_tensor)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, names, plan, get_tensor)
        weight_map.update(dict.fromkeys(names, file))
    total = sum(map(plan.nbytes, weight_map))
    write_json(
        folder / SAFE_WEIGHTS_INDEX_NAME,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_shard(
    path: Path, names: list[str], plan: _Plan, get_tensor: Callable[[str], Tensor]
) -> None:
    """A safetensors file, streamed, so that it takes memory for one parameter and not a shard.

    The format: https://github.com/huggingface/safetensors#format
    """
    # Widest dtype first, so that every tensor is aligned to its item size.
    names = sorted(names, key=lambda name: -plan.dtypes[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + plan.nbytes(name)
        header[name] = {
            "dtype": _SPELLING[plan.dtypes[name]],
            "shape": list(plan.shapes[name]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces = [piece for name in names for piece in plan.pieces[name]]
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for rows in _rows(pieces, plan, get_tensor):
            file.write(rows.reshape(-1).view(torch.uint8).numpy().data)
    sync_file(path)


def _rows(
    pieces: list[Piece], plan: _Plan, get_tensor: Callable[[str], Tensor]
) -> Iterator[Tensor]:
    """The native rows on the CPU; a parameter that several pieces follow from is got once."""
    held = None
    tensor = torch.empty(0)
    for name, first, end in pieces:
        if name != held:
            tensor = get_tensor(name).detach().to("cpu").contiguous()
            held = name
            shape, dtype = plan.native[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise SaveError(
                    f"parameter {name!r} is {tensor.dtype} of shape {list(tensor.shape)}, "
                    f"expected {dtype} of shape {list(shape)}"
                )
        yield tensor[first:end]
