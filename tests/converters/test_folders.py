"""Locks on folders, and systems without them."""

import os

import pytest

from ligermodels.converters import atomic_dir as atomic
from ligermodels.converters import folders
from ligermodels.converters.atomic_dir import recover_dir
from tests.converters.replaced import NEW, OLD, content, fill, replace


def test_a_lock_that_is_never_released_is_an_error(tmp_path, monkeypatch):
    target = tmp_path / "out"
    fill(target, OLD)
    monkeypatch.setattr(folders, "_PATIENCE", 0.05)
    with folders.LockedFolder(target):
        with pytest.raises(TimeoutError, match=r"another save to .*out has not ended"):
            replace(target)
    assert content(target) == OLD and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("lack", ["module", "error"])
def test_without_locks_a_save_works_and_removes_nothing_of_others(tmp_path, way, monkeypatch, lack):
    if lack == "module":
        monkeypatch.setattr(folders, "fcntl", None)
    else:
        monkeypatch.setattr(folders.fcntl, "flock", lambda *_: os.close(10**6))  # EBADF, as on NFS
    target = tmp_path / "out"
    fill(target, OLD)
    left, _ = atomic._new_folder(target)
    replace(target)
    assert content(target) == NEW and sorted(os.listdir(tmp_path)) == [left.name, "out"]
    monkeypatch.setattr(atomic, "_RENAMES", 0.01)
    os.rename(target, tmp_path / f".out.replaced-{'0' * 16}")
    assert recover_dir(target) and content(target) == NEW


def test_a_folder_is_locked_once_and_known_after_a_rename(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    with folders.LockedFolder(folder) as lock:
        assert lock.locked and lock.is_at(folder) and not folders.is_abandoned(folder)
        with pytest.raises(BlockingIOError):
            folders.LockedFolder(folder)
        (tmp_path / "b").mkdir()
        lock.rename(folder, tmp_path / "b")  # something is there
        assert lock.is_at(folder)
        lock.rename(folder, tmp_path / "c")
        assert lock.is_at(tmp_path / "c") and not lock.is_at(folder)
    assert folders.is_abandoned(tmp_path / "c")
    with folders.wait_for(tmp_path / "c") as there, folders.wait_for(folder) as gone:
        assert there and not gone


def test_mount_points_where_the_system_has_no_table(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(folders.Path, "read_bytes", lambda _: os.close(10**6))
    monkeypatch.setattr(os.path, "ismount", lambda path: path.endswith("b"))
    assert folders.mounts_in(tmp_path) == [tmp_path / "a" / "b"]
