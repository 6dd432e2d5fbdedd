"""Data sets of the hub, and tables in files, as JSONL files: read by the library `datasets`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import constants

from ligermodels.errors import DataError, first_line


def jsonl_of(name: str, config: str | None, split: str) -> Path:
    """Return a JSONL file with the rows of a data set of the hub, written once.

    It lies in HF_HOME. Another revision of the data set makes another file.

    Args: name, its id; config, one of its configurations; split, such as "train" or "train[:1%]".
    Raises:
        DataError: the data set cannot be loaded.
    """
    try:
        found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # The library raises errors of many packages.
        raise DataError(f"{name}: the data set cannot be loaded: {first_line(error)}") from error
    return _written(found, name.replace("/", "--"))


def jsonl_of_table(file: Path) -> Path:
    """Return a JSONL file with the rows of a .parquet or .csv file.

    Raises:
        DataError: the file cannot be read.
    """
    kind = file.suffix.lower().lstrip(".")
    try:
        found = datasets.load_dataset(kind, data_files=str(file), split="train")
    except Exception as error:
        raise DataError(f"{file}: the file cannot be read: {first_line(error)}") from error
    return _written(found, file.stem)


def _written(found: Any, name: str) -> Path:
    folder = Path(constants.HF_HOME) / "ligermodels" / "data"
    path = folder / f"{name}-{found._fingerprint}.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        found.to_json(aside, lines=True, force_ascii=False)
        os.replace(aside, path)
    return path
