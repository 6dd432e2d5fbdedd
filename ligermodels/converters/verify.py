"""Proving that a checkpoint survives the way in and out, bit for bit."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.converters.config import fields_from_hf, read_config, to_hf
from ligermodels.converters.files import CONFIG, copied_files
from ligermodels.converters.reader import Checkpoint
from ligermodels.converters.table import table_for
from ligermodels.converters.writer import save
from ligermodels.errors import listing


@dataclass(frozen=True)
class Report:
    """What a round trip compared, and what differs; `ok` when nothing does.

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
            return f"bitwise equal after the round trip: {what}"
        lines = listing(self.differences)
        return f"{len(self.differences)} differences after the round trip of {what}\n{lines}"


def verify(
    folder: str | os.PathLike[str],
    config_class: Any,
    *,
    scratch: str | os.PathLike[str] | None = None,
    max_shard_size: int = 5 * 10**9,
) -> Report:
    """Convert a checkpoint to the native layout and back, and compare everything bitwise.

    Takes memory for one native parameter, and disk for one more copy of the checkpoint.

    Args:
        folder: a local HF checkpoint.
        config_class: the config class of its family.
        scratch: where the copy is made for the time; default the system's temporary folder.
    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be loaded in the first place.
        SaveError: the copy cannot be written.
    """
    folder = Path(folder)
    raw = read_config(folder)
    config = config_class(**fields_from_hf(raw, config_class, str(folder / CONFIG)))
    table = table_for(config)
    original = Checkpoint(folder)
    dtypes = original.plan(table)
    original.check_aliases(table)
    entries = {entry.name: entry for entry in table}

    def get_tensor(name: str) -> Tensor:
        out = torch.empty(entries[name].shape, dtype=dtypes[name])
        original.read(entries[name], out)
        return out

    parent = Path(tempfile.mkdtemp(dir=scratch))
    try:
        copy = parent / "copy"
        save(
            copy,
            to_hf(config),
            table,
            get_tensor,
            source_folder=folder,
            max_shard_size=max_shard_size,
            dtypes=dtypes,
        )
        exported = Checkpoint(copy)
        exported.plan(table)
        files = tuple(copied_files(folder))
        differences = [
            *(
                f"{name}: differs"
                for name in table.source_shapes()
                if not original.same_bits(name, exported, name)
            ),
            *_config_differences(raw, read_config(copy)),
            *(f"{name}: differs" for name in files if not _same_file(folder / name, copy / name)),
        ]
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    compared = [original.tensors[name] for name in table.source_shapes()]
    return Report(
        len(compared), sum(i.nbytes for i in compared), len(raw), files, tuple(differences)
    )


def _config_differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key, value in before.items():
        if key == "rope_parameters" and value is None:
            continue  # never exported as null: llama.cpp would then skip rope_scaling
        # repr tells 1 from 1.0 and from true.
        if key not in after or repr(after[key]) != repr(value):
            yield f"{CONFIG}: {key!r} was {value!r}, is {after.get(key)!r}"


def _same_file(a: Path, b: Path) -> bool:
    return b.is_file() and a.read_bytes() == b.read_bytes()
