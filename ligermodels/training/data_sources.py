"""Where training data comes from: files, data sets of the hub, and tables."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ligermodels.errors import DataError
from ligermodels.training.data import check_files

# OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT; a split may be train[:1000].
_DATASET = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))??(?::([\w.-]+(?:\[[^\]]*\])?))?")
_TABLES = (".parquet", ".csv")


def is_dataset(name: str) -> bool:
    """Return whether a name is that of a data set of the hub: there is no such file."""
    return not os.path.lexists(name) and _dataset(name) is not None


def _dataset(name: str) -> tuple[str, str | None, str] | None:
    match = _DATASET.fullmatch(name)
    if match is None or Path(match[1]).suffix:  # that of a mistyped file
        return None
    return match[1], match[2], match[3] or "train"


def local_files(names: Sequence[str], *, progress: bool = True) -> list[Path]:
    """Return the files with the data: those of these names, or copies of data sets and tables.

    Args: progress: whether `datasets` may show bars.
    Raises:
        DataError: a file is missing or not supported, a data set cannot be loaded, or the library
            `datasets` is needed and not installed.
    """
    found: list[str | Path] = []
    for name in names:
        if is_dataset(name):
            dataset = _dataset(name)
            assert dataset is not None
            found.append(_library(name).jsonl_of(*dataset, progress=progress))
        elif Path(name).suffix.lower() in _TABLES and os.path.isfile(name):
            found.append(_library(name).jsonl_of_table(Path(name), progress=progress))
        else:
            found.append(name)
    return check_files(found)


def _library(name: str) -> Any:
    try:
        from ligermodels.integrations import hub_data
    except ImportError as error:
        raise DataError(
            f"{name}: this needs the library datasets, but {error.name} is not installed: "
            "pip install datasets; or give text or .jsonl files"
        ) from None
    return hub_data
