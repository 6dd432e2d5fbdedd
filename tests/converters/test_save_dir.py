"""A folder is replaced whole or not at all, one save at a time; what is not the save's stays.

test_export_kills.py kills a save at its system calls.
"""

import errno
import os
import signal
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from ligermodels.converters import save_dir
from ligermodels.converters.save_dir import read_one_version, recover_dir, replace_dir, sync_file
from ligermodels.errors import CheckpointError
from tests import sandbox

from .conftest import contents, write_files

OLD = {"config.json": b"old", "weights": b"old", "notes": b"mine", "runs/deep/log": b"mine, too"}
NEW = OLD | {"config.json": b"new", "weights": b"new"}


def owned(name):
    return name in ("config.json", "weights")


def replace(target, text="new"):
    with replace_dir(target, owned) as fresh:
        for name in ("config.json", "weights"):
            (fresh / name).write_text(text)
            sync_file(fresh / name)


@pytest.fixture
def target(tmp_path):
    return write_files(tmp_path / "out", OLD)


@pytest.fixture
def no_links(monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_, **__: os.close(10**6))


def in_a_fork(test):
    """Run a function in a fork of this process; skip if it returns False."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 3 if test() is False else 0
        except BaseException:
            traceback.print_exc()
        finally:
            os.seteuid(os.getuid())  # else coverage may not write its data
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 3:
        pytest.skip("the machine does not allow this")
    assert code == 0


def test_what_is_not_the_saves_own_stays(target, tmp_path, way):
    (target / "link").symlink_to("nowhere")
    os.mkfifo(target / "pipe")
    target.chmod(0o750)
    inode = (target / "notes").stat().st_ino
    replace(target)
    assert contents(target) == NEW | {"link": "nowhere"} and (target / "pipe").is_fifo()
    assert os.listdir(tmp_path) == ["out"]
    assert target.stat().st_mode & 0o777 == 0o750
    assert (target / "notes").stat().st_ino == inode
    replace(tmp_path / "another")
    assert set(contents(tmp_path / "another")) == {"config.json", "weights"}


def let_calls_fail(patch, at, lasts):
    """Let the call number `at` of the system fail, and all later ones if it lasts; count calls."""
    numbers, last = count(1), []

    def failing(original):
        def call(*args, **options):
            last[:] = [next(numbers)]
            if last[0] == at or (lasts and last[0] > at):
                raise OSError(errno.EIO, "Input/output error")
            return original(*args, **options)

        return call

    for name in "listdir rename stat lstat link open fsync unlink rmdir chmod".split():
        patch.setattr(os, name, failing(getattr(os, name)))
    return last


@pytest.mark.filterwarnings("ignore:what is not of")
@pytest.mark.parametrize("lasts", [False, True])
def test_an_error_means_that_the_folder_has_not_changed(tmp_path, monkeypatch, way, lasts):
    for at in count(1):
        target, failed = write_files(tmp_path / str(at) / "out", OLD), False
        with monkeypatch.context() as patch:
            last = let_calls_fail(patch, at, lasts)
            try:
                replace(target)
            except OSError:
                failed = True
        if last[0] < at:
            return
        assert recover_dir(target)  # as each load does
        found = contents(target)
        assert found == OLD if failed else found["weights"] == b"new" and found["notes"] == b"mine"


def test_leftovers_go_unless_a_living_process_holds_them(target, tmp_path):
    """A thread, and a process that is killed later, are each in the middle of a save."""
    here, lock = save_dir._new_folder(target)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, os.fsencode(save_dir._new_folder(target)[0]))
        signal.pause()
    there = Path(os.fsdecode(os.read(reading, 1000)))
    foreign = [tmp_path / ".out.saving-mine", tmp_path / f".outer.saving-{'0' * 16}"]
    for folder in foreign:
        folder.mkdir()
    replace(target)
    assert here.is_dir() and there.is_dir()
    lock.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    replace(target)
    assert not here.exists() and not there.exists() and all(map(Path.is_dir, foreign))


@pytest.mark.parametrize("where", ["", "runs/deep/data", "file"])
@pytest.mark.parametrize("late", [False, True])
def test_a_mount_in_the_folder_is_refused_and_not_emptied(target, tmp_path, where, late):
    def test():
        volume, place = tmp_path / "volume", target / where
        for path in (volume, place):
            path.touch() if where == "file" else path.mkdir(parents=True, exist_ok=True)
        mine = place if where == "file" else place / "mine"

        def mount():
            return sandbox.mount_folder(volume, place) and mine.write_text("mine")

        if not sandbox.own_mounts() or (not late and not mount()):
            return False
        match = f"has a volume mounted at {place};" if where else "is a mount point"
        with pytest.raises(OSError, match=match):
            with replace_dir(target, owned) as fresh:
                (fresh / "weights").write_text("new")
                if not mount():
                    return False
        assert mine.read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["out", "volume"]

    in_a_fork(test)


def test_threads_that_replace_one_folder_each_succeed(target, tmp_path, way):
    def work(number):
        for _ in range(10):
            replace(target, f"of {number}")
            assert recover_dir(target)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert contents(target).keys() == OLD.keys() and os.listdir(tmp_path) == ["out"]
    assert (target / "config.json").read_text() == (target / "weights").read_text()


def test_files_are_copied_where_links_are_not_possible(target, tmp_path, no_links):
    replace(target)
    assert contents(target) == NEW
    os.mkfifo(target / "pipe")
    with pytest.raises(OSError, match="Bad file descriptor"):
        replace(target)  # a copy would read from the pipe
    assert (target / "pipe").is_fifo() and os.listdir(tmp_path) == ["out"]


def test_a_save_waits_for_another_and_then_fails(target, tmp_path, monkeypatch):
    monkeypatch.setattr(save_dir, "_PATIENCE", 0.05)
    with save_dir._Lock(tmp_path):
        with pytest.raises(TimeoutError, match=r"another save in .* has not ended"):
            replace(target)
    assert contents(target) == OLD and os.listdir(tmp_path) == ["out"]


def test_without_locks_a_save_works_and_removes_nothing_of_others(
    target, tmp_path, way, monkeypatch
):
    monkeypatch.setattr(save_dir.fcntl, "flock", lambda *_: os.close(10**6))  # as on NFS
    left, _ = save_dir._new_folder(target)
    replace(target)
    assert contents(target) == NEW and sorted(os.listdir(tmp_path)) == [left.name, "out"]


def test_one_version_is_read(target, tmp_path):
    reads = []

    def read(folder):
        reads.append((folder / "config.json").read_text())
        if len(reads) == 1:
            replace(target)
        elif len(reads) == 2:
            (target / "other").write_text("a file has come")
            raise CheckpointError("what it said of the other version")
        return reads[-1], (folder / "weights").read_text()

    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to("out")
    assert read_one_version(link, read) == ("new", "new")
    assert reads == ["old", "new", "new"]
    write_files(other, OLD)

    def flip(folder):
        """A link that leads elsewhere meanwhile changes nothing."""
        first = (folder / "config.json").read_text()
        link.unlink()
        link.symlink_to("other")
        return first, (folder / "weights").read_text()

    assert read_one_version(link, flip) == ("new", "new")


def test_an_error_of_an_unchanged_folder_is_raised_and_endless_changes_are_refused(tmp_path):
    fails = Mock(side_effect=CheckpointError("damaged"))
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="damaged"):
            read_one_version(folder, fails)
    assert fails.call_count == 2
    with pytest.raises(CheckpointError, match="the folder was replaced each of the 100 times"):
        read_one_version(tmp_path, lambda folder: (folder / f"{time.monotonic_ns()}").touch())
