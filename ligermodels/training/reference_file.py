"""Log-probabilities of a reference model, computed once and kept in a file.

A run that has them needs no reference model in memory. The file's name holds a hash of the data and
the model, so a file is found by what it was computed from, and several runs may share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ligermodels.converters.files import names_if_present
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.errors import CheckpointError
from ligermodels.parallel.ranks import error_on_all_ranks, from_rank_0, rank
from ligermodels.training.files import PART, atomic_write, writing

_NAME, _SHA256 = "log_probs", "sha256"
_FILE = re.compile(r"reference-[0-9a-f]{24}\.safetensors(" + re.escape(PART) + ")?")


def reference_path(folder: Path, *parts: str) -> Path:
    """Return the file for log-probabilities that depend on these texts, hashes for example."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return folder / f"reference-{digest.hexdigest()[:24]}.safetensors"


def stored_log_probs(path: Path, count: int, compute: Callable[[], Tensor]) -> Tensor:
    """Return the numbers in a file; if there is no file, compute and write them first.

    Args:
        path: from `reference_path`; its folder is made.
        count: how many numbers there are.
        compute: returns them, (count) float32. All ranks call it together, and rank 0 writes.
    Returns: (count) float32, on the CPU.
    Raises:
        CheckpointError: the file is damaged, or holds another number of values.
        SaveError: the file cannot be written.
    """
    if not from_rank_0(path.exists()):
        values = compute().detach().float().cpu().contiguous()
        assert values.shape == (count,), values.shape
        with error_on_all_ranks():
            if rank() == 0:
                _write(path, values)
        return values
    with error_on_all_ranks():
        try:
            return _read(path, count)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; remove the file, and it is computed again") from None


def _write(path: Path, values: Tensor) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {_SHA256: _digest(values)}
    atomic_write(path, lambda part: save_file({_NAME: values}, part, metadata))


def _read(path: Path, count: int) -> Tensor:
    file = SafetensorsFile(path)
    if [*file.tensors] != [_NAME]:
        raise CheckpointError(f"{path}: the file holds no log-probabilities")
    info = file.tensors[_NAME]
    if (info.dtype, tuple(info.shape)) != ("F32", (count,)):
        raise CheckpointError(
            f"{path}: the file holds {info.dtype} of shape {tuple(info.shape)}; expected F32 of "
            f"shape ({count},)"
        )
    values = file.tensor(_NAME)
    if file.metadata.get(_SHA256) != _digest(values):
        raise CheckpointError(f"{path}: the content does not match its checksum")
    return values


def remove_stored(folder: Path) -> None:
    """Remove all files of `reference_path` in a folder, and the folder if nothing else is in it.

    Raises:
        SaveError: a file cannot be removed.
    """
    for name in names_if_present(folder, CheckpointError) or ():
        if _FILE.fullmatch(name):
            with writing(folder / name):
                (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
