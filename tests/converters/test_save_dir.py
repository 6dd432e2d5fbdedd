"""A folder is replaced whole or not at all, one save at a time; what is not the save's stays."""

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from ligermodels.converters import save_dir
from ligermodels.converters.save_dir import (
    FolderLock,
    read_one_version,
    recover_dir,
    replace_dir,
    wait_for,
)
from ligermodels.errors import CheckpointError
from tests import sandbox
from tests.converters.replaced import NEW, OLD, content, content_of, fill, in_a_fork, owned, replace
from tests.system_calls import leave


def users_folder(target):
    """Make a subfolder with a file, which is not the save's own."""
    (target / "runs" / "deep").mkdir(parents=True)
    (target / "runs" / "deep" / "log").write_text("mine, too")


def check_replaced(target, beside=("out",)):
    assert content_of(target) == NEW
    if (target / "runs").exists():
        assert (target / "runs" / "deep" / "log").read_text() == "mine, too"
    assert sorted(os.listdir(target.parent)) == sorted(beside)


def test_replaces_and_leaves_nothing_beside(tmp_path, way):
    target = tmp_path / "out"
    replace(target)
    assert content(target) == {k: NEW[k] for k in ("config.json", "weights")}
    fill(target, OLD)
    users_folder(target)
    (target / "link").symlink_to("nowhere")
    os.mkfifo(target / "pipe")
    target.chmod(0o750)
    inode = (target / "notes").stat().st_ino
    replace(target)
    assert os.readlink(target / "link") == "nowhere" and (target / "pipe").is_fifo()
    assert target.stat().st_mode & 0o777 == 0o750
    assert (target / "notes").stat().st_ino == inode
    (target / "link").unlink()
    (target / "pipe").unlink()
    check_replaced(target)
    assert (target / "runs").exists()


def test_a_new_link_to_nowhere_keeps_its_name(tmp_path, way):
    """The old file of that name must not be written through the link."""
    target, nowhere = tmp_path / "out", tmp_path / "nowhere"
    fill(target, OLD)
    with replace_dir(target, owned) as fresh:
        (fresh / "notes").symlink_to(nowhere)
    assert os.readlink(target / "notes") == str(nowhere) and not nowhere.exists()


def replace_and_die(target, after):
    """Run `replace`, and kill the process before its n-th call on the disk; n is `after`."""
    count = 0

    def dies(function):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count > after:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for name in ("mkdir", "link", "rename", "open", "unlink", "rmdir", "fsync", "scandir", "chmod"):
        setattr(os, name, dies(getattr(os, name)))
    save_dir._exchange_names = dies(save_dir._exchange_names)
    replace(target)


def test_after_a_kill_the_folder_is_old_or_new_and_the_next_save_tidies_up(tmp_path, way):
    """For every n, a process is killed before its n-th call that reads or changes the disk."""
    seen = set()
    for after in range(100):
        place = tmp_path / str(after)
        place.mkdir()
        target = place / "out"
        fill(target, OLD)
        users_folder(target)
        child = os.fork()
        if child == 0:
            try:
                replace_and_die(target, after)
            except BaseException:
                leave(1)
            leave(0)
        status = os.waitpid(child, 0)[1]
        recover_dir(target)
        now = content_of(target)
        assert now in (OLD, NEW), f"after a kill at call {after} the folder holds {now}"
        seen.add(now["weights"])
        replace(target)
        check_replaced(target)
        assert (target / "runs").exists()
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    else:
        pytest.fail("the save was killed 100 times and never completed")
    assert after > 8 and seen == {"old weights", "new weights"}


@pytest.mark.parametrize("rename", range(1, 6))
@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_failing_rename_leaves_the_old_folder_or_the_new(
    tmp_path, way, monkeypatch, rename, fault
):
    """The renames are those of the new folder, of the two folders, and of a subfolder."""
    target = tmp_path / "out"
    fill(target, OLD)
    users_folder(target)
    original, count = os.rename, 0

    def fails(a, b):
        nonlocal count
        count += 1
        if count == rename:
            raise fault
        original(a, b)

    monkeypatch.setattr(os, "rename", fails)
    failed = False
    try:
        replace(target)
    except (OSError, KeyboardInterrupt):
        failed = True
    assert failed == (count >= rename)
    assert content_of(target) == (OLD if failed else NEW)
    assert (target / "runs" / "deep" / "log").read_text() == "mine, too"
    assert os.listdir(tmp_path) == ["out"]


def test_a_save_under_way_elsewhere_is_left_alone(tmp_path):
    """A thread, and a process that is killed later, are each in the middle of a save."""
    target = tmp_path / "out"
    fill(target, OLD)
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


def test_what_others_write_during_the_save_stays(tmp_path, way, before_the_swap):
    """It is written to the old folder after its files were linked."""
    target = tmp_path / "out"
    fill(target, OLD | {"log": "one"})

    def others():
        (target / "late").write_text("late")
        (target / "folder").mkdir()
        (target / "aside").write_text("replaced")
        os.rename(target / "aside", target / "notes")
        with (target / "log").open("a") as log:
            log.write(" two")

    before_the_swap(others)
    replace(target)
    assert (target / "late").read_text() == "late"
    assert (target / "notes").read_text() == "replaced"
    assert (target / "log").read_text() == "one two"
    left = [name for name in os.listdir(tmp_path) if name != "out"]
    assert (target / "folder").is_dir() or len(left) == 1
    replace(target)
    assert (target / "folder").is_dir() and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("where", ["", "data", "runs/deep/data", "file"])
@pytest.mark.parametrize("late", [False, True])
def test_a_mount_in_the_folder_is_refused_and_not_emptied(tmp_path, where, late):
    def test():
        if not sandbox.own_mounts():
            return False
        target, volume = tmp_path / "out", tmp_path / "volume"
        fill(target, OLD)
        place = target / where
        if where == "file":
            volume.touch()
            place.touch()
        else:
            volume.mkdir()
            place.mkdir(parents=True, exist_ok=True)
        mine = place if where == "file" else place / "mine"
        message = f"volume is mounted in the folder, at {place};" if where else "is a mount point"
        if not late and not sandbox.mount_folder(volume, place):
            return False
        with pytest.raises(OSError, match=message):
            with replace_dir(target, owned) as fresh:
                (fresh / "weights").write_text("new")
                if not sandbox.mount_folder(volume, place):
                    return False
                mine.write_text("mine")
        if not late:
            mine.write_text("mine")
        assert mine.read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["out", "volume"]

    in_a_fork(test)


def test_threads_that_replace_one_folder_each_succeed(tmp_path, way):
    target = tmp_path / "out"
    fill(target, OLD)
    users_folder(target)
    errors = []

    def work(number):
        try:
            for _ in range(10):
                with replace_dir(target, owned) as fresh:
                    for name in ("config.json", "weights"):
                        (fresh / name).write_text(f"of {number}")
                assert recover_dir(target)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and os.listdir(tmp_path) == ["out"]
    assert (target / "runs" / "deep" / "log").read_text() == "mine, too"
    assert (target / "config.json").read_text() == (target / "weights").read_text()
    assert sorted(os.listdir(target)) == ["config.json", "notes", "runs", "weights"]


def test_another_save_inside_the_folder_is_refused(tmp_path, way):
    target = tmp_path / "out"
    fill(target, OLD)
    users_folder(target)
    inner, lock = save_dir._new_folder(target / "runs" / "model")
    with pytest.raises(OSError, match=r"another save is at work in .*runs; try again later"):
        replace(target)
    assert content_of(target) == OLD and inner.is_dir()
    lock.close()
    replace(target)
    check_replaced(target)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two users")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_belongs_to_another_user_is_left_to_them(tmp_path, monkeypatch, kind):
    def test():
        target = tmp_path / "out"
        fill(target, OLD)
        for folder in (tmp_path, target):
            folder.chmod(0o777)
        if kind == "folder":
            users_folder(target)
            match = "runs cannot be moved: there is no permission to write to it"
        else:
            monkeypatch.setattr(os, "link", lambda *_, **__: os.close(10**6))  # no hard links
            match = "notes belongs to another user, who would lose access to it"
        for parent in [*tmp_path.parents][:3]:
            parent.chmod(0o755)
        os.seteuid(12345)
        with pytest.raises(OSError, match=match):
            replace(target)
        os.seteuid(0)
        assert content_of(target) == OLD and os.listdir(tmp_path) == ["out"]

    in_a_fork(test)


def test_files_are_copied_where_links_are_not_possible(tmp_path, monkeypatch, before_the_swap):
    monkeypatch.setattr(os, "link", lambda *_, **__: os.close(10**6))
    target = tmp_path / "out"
    fill(target, OLD | {"log": "one"})
    before_the_swap(lambda: (target / "log").write_text("one two"))
    replace(target)
    assert content(target) == NEW | {"log": "one two"}
    os.mkfifo(target / "pipe")
    with pytest.raises(OSError, match="Bad file descriptor"):
        replace(target)  # a copy would read from the pipe
    assert (target / "pipe").is_fifo() and os.listdir(tmp_path) == ["out"]


def test_a_save_waits_for_another_and_then_fails(tmp_path, monkeypatch):
    target = tmp_path / "out"
    fill(target, OLD)
    monkeypatch.setattr(save_dir, "_PATIENCE", 0.05)
    with FolderLock(target):
        with pytest.raises(TimeoutError, match=r"another save to .*out has not ended"):
            replace(target)
    assert content(target) == OLD and os.listdir(tmp_path) == ["out"]


def test_a_folder_is_locked_once_and_known_after_a_rename(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    with FolderLock(folder) as lock:
        assert lock.held and lock.is_at(folder)
        with pytest.raises(BlockingIOError):
            FolderLock(folder)
        os.rename(folder, tmp_path / "c")
        assert lock.is_at(tmp_path / "c") and not lock.is_at(folder)
    with wait_for(tmp_path / "c") as there, wait_for(folder) as gone:
        assert there and not gone


@pytest.mark.parametrize("lack", ["module", "error"])
def test_without_locks_a_save_works_and_removes_nothing_of_others(tmp_path, way, monkeypatch, lack):
    if lack == "module":
        monkeypatch.setattr(save_dir, "fcntl", None)
    else:
        monkeypatch.setattr(save_dir.fcntl, "flock", lambda *_: os.close(10**6))  # as on NFS
    target = tmp_path / "out"
    fill(target, OLD)
    left, _ = save_dir._new_folder(target)
    replace(target)
    assert content(target) == NEW and sorted(os.listdir(tmp_path)) == [left.name, "out"]
    monkeypatch.setattr(save_dir, "_RENAMES", 0.01)
    os.rename(target, tmp_path / f".out.replaced-{'0' * 16}")
    assert recover_dir(target) and content(target) == NEW


def test_a_killed_replacement_is_undone_by_a_load(tmp_path):
    target, aside = tmp_path / "out", tmp_path / f".out.replaced-{'a' * 16}"
    link = tmp_path / "link"
    link.symlink_to("out")
    for path in (target, link):
        fill(aside, OLD)
        lock, found = FolderLock(aside), []
        waiting = threading.Thread(target=lambda p=path, f=found: f.append(recover_dir(p)))
        waiting.start()
        time.sleep(0.02)
        assert found == [] and not target.exists()  # another process is between its two renames
        lock.close()
        waiting.join()
        assert found == [True] and content(target) == OLD and not aside.exists()
        shutil.rmtree(target)


def test_an_absent_folder_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / f".absent.replaced-{'0' * 16}").touch()
    for name in ("absent", "file", "absent/deep", "a\0b", "\ud800"):
        assert not recover_dir(tmp_path / name)


def test_one_version_is_read(tmp_path):
    target = tmp_path / "out"
    fill(target, OLD)
    reads = []

    def read(folder):
        reads.append((folder / "config.json").read_text())
        if len(reads) == 1:
            replace(target)
        elif len(reads) == 2:
            (target / "other").write_text("a file has come")
            raise CheckpointError("what it said of the other version")
        return reads[-1], (folder / "weights").read_text()

    assert read_one_version(target, read) == ("new config", "new weights")
    assert reads == ["old config", "new config", "new config"]


def test_a_link_that_changes_leads_to_one_version(tmp_path):
    link, others = tmp_path / "link", [tmp_path / "a", tmp_path / "b"]
    for other in others:
        fill(other, {"config.json": other.name, "weights": other.name})
    link.symlink_to("a")

    def read(folder):
        first = (folder / "config.json").read_text()
        link.unlink()
        link.symlink_to("b" if first == "a" else "a")
        return first, (folder / "weights").read_text()

    assert read_one_version(link, read) == ("a", "a")


def test_an_error_of_an_unchanged_folder_is_raised_and_endless_changes_are_refused(tmp_path):
    calls = []

    def fails(folder):
        calls.append(folder)
        raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        read_one_version(tmp_path, fails)
    with pytest.raises(CheckpointError, match="damaged"):
        read_one_version(tmp_path / "absent", fails)
    assert len(calls) == 2
    with pytest.raises(CheckpointError, match="the folder was replaced each of the 100 times"):
        read_one_version(tmp_path, lambda folder: (folder / f"{time.monotonic_ns()}").touch())


def test_a_target_that_comes_and_goes(tmp_path, monkeypatch):
    """Another process makes it just before it is made here, once or again and again."""
    target, renames = tmp_path / "out", []

    @contextlib.contextmanager
    def others(path):
        with wait_for(path) as exists:
            if path == tmp_path and len(renames) < times:
                renames.append(path)
                fill(target, OLD)
                yield exists
                shutil.rmtree(target)
            else:
                yield exists

    monkeypatch.setattr(save_dir, "wait_for", others)
    monkeypatch.setattr(save_dir, "_ATTEMPTS", 5)
    times = 2
    replace(target)
    assert len(renames) == 2 and content(target) == {k: NEW[k] for k in ("config.json", "weights")}
    shutil.rmtree(target)
    times, renames[:] = 10**6, []
    with pytest.raises(OSError, match=r"other processes make and remove .*out all the time"):
        replace(target)
    assert os.listdir(tmp_path) == []


def test_systems_without_a_table_of_mounts_or_an_exchange_of_names(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(save_dir.Path, "read_bytes", lambda _: os.close(10**6))
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("b"))
    assert save_dir._mounts_in(tmp_path) == [tmp_path / "a" / "b"]
    monkeypatch.undo()
    monkeypatch.setattr(save_dir.ctypes, "CDLL", Mock(spec=[], return_value=object()))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()  # a current directory that is gone is no error
    fill(tmp_path / "out", OLD)
    replace(tmp_path / "out")
    assert content(tmp_path / "out") == NEW
