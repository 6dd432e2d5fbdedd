"""Proving that a checkpoint survives the way in and out, bit for bit; comparing two of them."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.converters.checkpoint import Checkpoint, bitwise_equal
from ligermodels.converters.checkpoint_files import CONFIG_NAME, copied_files
from ligermodels.converters.export import save
from ligermodels.converters.hf_config import read_config, text_config, to_hf
from ligermodels.converters.safetensors_file import DTYPES
from ligermodels.converters.weight_map import Family
from ligermodels.errors import listing


@dataclass(frozen=True)
class Report:
    """What was compared with its copy, and what differs; `ok` when nothing does.

    Attributes:
        tensors: HF tensors compared bit for bit; a stored tied head counts as its original.
        nbytes: their size.
        config_keys: keys of config.json compared.
        files: tokenizer and generation files compared.
        differences: one line for each thing that differs.
    """

    tensors: int
    nbytes: int
    config_keys: int
    files: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        what = (
            f"{self.tensors} tensors ({self.nbytes:,} bytes), {self.config_keys} config keys, "
            f"{len(self.files)} tokenizer and generation files"
        )
        if self.ok:
            return f"bitwise equal: {what}"
        return f"{len(self.differences)} differences in {what}\n{listing(self.differences)}"


def verify(
    folder: str | os.PathLike[str],
    family: Family,
    *,
    scratch: str | os.PathLike[str] | None = None,
    max_shard_size: int = 5 * 10**9,
    allow_nonfinite: bool = False,
) -> Report:
    """Convert a checkpoint to the native layout and back, and compare everything bitwise.

    Takes memory for one native parameter, and disk for one more copy of the checkpoint.

    Args:
        folder: a local HF checkpoint.
        family: its model class.
        scratch: where the copy is made for the time; default the system's temporary folder.
        allow_nonfinite: let NaN and infinite weights through.
    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be loaded in the first place.
        SaveError: the copy cannot be written.
    """
    folder = Path(folder)
    config = family.config_class.from_hf(folder)
    weight_map = family.weight_map(config)
    original = Checkpoint(folder, allow_nonfinite=allow_nonfinite)
    dtypes = original.plan(weight_map)
    original.check_aliases(weight_map)
    entries = {entry.name: entry for entry in weight_map}

    def get_tensor(name: str) -> Tensor:
        out = torch.empty(entries[name].shape, dtype=dtypes[name])
        original.read(entries[name], out)
        return out

    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as parent:
        copy = Path(parent) / "copy"
        save(
            copy,
            to_hf(config),
            weight_map,
            get_tensor,
            source_folder=folder,
            max_shard_size=max_shard_size,
            dtypes=dtypes,
        )
        return compare(folder, copy, family)


def compare(
    folder: str | os.PathLike[str],
    copy: str | os.PathLike[str],
    family: Family,
    *,
    dtype: torch.dtype | None = None,
) -> Report:
    """Compare a checkpoint with its export: tensors bitwise, config keys, tokenizer files.

    Args:
        folder, copy: local HF checkpoints of one family; what only the copy has is no difference.
        family: their model class.
        dtype: what the copy was cast to; default each tensor's own.
    Raises:
        ConfigError, CheckpointError: one of them cannot be read.
    """
    folder, copy = Path(folder), Path(copy)
    original, exported = Checkpoint(folder), Checkpoint(copy)
    names = _names(original, family)
    pairs = list(zip(names, _names(exported, family), strict=True))
    raw = text_config(read_config(folder), family.config_class)
    files = tuple(copied_files(folder))
    recast = ("dtype", "torch_dtype") if dtype is not None else ()
    compared = {key: value for key, value in raw.items() if key not in recast}
    differences = [
        *(
            f"{name}: differs"
            for name, other in pairs
            if not _same_tensor(original, name, exported, other, dtype)
        ),
        *_config_differences(compared, read_config(copy)),
        *(f"{name}: differs" for name in files if not _same_file(folder / name, copy / name)),
    ]
    nbytes = sum(original.tensors[name].nbytes for name in names)
    return Report(len(names), nbytes, len(compared), files, tuple(differences))


def _names(checkpoint: Checkpoint, family: Family) -> list[str]:
    """The HF tensors that the checkpoint's model is made of, in the order of an export."""
    weight_map = family.weight_map(family.config_class.from_hf(checkpoint.folder))
    checkpoint.plan(weight_map)
    return list(weight_map.source_shapes())


def _same_tensor(
    original: Checkpoint, name: str, exported: Checkpoint, other: str, dtype: torch.dtype | None
) -> bool:
    if dtype is None or DTYPES[original.tensors[name].dtype] == dtype:
        return original.bitwise_equal(name, exported, other)
    return bitwise_equal(original.tensor(name).to(dtype), exported.tensor(other))


def _config_differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key, value in before.items():
        if key == "rope_parameters" and value is None:
            continue  # never exported as null: llama.cpp would then skip rope_scaling
        # repr tells 1 from 1.0 and from true.
        if key not in after or repr(after[key]) != repr(value):
            yield f"{CONFIG_NAME}: {key!r} was {value!r}, is {after.get(key)!r}"


def _same_file(a: Path, b: Path) -> bool:
    return b.is_file() and a.read_bytes() == b.read_bytes()
