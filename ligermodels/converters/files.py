"""Reading and writing files with care: opening them, JSON objects, flushing to the disk.

Files that come from a hub may be anything. `json.loads` alone keeps the last of two equal keys
without a word, and raises several kinds of errors.
"""

import contextlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from ligermodels.errors import LigerError, shown

_MAX_JSON = 100_000_000  # safetensors allows a header of this size, and an index is no larger
_MAX_DEPTH = 100  # Code that copies or compares what was read recurses, too.
# O_NONBLOCK: do not wait for the writer of a pipe. O_BINARY: do not change bytes on the way in.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path, error: type[LigerError]) -> FileIO:
    """Open a file to read its bytes; refuse a pipe or a device, where reading could hang.

    Raises:
        error: the path cannot be opened, or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None
    except ValueError as fault:  # a null byte
        raise error(f"{shown(str(path))}: cannot be read: {fault}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path}: is no regular file")
    return FileIO(descriptor, "rb")


def read_json(path: Path, error: type[LigerError]) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        error: the file cannot be read, or `parse_json` refuses it.
    """
    with open_regular(path, error) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_JSON:
                raise error(f"{path}: has {size} bytes, expected at most {_MAX_JSON}")
            text = file.read(size) or b""
        except OSError as fault:
            raise error(f"{path}: cannot be read: {fault.strerror}") from None
    parsed = parse_json(text, str(path), error)
    if _is_deeper(parsed, _MAX_DEPTH):
        raise error(f"{path}: is nested too deep: more than {_MAX_DEPTH} levels")
    return parsed


def parse_json(text: bytes, where: str, error: type[LigerError]) -> dict[str, Any]:
    """A JSON object without duplicate keys.

    Args: where names the source of `text` in messages.
    Raises:
        error: `text` is something else; the message says what, and in which line.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: key {shown(twice)} appears twice")
        return found

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError:
        raise error(f"{where}: is not UTF-8 text") from None
    except json.JSONDecodeError as fault:
        raise error(
            f"{where}: is not JSON: {fault.msg} in line {fault.lineno}, column {fault.colno}"
        ) from None
    except LigerError:
        raise
    except ValueError:  # json has no other reason left to raise it
        raise error(f"{where}: holds a number of too many digits to be read") from None
    except RecursionError:
        raise error(f"{where}: is nested too deep to be read") from None
    if not isinstance(parsed, dict):
        raise error(f"{where}: holds a {type(parsed).__name__}, expected an object")
    return parsed


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does, and have it on the disk.

    Raises:
        OSError: whatever the file system says.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which had come in as an escape
        encoded = (json.dumps(value, indent=2) + "\n").encode()
    path.write_bytes(encoded)
    sync_file(path)


def sync_file(path: Path) -> None:
    """Have a file's bytes on the disk before anything is renamed to it.

    Does nothing outside POSIX, where a file opened for reading cannot be flushed.
    """
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Have a folder's entries on the disk; some file systems cannot do this, and need not."""
    with contextlib.suppress(OSError):
        sync_file(path)


def is_int(value: Any) -> bool:
    """Whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: Any) -> bool:
    """Whether a JSON value is an integer of 32 bits, which every tokenizer's ids are."""
    return is_int(value) and abs(value) < 2**31


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number that torch takes: integers have at most 64 bits."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_int(value) and abs(value) < 2**63


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects in `value` are nested more than `levels` deep."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
