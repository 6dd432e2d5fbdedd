"""Download files of a hub repository into huggingface_hub's cache, and check what the hub sent.

In the cache, a file is a link to a blob whose name is the ETag that the hub gave for it: the
SHA-256 of a large file, or the git id (a SHA-1) of a small file. The hub's API gives the same
numbers and the size. A file must agree with all of them.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ligermodels.converters.checkpoint_files import COPIED_FILES
from ligermodels.converters.files import in_threads
from ligermodels.errors import CheckpointError, short_repr

COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RECORDS = ".ligermodels"  # the folder in a repository's part of the cache for our own records


class Snapshot:
    """The files of one commit of a repository in the cache.

    Args: said maps the names of the repository's files to what the hub's API says of each; cache is
        the folder of huggingface_hub's cache; token is to log in with.
    Attributes: folder holds the files.
    """

    def __init__(
        self,
        repo: str,
        commit: str,
        said: Mapping[str, Any],
        cache: Path,
        token: str | bool | None = None,
    ) -> None:
        from huggingface_hub.file_download import repo_folder_name

        self.repo, self.commit, self.said = repo, commit, said
        self._from: dict[str, Any] = {"revision": commit, "cache_dir": cache, "token": token}
        name = repo_folder_name(repo_id=repo, repo_type="model")
        self.storage = cache / name
        self.folder = self.storage / "snapshots" / commit

    def download(self, names: Collection[str]) -> None:
        """Download the files that the cache lacks or holds damaged, and check them all.

        All bytes of a weight file are checked only if it is new or damaged, because this takes as
        long as a load.

        Raises:
            CheckpointError: a file contradicts what the hub says of it.
            Exception: an error of huggingface_hub.
        """
        import huggingface_hub

        new = {name for name in names if not (self.folder / name).exists()}
        # If this process is killed, the record tells the next one which files are unchecked.
        record = self._record(new) if new else None
        huggingface_hub.snapshot_download(
            self.repo, allow_patterns=[glob.escape(name) for name in names], **self._from
        )
        for name in names:
            path = self.folder / name
            if not path.exists() or (name not in new and is_damaged(path, self.said[name])):
                huggingface_hub.hf_hub_download(
                    self.repo, name, force_download=path.exists(), **self._from
                )
                new.add(name)
        records = self._records()
        unchecked = new.union(*records.values())

        def fault(name: str) -> str | None:
            whole = name in unchecked or not _is_weights(name)
            return contradiction(self.folder / name, self.said[name], whole)

        faults = {name: why for name, why in zip(names, in_threads(fault, names, 4)) if why}
        for name in faults.keys() & unchecked:
            _discard(self.folder / name)
        if faults:
            name, why = next(iter(faults.items()))
            raise CheckpointError(
                f"{self.repo}/{name}: the file is not what the hub says it is: {why}; try again, "
                "and check HF_ENDPOINT and the proxy if that does not help"
            )
        for path, listed in records.items():
            if path == record or listed <= set(names):
                path.unlink(missing_ok=True)

    def remember(self, revision: str) -> None:
        """Record the commit of a branch, and which files the repository lacks, for runs offline."""
        with contextlib.suppress(OSError):  # A read-only cache still works.
            if revision != self.commit and not self.commit.startswith(revision):
                _write(self.storage / "refs" / revision, self.commit)
            # huggingface_hub records absent files like this.
            for name in COPIED_FILES:
                absent = self.storage / ".no_exist" / self.commit / name
                if name not in self.said and not absent.exists():
                    _write(absent, "")

    def _record(self, names: Collection[str]) -> Path | None:
        record = self.storage / _RECORDS / f"{self.commit}.{uuid.uuid4().hex}.json"
        with contextlib.suppress(OSError):  # The download will give the reason.
            _write(record, json.dumps(sorted(names)))
            return record
        return None

    def _records(self) -> dict[Path, set[str]]:
        """Return the records of this process and of those that run or were killed."""
        found = {}
        for path in (self.storage / _RECORDS).glob(f"{self.commit}.*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[path] = set(json.loads(path.read_text()))
        return found


def contradiction(path: Path, said: Any, whole: bool) -> str | None:
    """Return how a file contradicts what the hub says of it, or None.

    Args: said is the file's entry of the hub's API; whole tells whether to read all bytes.
    """
    if not path.exists():
        return "it is in the list of the repository's files, but was not sent"
    size = path.stat().st_size
    for claimed in (said.size, said.lfs and said.lfs.size):
        if claimed not in (None, size):
            return f"it has {size} bytes, and the hub says {short_repr(claimed)}"
    if not whole:
        return None
    name = _blob_name(path)
    sha256 = {said.lfs and said.lfs.sha256, name if _SHA256.fullmatch(name) else None} - {None}
    if sha256 and sha256 != {found := _digest(path, "sha256")}:
        claims = " and ".join(map(short_repr, sorted(map(str, sha256))))
        return f"its SHA-256 is {found}, and the hub says {claims}"
    git_id = said.blob_id
    if not said.lfs and isinstance(git_id, str) and COMMIT.fullmatch(git_id):
        if git_id != (found := _git_id(path)):
            return f"its git id is {found}, and the hub says {git_id}"
    return None


def is_damaged(path: Path, said: Any = None) -> bool:
    """Return whether a cached file is not what was downloaded, as far as that can be told.

    Args: said is the file's entry of the hub's API, if there is a connection.
    """
    if not _is_weights(path.name):
        agrees = _agrees_with_name(path)
        return agrees is False or (
            agrees is None and said is not None and contradiction(path, said, True) is not None
        )
    if _has_sound_header(path) and (said is None or contradiction(path, said, False) is None):
        return False
    return not _agrees_with_name(path)


def _has_sound_header(path: Path) -> bool:
    from ligermodels.converters.safetensors_file import SafetensorsFile

    try:
        SafetensorsFile(path)
    except CheckpointError:
        return False
    return True


def _agrees_with_name(path: Path) -> bool | None:
    """Return whether a file has the checksum that is its blob's name; None if that is no checksum.

    A mirror may use the plain SHA-1 instead of the git id.
    """
    name = _blob_name(path)
    if _SHA256.fullmatch(name):
        return name == _digest(path, "sha256")
    if COMMIT.fullmatch(name):
        return name in (_git_id(path), _digest(path, "sha1"))
    return None


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _blob_name(path: Path) -> str:
    """Return the name of a cached file's blob. On a system without links it is the file's name."""
    return os.path.basename(os.readlink(path)) if path.is_symlink() else path.name


def _git_id(path: Path) -> str:
    return _digest(path, "sha1", b"blob %d\0" % path.stat().st_size)


def _digest(path: Path, algorithm: str, start: bytes = b"") -> str:
    digest = hashlib.new(algorithm, start, usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _discard(path: Path) -> None:
    """Remove a file from the snapshot, and its blob unless that has the checksum in its name."""
    if not path.is_symlink():
        path.unlink(missing_ok=True)
        return
    blob = path.parent / os.readlink(path)
    if not _agrees_with_name(path):
        blob.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    """Write a small file in one step, so that another process never reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    fresh.write_text(text)
    os.replace(fresh, path)
