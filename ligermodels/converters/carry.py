"""Add the files of an old folder to the one that takes its place, while others still change it."""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from ligermodels.converters.files import sync_file, sync_folder
from ligermodels.converters.folders import (
    ATTEMPTS,
    LockedFolder,
    is_abandoned,
    is_writable,
    remove_folder,
)

_NEW_FOLDER = re.compile(r"\..+\.saving-[0-9a-f]{16}", re.DOTALL)


class Carry:
    """Add the files of an old folder to a new one.

    Args: wanted says of a name at the top level whether to add it.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._seen: dict[str, tuple[int, ...]] = {}  # What was at a path when it was added.
        self._taken: set[str] = set()  # What `finish` has removed from the old folder.

    def over(self, old: Path, new: Path) -> bool:
        """Add the files. In a later call, do what others did to the old folder since the last.

        Returns: whether the new folder was changed.

        Raises:
            OSError: a file or folder cannot be added, or another save is at work in a folder.
        """
        before = self._seen
        self._seen = {key: before[key] for key in self._taken}
        changed: list[Path] = []
        self._add(old, new, "", before, changed)
        gone = before.keys() - self._seen.keys()
        for key in sorted(gone, reverse=True):  # Folders come last.
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(new / key).st_mode):
                    (new / key).rmdir()
                elif _is_withdrawn(new / key, before[key], new):
                    (new / key).unlink()
        for folder in changed:
            sync_folder(folder)
        return bool(changed or gone)

    def finish(self, old: Path, new: Path) -> None:
        """Remove the old folder, unless it cannot be emptied.

        A call of others that found this folder before the swap may change it until it is gone, at
        which moment it must be empty. Until then, what they do is seen; after that, their call
        fails.
        """
        with contextlib.suppress(OSError):
            for _ in range(ATTEMPTS):
                if self._empty(old, "") or not self.over(old, new):
                    return

    def _empty(self, old: Path, where: str) -> bool:
        """Remove what is in the new folder, too, or is not wanted; return whether that was all."""
        for name in os.listdir(old):
            path, key = old / name, f"{where}{name}"
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                is_folder = stat.S_ISDIR(found.st_mode)
                if is_folder and not self._is_kept(path, where):
                    remove_folder(path)
                elif is_folder:
                    same = self._seen.get(key) == (found.st_dev, found.st_ino)
                    if same and self._empty(path, f"{key}/"):
                        self._taken.add(key)
                elif not self._is_kept(path, where):
                    path.unlink()
                elif self._seen.get(key) == _look(path):
                    path.unlink()
                    self._taken.add(key)
        try:
            old.rmdir()
        except OSError:
            return False
        return True

    def _is_kept(self, path: Path, where: str) -> bool:
        if not where and not self._wanted(path.name):
            return False
        return not (_NEW_FOLDER.fullmatch(path.name) and is_abandoned(path))

    def _add(
        self,
        old: Path,
        new: Path,
        where: str,
        before: Mapping[str, tuple[int, ...]],
        changed: list[Path],
    ) -> None:
        added = False
        for name in sorted(os.listdir(old)):
            path, copy, key = old / name, new / name, f"{where}{name}"
            with contextlib.suppress(FileNotFoundError):  # Its owner may just have removed it.
                if not self._is_kept(path, where):
                    continue
                status = os.lstat(path)
                now: tuple[int, ...] = (status.st_dev, status.st_ino)
                if stat.S_ISDIR(status.st_mode):
                    self._seen[key] = now
                    added |= self._enter(path, copy, now, before.get(key))
                    self._add(path, copy, f"{key}/", before, changed)
                    shutil.copystat(path, copy)
                    continue
                now += (status.st_size, status.st_mtime_ns)
                if _is_due(copy, before.get(key), now):
                    with contextlib.suppress(FileNotFoundError):
                        copy.unlink()
                    _link(path, copy)
                    added = True
                self._seen[key] = now
        if added:
            changed.append(new)

    def _enter(
        self, path: Path, copy: Path, now: tuple[int, ...], then: tuple[int, ...] | None
    ) -> bool:
        """Make the new folder `copy` for the old folder `path`, if the first call did not."""
        with contextlib.suppress(BlockingIOError), LockedFolder(path):
            if then not in (None, now):
                raise OSError(errno.EBUSY, f"{path} was replaced meanwhile; try again")
            _refuse_others(path)
            if then is None:
                copy.mkdir()
            return then is None
        raise OSError(errno.EBUSY, f"another save is at work in {path}; try again later")


def _refuse_others(path: Path) -> None:
    """Raise if a copy of what is at the path would take it from another user."""
    if not is_writable(path) and os.stat(path).st_uid != os.geteuid():
        raise PermissionError(
            errno.EACCES, f"{path} belongs to another user, who would lose access to it"
        )


def _look(path: Path) -> tuple[int, ...] | None:
    """Return the device, the inode number, the size and the time of a file, or None."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_due(copy: Path, then: tuple[int, ...] | None, now: tuple[int, ...]) -> bool:
    """Return whether a file of the old folder must be added to the new one, or added again.

    Args: then is what the old folder held when the file was added, and now is what it holds.
    """
    found = _look(copy)
    if found is None:
        # A file that was added, and is gone from the new folder, has been moved or removed there.
        return then is None or then[:2] != now[:2]
    if then is None or then == now or found[:2] == now[:2]:
        return False  # Others wrote it into the new folder, or it is the same file already.
    # The file was replaced in the old folder, or it had to be copied and was changed there. If
    # others have changed what was added as well, the last of the two stays.
    return found[2:] == then[2:] or (found[:2] == then[:2] and found[3] <= now[3])


def _is_withdrawn(copy: Path, then: tuple[int, ...], new: Path) -> bool:
    """Return whether to remove a file that was added and is gone from the old folder.

    If it was changed since it was added, others may have done this in the new folder. It is then
    removed only if it was renamed, so that the new folder has it under another name.
    """
    found = _look(copy)
    if found is None or found[2:] == then[2:]:
        return found is not None
    others = (Path(where, name) for where, _, names in os.walk(new) for name in names)
    return found[:2] == then[:2] and any(
        (_look(other) or ())[:2] == then[:2] for other in others if other != copy
    )


def _link(source: Path, copy: Path) -> None:
    """Make a hard link to a file, or copy the file if the file system has no hard links."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except FileExistsError:
        return  # Another process has just written it into the new folder.
    except OSError:
        mode = os.lstat(source).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise  # A copy would read from the pipe or the device.
        if stat.S_ISREG(mode):
            _refuse_others(source)
        shutil.copy2(source, copy, follow_symlinks=False)
        if stat.S_ISREG(mode):
            sync_file(copy)
