"""Write a file of a run in one step, say which file could not be written, and hash files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ligermodels.converters.files import open_regular, sync_file, sync_folder
from ligermodels.errors import DataError, LigerError, SaveError

PART = ".part"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into a SaveError that names the file."""
    try:
        yield
    except SaveError:
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SaveError(f"{path}: cannot be written: {reason}") from error


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new file beside `path`, then replace `path` by it in one step.

    Raises:
        SaveError: the file cannot be written; `path` is unchanged.
    """
    aside = path.with_name(path.name + PART)
    try:
        with writing(path):
            # A kill may have left a part, and a link of this name would lead to another file.
            aside.unlink(missing_ok=True)
            write(aside)
            # safetensors ignores the umask: it creates files that only their owner can read.
            umask = os.umask(0o077)
            os.umask(umask)
            os.chmod(aside, 0o666 & ~umask)
            sync_file(aside)
            os.replace(aside, path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def file_hash(path: str | Path, kind: type[LigerError] = DataError) -> str:
    """Return the SHA-256 of a file.

    Raises:
        kind: the file cannot be read.
    """
    with open_regular(Path(path), kind) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise kind(f"{path}: the file cannot be read: {error.strerror}") from None


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
