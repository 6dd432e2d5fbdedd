"""Data by the library `datasets`, for `ligermodels.training.data`.

Data sets of the hub and tables become JSONL files. Tokens that are larger than memory stay on the
disk, in the Arrow files of that library.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ligermodels.integrations import require

require("datasets")

import datasets
import numpy as np
import pyarrow
from huggingface_hub import constants
from pyarrow import csv, parquet

from ligermodels.converters.save_dir import sync_file
from ligermodels.errors import DataError, LigerError, first_line
from ligermodels.progress import track
from ligermodels.training.data import Document
from ligermodels.training.run_dir import file_hash


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


def jsonl_of_table(file: Path) -> Path:
    """Return a JSONL file with the rows of a .parquet or .csv file.

    It is found again by the content of the table. Values of a .csv file are texts, except in
    columns that hold only true and false.

    Raises:
        DataError: the file cannot be read, or its rows cannot be written.
    """
    path = _path(file.stem, file_hash(file)[:16])
    if path.is_file():
        return path
    read = _read_csv if file.suffix.lower() == ".csv" else parquet.read_table
    try:
        found = datasets.Dataset(read(str(file)))
    except Exception as error:
        raise DataError(f"{file}: the file cannot be read: {first_line(error)}") from error
    return _written(found, path)


def _read_csv(file: str) -> pyarrow.Table:
    """Return a table whose texts stay as they are, also those that look like numbers or dates."""
    parse = csv.ParseOptions(newlines_in_values=True)
    blocks = csv.ReadOptions(block_size=2**28)  # A row must lie in two blocks at most.
    guessed = csv.read_csv(file, blocks, parse).schema
    kept = pyarrow.bool_(), pyarrow.null()
    types = {x.name: x.type if x.type in kept else pyarrow.string() for x in guessed}
    return csv.read_csv(file, blocks, parse, csv.ConvertOptions(column_types=types))


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


def _path(name: str, digest: str) -> Path:
    return Path(constants.HF_HOME) / "ligermodels" / "data" / f"{name}-{digest}.jsonl"


def _written(found: Any, path: Path) -> Path:
    """Write the rows of a data set, if they are not there yet."""
    if path.is_file():
        return path
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _bars(False):  # which would come between those of a run
            found.to_json(aside, lines=True, force_ascii=False)
        sync_file(aside)
        os.replace(aside, path)
    except Exception as error:  # Values that JSON does not have raise errors of many packages.
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise DataError(f"{path}: the file cannot be written: {first_line(error)}") from error
    return path


def stored_documents(documents: Callable[[], Iterator[Document]], key: str) -> Sequence[Document]:
    """Return documents whose tokens lie on the disk, in HF_HOME, written once.

    Args: documents: makes them anew, one after the other; key: a hash of all that they depend on.
    Raises:
        DataError: they cannot be made or written.
    """

    def rows() -> Iterator[dict[str, Any]]:
        for each in track(documents(), "storing the tokens of documents"):
            mask: np.ndarray = each.loss_mask.view(np.uint8)
            yield {"ids": each.ids, "loss_mask": mask, "divisible": each.divisible}

    features: dict[str, Any] = {
        "ids": datasets.LargeList(datasets.Value("int32")),
        "loss_mask": datasets.LargeList(datasets.Value("uint8")),
        "divisible": datasets.Value("bool"),
    }
    folder = Path(constants.HF_HOME) / "ligermodels" / "tokens"
    with _bars(False):
        try:
            found = datasets.Dataset.from_generator(
                rows, datasets.Features(features), cache_dir=str(folder), fingerprint=key
            )
        except Exception as error:
            if isinstance(error.__cause__, LigerError):
                raise error.__cause__ from None
            why = first_line(error.__cause__ or error)
            raise DataError(f"{folder}: the tokens cannot be written: {why}") from error
    return _StoredDocuments(found)


class _StoredDocuments(Sequence[Document]):
    """Documents in Arrow files. Their arrays are views of the files, read when they are used."""

    def __init__(self, found: Any) -> None:
        self._columns = [found.data.column(name) for name in ("ids", "loss_mask", "divisible")]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, number: Any) -> Any:
        ids, mask, divisible = (column[number] for column in self._columns)
        is_target = mask.values.to_numpy().view(np.bool_)
        return Document(ids.values.to_numpy(), is_target, divisible.as_py())
