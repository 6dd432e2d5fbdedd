"""Data sets of the hub, and tables in files, as JSONL files: read by the library `datasets`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligermodels.integrations import require

require("datasets")

import datasets
from huggingface_hub import constants

from ligermodels.converters.files import open_regular, sync_file
from ligermodels.errors import DataError, first_line
from ligermodels.training.data import file_hash


def jsonl_of(name: str, config: str | None, split: str, *, progress: bool = True) -> Path:
    """Return a JSONL file with the rows of a data set of the hub, written once.

    It lies in HF_HOME. Another revision of the data set makes another file.

    Args: name: its id; config: one of its configurations; split: "train" or "train[:1%]", say;
        progress: whether the library may show bars.
    Raises:
        DataError: the data set cannot be loaded.
    """
    with _bars(progress):
        try:
            found = datasets.load_dataset(name, config, split=split)
        except Exception as error:  # The library raises errors of many packages.
            why = first_line(error)
            raise DataError(f"{name}: the data set cannot be loaded: {why}") from error
        return _written(found, _path(name.replace("/", "--"), found._fingerprint))


def jsonl_of_table(file: Path, *, progress: bool = True) -> Path:
    """Return a JSONL file with the rows of a .parquet or .csv file.

    It is found again by the content of the table.

    Raises:
        DataError: the file cannot be read, or its rows cannot be written.
    """
    # The library takes a name for a pattern, and knows a file again by its time and size. So it
    # gets a plain name, and a cache that is new.
    with tempfile.TemporaryDirectory() as folder, _bars(progress):
        plain = Path(folder) / f"table{file.suffix.lower()}"
        try:
            path = _path(file.stem, _copied(file, plain)[:16])
            if _is_whole(path):
                return path
            kind = plain.suffix.lstrip(".")
            found = datasets.load_dataset(
                kind, data_files=str(plain), split="train", cache_dir=str(Path(folder) / "cache")
            )
        except Exception as error:
            why = first_line(error.__cause__ or error)
            raise DataError(f"{file}: the file cannot be read: {why}") from error
        return _written(found, path)


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Hide the library's progress bars within the context, unless they shall be shown."""
    hide = not shown and datasets.is_progress_bar_enabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()


def _copied(file: Path, target: Path) -> str:
    """Copy a file, and return the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    with open_regular(file, DataError) as source, target.open("wb") as copy:
        while block := source.read(2**20):
            digest.update(block)
            copy.write(block)
    return digest.hexdigest()


def _path(name: str, digest: str) -> Path:
    return Path(constants.HF_HOME) / "ligermodels" / "data" / f"{name}-{digest}.jsonl"


def _checksum(path: Path) -> Path:
    """Return the file with the SHA-256 of a JSONL file."""
    return path.with_name(f"{path.name}.sha256")


def _is_whole(path: Path) -> bool:
    """Return whether a JSONL file is there, as it was written."""
    try:
        return _checksum(path).read_bytes().decode("ascii", "replace") == file_hash(path)
    except (OSError, DataError):
        return False


def _written(found: Any, path: Path) -> Path:
    """Write the rows of a data set, if they are not there yet or are damaged."""
    if _is_whole(path):
        return path
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.to_json(aside, lines=True, force_ascii=False)
        sync_file(aside)
        digest = file_hash(aside)
        os.replace(aside, path)
        aside.write_text(digest, encoding="ascii")
        os.replace(aside, _checksum(path))
    except Exception as error:  # Values that JSON does not have raise errors of many packages.
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise DataError(f"{path}: the file cannot be written: {first_line(error)}") from error
    return path
