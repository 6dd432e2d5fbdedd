"""Open files safely, read and write JSON objects, and flush files to the disk.

A file from a hub may hold anything. If a key appears twice, `json.loads` silently keeps the last
value. It also raises several kinds of errors. The functions here refuse such files with one kind.
"""

import contextlib
import io
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from ligermodels.errors import LigerError, printable, short_repr

_MAX_JSON = 100_000_000  # safetensors allows headers of this size, and an index is not larger
_MAX_DEPTH = 100  # Code that copies or compares the parsed value also recurses.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, error: type[LigerError]) -> FileIO:
    """Open a file to read its bytes. Refuse a pipe or a device, because reading it could hang.

    Raises:
        error: there is no such path, it cannot be opened, or it is not a regular file.
    """
    file = open_if_present(path, error)
    if file is None:
        raise error(f"{path}: the file is missing")
    return file


def open_if_present(path: Path, error: type[LigerError]) -> FileIO | None:
    """Open a file as `open_regular` does; return None if nothing has this name.

    Something that has the name but cannot be read is never taken for an absent file.

    Raises:
        error: the path is a link that leads nowhere, a folder, a pipe, a socket or a device, or
            it cannot be opened.
    """
    try:
        mode = os.stat(path).st_mode
        # Opening a device may do something to it.
        descriptor = None
        if stat.S_ISREG(mode):  # O_NONBLOCK does not wait for the writer of a pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as fault:
        _raise_unless_absent(path, "file", fault, error)
        return None
    if descriptor is not None:
        mode = os.fstat(descriptor).st_mode  # Another file may have taken its place.
        if stat.S_ISREG(mode):
            return FileIO(descriptor, "rb")
        os.close(descriptor)
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise error(f"{path}: this is not a regular file but {kind}")


class OpenFile:
    """An open file that several threads may read. It is closed when nothing refers to it.

    Raises:
        error: as `open_regular`.
    """

    def __init__(self, path: Path, error: type[LigerError]) -> None:
        self.file = open_regular(path, error)

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """Read bytes from an offset on into a buffer, and return how many there were."""
        return os.preadv(self.file.fileno(), [buffer], offset)

    def identity(self) -> tuple[int, ...]:
        """Return numbers that change if the file is changed."""
        status = os.fstat(self.file.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


def read_if_present(path: Path, error: type[LigerError], limit: int = _MAX_JSON) -> bytes | None:
    """Return the bytes of a file, or None if nothing has this name.

    Args: limit is the largest size in bytes.
    Raises:
        error: something is there, but it cannot be read, or it is larger than `limit`.
    """
    file = open_if_present(path, error)
    if file is None:
        return None
    try:
        with file, io.BufferedReader(file) as reader:
            size = os.fstat(file.fileno()).st_size
            # Some files, such as those in /proc, declare no size. So this reads on.
            text = b"" if size > limit else reader.read(limit + 1)
    except OSError as fault:
        raise error(f"{path}: the file cannot be read: {fault.strerror}") from None
    if (size := max(size, len(text))) > limit:
        raise error(f"{path}: the file has {size} bytes, expected at most {limit}")
    return text


def names_if_present(folder: Path, error: type[LigerError]) -> list[str] | None:
    """Return the sorted names in a folder, or None if nothing has the folder's name.

    Raises:
        error: something is there, but it is not a folder, or it cannot be listed.
    """
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError) as fault:
        _raise_unless_absent(folder, "folder", fault, error)
        return None


def _raise_unless_absent(
    path: Path, what: str, fault: OSError | ValueError, error: type[LigerError]
) -> None:
    """Raise `error` for a path that cannot be opened, unless nothing has this name."""
    if isinstance(fault, ValueError):  # a null byte, or characters that no path can have
        raise error(f"{short_repr(str(path))}: the {what} cannot be read: {fault}") from None
    why = fault.strerror
    if isinstance(fault, FileNotFoundError):
        if not os.path.lexists(path):
            return
        if os.path.islink(path):  # Otherwise it appeared just now.
            why = (
                f"it is a link to {printable(os.readlink(path))}, which does not exist; restore "
                f"that {what}, or remove the link"
            )
    raise error(f"{path}: the {what} cannot be read: {why}") from None


def read_json(path: Path, error: type[LigerError]) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        error: the file is absent or cannot be read, or `parse_json` refuses its content.
    """
    found = read_json_if_present(path, error)
    if found is None:
        raise error(f"{path}: the file is missing")
    return found


def read_json_if_present(path: Path, error: type[LigerError]) -> dict[str, Any] | None:
    """Return the JSON object that a file holds, or None if nothing has this name.

    Raises:
        error: something is there, but it cannot be read, or `parse_json` refuses its content.
    """
    text = read_if_present(path, error)
    if text is None:
        return None
    parsed = parse_json(text, str(path), error)
    if _is_deeper(parsed, _MAX_DEPTH):
        raise error(f"{path}: the JSON is nested too deep: more than {_MAX_DEPTH} levels")
    return parsed


def unique_keys(
    where: str, error: type[LigerError]
) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an `object_pairs_hook` for json that raises `error` if a key appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: key {short_repr(twice)} appears twice")
        return found

    return unique


def parse_json(text: bytes, where: str, error: type[LigerError]) -> dict[str, Any]:
    """Parse a JSON object that has no duplicate keys.

    Args: where names the source of `text` in messages.
    Raises:
        error: `text` is not such an object. The message says why, for a syntax error with its line.
    """

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys(where, error))
    except UnicodeDecodeError:
        raise error(f"{where}: the content is not UTF-8 text") from None
    except json.JSONDecodeError as fault:
        raise error(
            f"{where}: the content is not JSON: {fault.msg} in line {fault.lineno}, "
            f"column {fault.colno}"
        ) from None
    except LigerError:
        raise
    except ValueError:  # This is the only reason left for which json raises a ValueError.
        raise error(f"{where}: the JSON has a number with too many digits") from None
    except RecursionError:
        raise error(f"{where}: the JSON is nested too deep") from None
    if not isinstance(parsed, dict):
        raise error(f"{where}: the JSON holds a {type(parsed).__name__}, expected an object")
    return parsed


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file in the format of transformers, and flush it to the disk.

    Raises:
        OSError: the file system reports an error.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # The file that was read had half a surrogate pair as an escape.
        encoded = (json.dumps(value, indent=2) + "\n").encode()
    path.write_bytes(encoded)
    sync_file(path)


def sync_file(path: Path) -> None:
    """Flush a file's bytes to the disk; callers do this before they rename the file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, if the file system can do this."""
    with contextlib.suppress(OSError):
        sync_file(path)


def is_int(value: Any) -> bool:
    """Return whether a JSON value is an integer; true and false are not integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: Any) -> bool:
    """Return whether a JSON value is an integer that fits in 32 bits, as all token ids do."""
    return is_int(value) and abs(value) < 2**31


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number for torch: an integer must fit in 64 bits."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_int(value) and abs(value) < 2**63


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects in `value` are nested more than `levels` deep."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
