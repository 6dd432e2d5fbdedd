"""Write and read tensors of which each rank holds parts, by `torch.distributed.checkpoint`.

A folder holds the files of that library and `sha256.json`, with the hash of each file. The parts
are rectangles of whole tensors, so any number of ranks, in any layout, can read what another wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ligermodels.converters.files import read_json, sync_file, sync_folder
from ligermodels.errors import CheckpointError, LigerError, SaveError, first_line
from ligermodels.parallel.layout import TensorSlice
from ligermodels.parallel.ranks import (
    error_on_all_ranks,
    gathered,
    is_distributed,
    num_ranks,
    rank,
)
from ligermodels.parallel.state import SlicedTensor
from ligermodels.training.data import file_hash
from ligermodels.training.files import PART, writing

FACTS = "facts.json"
_DTYPES = (str(each)[6:] for each in vars(torch).values() if isinstance(each, torch.dtype))
_METADATA = ".metadata"  # the name that torch.distributed.checkpoint gives it
# What the pickle of a folder of tensors names. A pickle can call whatever it names.
_PICKLED = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # since Python 3.13
    "torch": {
        "Size",
        *(str(each)[6:] for each in vars(torch).values() if type(each) is torch.dtype),
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
}


@dataclass(frozen=True)
class Stored:
    """A whole tensor's shape and dtype, and the parts of it that this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[TensorSlice]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _PICKLED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensors need")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reads a folder, and runs no code that its files name.

    PyTorch's reader takes any pickle, and reads whichever files the pickle names.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / _METADATA
        try:
            with open(file, "rb") as opened:
                found = _Unpickler(opened).load()
            places = {info.relative_path for info in found.storage_data.values()}
            found.storage_meta = found.storage_meta or StorageMeta()
        except Exception as error:  # a pickle can raise anything
            raise CheckpointError(
                f"{file}: the file cannot be read: {first_line(error)}"
            ) from error
        if odd := sorted(places - facts_of(Path(self.path))["files"].keys()):
            raise CheckpointError(f"{file}: it names {odd[0]!r}, which is no file of this folder")
        found.storage_meta.load_id = self.load_id
        return found


def _whole(stored: Stored) -> SlicedTensor:
    return SlicedTensor(stored.shape, stored.dtype, stored.parts)


def write(folder: Path, tensors: Mapping[str, Stored], facts: Mapping[str, Any]) -> None:
    """Write a folder. It has its name only when it is whole. Every rank calls it.

    Args: facts: JSON values to write with it.
    Raises:
        SaveError: on any rank, it cannot be written. All ranks raise.
    """
    aside = folder.with_name(folder.name + PART)
    with error_on_all_ranks(SaveError), writing(folder):
        if rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
    with _quiet(SaveError, f"{folder}: cannot be written"):
        dcp.save(
            {name: _whole(stored) for name, stored in tensors.items()},
            storage_writer=dcp.FileSystemWriter(aside, sync_files=False),
            no_dist=not is_distributed(),
        )
    own = f"__{rank()}_"
    with error_on_all_ranks(SaveError), writing(folder):
        names = sorted(os.listdir(aside))
        mine = [name for name in names if name.startswith(own) or (not rank() and name[0] == ".")]
        # torch flushes its index before the last bytes have left Python's buffer.
        for name in mine:
            sync_file(aside / name)
        hashes = {name: file_hash(aside / name) for name in mine}
    files = {name: value for each in gathered(hashes) for name, value in each.items()}
    with error_on_all_ranks(SaveError), writing(folder):
        if rank() == 0:
            text = json.dumps({**facts, "files": files}, indent=2)
            (aside / FACTS).write_text(text, encoding="utf-8")
            sync_file(aside / FACTS)
            sync_folder(aside)
            if folder.exists():
                remove(folder)
            os.replace(aside, folder)
            sync_folder(folder.parent)


def read(folder: Path, tensors: Mapping[str, Stored], *, prefix: str = "") -> None:
    """Copy the values of a folder into the parts of tensors. Every rank calls it.

    Args: prefix: what the names to read begin with; the folder may hold other names, too.

    Raises:
        CheckpointError: on any rank, a file is missing or damaged, or the folder has other tensors.
            All ranks raise. After an error in the hashes or names, no value has changed.
    """
    with error_on_all_ranks(CheckpointError):
        for number, (name, digest) in enumerate(facts_of(folder)["files"].items()):
            if number % num_ranks() == rank():
                _check_hash(folder / name, digest)
        held = _Reader(folder).read_metadata().state_dict_metadata
        names = {name for name in held if name.startswith(prefix)}
        for name in sorted(names ^ tensors.keys()):
            what = "is missing" if name in tensors else "is no tensor of this model"
            raise CheckpointError(f"{folder}: {name!r} {what}: it belongs to another model")
        for name, stored in tensors.items():
            found = held[name]
            dtype = found.properties.dtype if isinstance(found, TensorStorageMetadata) else None
            if dtype != stored.dtype or tuple(found.size) != stored.shape:  # type: ignore[union-attr]
                raise CheckpointError(
                    f"{folder}: {name!r} is {dtype} of another shape or dtype than the model's "
                    f"{stored.dtype} of shape {list(stored.shape)}: it belongs to another model"
                )
    with _quiet(CheckpointError, f"{folder}: cannot be read"):
        dcp.load(
            {name: _whole(stored) for name, stored in tensors.items()},
            storage_reader=_Reader(folder),
            no_dist=not is_distributed(),
        )


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the JSON values that were written with a folder, and the hash of each of its files.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    found = read_json(folder / FACTS, CheckpointError)
    files = found.get("files")
    if not isinstance(files, dict) or not all("/" not in name for name in files):
        raise CheckpointError(f"{folder / FACTS}: 'files' is not what a run writes")
    return found


def is_whole(folder: Path) -> bool:
    """Return whether a folder was written to its end, and no removal has begun."""
    return (folder / FACTS).is_file()


def remove(folder: Path) -> None:
    """Remove a folder. If that is cut short, what remains is not whole."""
    with writing(folder):
        (folder / FACTS).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _check_hash(file: Path, digest: str) -> None:
    if not os.path.lexists(file):
        raise CheckpointError(f"{file}: the file is missing")
    try:
        found = file_hash(file)
    except LigerError as error:
        raise CheckpointError(str(error)) from None
    if found != digest:
        raise CheckpointError(f"{file}: the content does not match its checksum")


@contextlib.contextmanager
def _quiet(kind: type[LigerError], what: str) -> Iterator[None]:
    """Turn an error of torch.distributed.checkpoint, which has it on all ranks, into ours."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except (dcp.CheckpointException, OSError, RuntimeError, ValueError) as error:
        failures = getattr(error, "failures", {})
        first = next((each[0] for each in failures.values()), error)
        found = kind(f"{what}: {first_line(first)}")
        found.is_repeated = rank() != 0
        raise found from error
