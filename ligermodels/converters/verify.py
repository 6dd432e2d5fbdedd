"""Verify that a checkpoint survives import and export bit for bit, and compare two checkpoints."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.converters.checkpoint import FLOAT8, MXFP4, Checkpoint, bitwise_equal
from ligermodels.converters.export import save
from ligermodels.converters.files import ADDED_WEIGHTS, CONFIG_NAME, copied_files
from ligermodels.converters.hf_config import QUANTIZER, kept_config, read_config, to_hf
from ligermodels.converters.safetensors_file import DTYPES, SafetensorsFile
from ligermodels.converters.weight_map import Entry, Family
from ligermodels.errors import counted, listing


@dataclass(frozen=True)
class Report:
    """The result of a comparison. `ok` is True if nothing differs.

    Attributes:
        tensors: how many HF tensors were compared bitwise: those that the weight map ignores and
            those of Medusa's heads are among them. A stored tied head is not counted.
        nbytes: the size of these tensors.
        config_keys: how many keys of config.json were compared.
        files: the tokenizer and generation files that were compared.
        differences: one line for each tensor, key or file that differs.
        dequantized: how many of the tensors are in MXFP4 or float8 and were decoded, and compared
            with the values of the copy, which has other formats.
        cast: the dtype to which the copy was cast, or None.
    """

    tensors: int
    nbytes: int
    config_keys: int
    files: tuple[str, ...]
    differences: tuple[str, ...]
    dequantized: int = 0
    cast: torch.dtype | None = None

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        what = (
            f"{self.tensors} tensors ({self.nbytes:,} bytes), {self.config_keys} config keys, "
            f"{len(self.files)} tokenizer and generation files"
        )
        if self.ok and self.dequantized:
            return (
                f"equal: {what}; bitwise, but for {self.dequantized} tensors in MXFP4 or float8, "
                "whose decoded values (dequantized, in the dtype of the copy) are those of the copy"
            )
        if self.ok and self.cast:
            return f"equal after the cast to {str(self.cast).removeprefix('torch.')}: {what}"
        if self.ok:
            return f"bitwise equal: {what}"
        count = counted(len(self.differences), "difference")
        return f"{count} in {what}\n{listing(self.differences)}"


def verify(
    folder: str | os.PathLike[str],
    family: Family,
    *,
    max_shard_size: int = 5 * 10**9,
    allow_nonfinite: bool = False,
) -> Report:
    """Convert a checkpoint to the native layout and back, and compare everything bitwise.

    This takes memory for one native parameter, and disk space for a copy of the checkpoint.

    Args:
        folder: a local HF checkpoint.
        family: the model class of the checkpoint.
        max_shard_size: bytes of tensors per file of the copy.
        allow_nonfinite: whether to accept NaN and infinite weights.
    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be loaded.
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

    config_dict = to_hf(config)
    if original.weight_map.is_mxfp4 and QUANTIZER in config.extra:
        config_dict[QUANTIZER] = config.extra[QUANTIZER]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as parent:
        copy = Path(parent) / "copy"
        save(
            copy,
            config_dict,
            original.weight_map.spelled(original.spelling),
            get_tensor,
            dtypes,
            constants=original.constants(),
            source_files=copied_files(folder),
            max_shard_size=max_shard_size,
            allow_nonfinite=True,  # `read` has checked the values.
            write_added=partial(_copy_added, folder),
            mxfp4=original,
        )
        return compare(folder, copy, family)


def compare(
    folder: str | os.PathLike[str],
    copy: str | os.PathLike[str],
    family: Family,
    *,
    dtype: torch.dtype | None = None,
    kept: Collection[str] = (),
) -> Report:
    """Compare a checkpoint with its export: tensors bitwise, config keys, tokenizer files.

    If the two have different layouts, as the export of weights in MXFP4, the parameters are
    compared that a load would make of them.

    Args:
        folder, copy: local HF checkpoints of one family. Additional keys and files of the copy do
            not count as differences.
        family: the model class of both.
        dtype: the dtype to which the copy was cast. By default every tensor keeps its dtype.
        kept: the native names of the parameters that keep their dtype all the same.
    Raises:
        ConfigError, CheckpointError: one of the checkpoints cannot be read.
    """
    folder, copy = Path(folder), Path(copy)
    original, exported = Checkpoint(folder), Checkpoint(copy)
    names, others = _names(original, family), _names(exported, family)
    entries, differing = original.weight_map.entries, []
    coded = [
        sum(each.tensors[name].dtype in (MXFP4, FLOAT8) for name in of)
        for each, of in ((original, names), (exported, others))
    ]
    dequantized = 0 if coded[1] else coded[0]
    left = {span.source for entry in entries if entry.name in kept for span in entry.spans}
    if original.layout == exported.layout:
        differing = [
            name
            for name, other in zip(names, others, strict=True)
            if not _same_tensor(original, name, exported, other, None if name in left else dtype)
        ]
    else:
        differing = [
            entry.name
            for entry in entries
            if not _same_parameter(entry, original, exported, None if entry.name in kept else dtype)
        ]
    constants, found = original.constants(), exported.constants()
    raw = kept_config(read_config(folder), family.config_class)
    files, files_of_copy = copied_files(folder), copied_files(copy)
    recast = ("dtype", "torch_dtype") if dtype is not None else ()
    if dequantized:
        recast = (*recast, QUANTIZER)
    compared = _without(raw, recast)
    differences = [
        *(f"{name}: differs" for name in differing),
        *(f"{name}: differs" for name in constants if found.get(name) != constants[name]),
        *_config_differences(compared, _without(read_config(copy), recast)),
        *(f"{name}: differs" for name in files if files_of_copy.get(name) != files[name]),
    ]
    held = [original.tensors[name].nbytes for name in names]
    held += [each.nbytes for each in constants.values()]
    for name in _added(folder):
        added = SafetensorsFile(folder / name)
        held += [info.nbytes for info in added.tensors.values()]
        differences += _added_differences(added, copy / name, dtype)
    result = len(held), sum(held), len(compared), tuple(files), tuple(differences)
    return Report(*result, dequantized, dtype)


def _names(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Return the names of the HF tensors that the checkpoint's model uses, in export order."""
    weight_map = family.weight_map(family.config_class.from_hf(checkpoint.folder))
    checkpoint.plan(weight_map)
    return list(checkpoint.weight_map.source_shapes())


def _same_tensor(
    original: Checkpoint, name: str, exported: Checkpoint, other: str, dtype: torch.dtype | None
) -> bool:
    held = original.tensors[name].dtype
    if held == FLOAT8 and dtype is None:
        dtype = DTYPES.get(exported.tensors[other].dtype)
    if dtype is None or DTYPES.get(held) == dtype:
        return original.bitwise_equal(name, exported, other)
    return bitwise_equal(original.tensor(name).to(dtype), exported.tensor(other))


def _same_parameter(
    entry: Entry, original: Checkpoint, exported: Checkpoint, dtype: torch.dtype | None
) -> bool:
    """Whether a native parameter is the same in both, cast to the dtype of the copy."""
    kind = dtype or exported.dtype_of(entry)
    one, other = torch.empty(2, *entry.shape, dtype=kind)
    original.read(entry, one)
    exported.read(entry, other)
    return bitwise_equal(one, other)


def _added(folder: Path) -> list[str]:
    return [name for name in ADDED_WEIGHTS if (folder / name).exists()]


def _copy_added(source: Path, target: Path) -> None:
    """Copy the files of further weights, which a native model does not change."""
    for name in _added(source):
        shutil.copyfile(source / name, target / name)


def _added_differences(
    added: SafetensorsFile, path: Path, dtype: torch.dtype | None
) -> Iterator[str]:
    """Yield a line for each tensor of a file that differs in its copy."""
    copy = SafetensorsFile(path)
    for name in {**added.tensors, **copy.tensors}:
        if name in added.tensors and name in copy.tensors:
            one, other = added.tensor(name), copy.tensor(name)
            if bitwise_equal(one.to(dtype or one.dtype), other):
                continue
        yield f"{path.name}: {name}: differs"


def _without(raw: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a config without some keys, also in its text_config."""
    return {
        key: _without(value, keys) if key == "text_config" and isinstance(value, dict) else value
        for key, value in raw.items()
        if key not in keys
    }


def _config_differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key, value in before.items():
        if key == "rope_parameters" and value is None:
            continue  # An export never writes null, because llama.cpp would then skip rope_scaling.
        # The repr of 1 differs from that of 1.0 and of true.
        if key not in after or repr(after[key]) != repr(value):
            yield f"{CONFIG_NAME}: {key!r} was {value!r} and is now {after.get(key)!r}"
