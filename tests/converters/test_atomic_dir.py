import contextlib
import errno
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from ligermodels.converters import atomic_dir as atomic
from ligermodels.converters.atomic_dir import read_one_version, recover_dir, replace_dir
from ligermodels.converters.folders import LockedFolder
from ligermodels.errors import CheckpointError
from tests import sandbox
from tests.converters.replaced import NEW, OLD, content, fill, in_a_fork, owned, replace
from tests.system_calls import leave


def test_replaces_and_leaves_nothing_beside(tmp_path, way):
    target = tmp_path / "out"
    replace(target)
    assert content(target) == {k: NEW[k] for k in ("config.json", "weights")}
    fill(target, OLD)
    replace(target)
    assert content(target) == NEW
    assert os.listdir(tmp_path) == ["out"]


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
    atomic._exchange = dies(atomic._exchange)
    replace(target)


def test_after_a_kill_the_folder_is_old_or_new(tmp_path, way):
    """For every n, a process is killed before its n-th call that reads or changes the disk."""
    seen = set()
    for after in range(100):
        place = tmp_path / str(after)
        place.mkdir()
        target = place / "out"
        fill(target, OLD)
        child = os.fork()
        if child == 0:
            try:
                replace_and_die(target, after)
            except BaseException:
                leave(1)
            leave(0)
        status = os.waitpid(child, 0)[1]
        recover_dir(target)
        now = content(target)
        assert now in (OLD, NEW), f"after a kill at call {after} the folder holds {now}"
        seen.add(now["weights"])
        replace(target)
        assert content(target) == NEW
        assert os.listdir(place) == ["out"], "files of the killed save are left"
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    else:
        pytest.fail("the save was killed 100 times and never completed")
    assert after > 8 and seen == {"old weights", "new weights"}


def test_an_error_in_the_last_rename_brings_the_old_folder_back(tmp_path, monkeypatch):
    target = tmp_path / "out"
    fill(target, OLD)
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    rename = os.rename

    def fails(a, b):
        if ".saving-" in str(a):
            raise OSError(5, "Input/output error")
        rename(a, b)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        replace(target)
    assert content(target) == OLD and os.listdir(tmp_path) == ["out"]


def test_a_save_under_way_elsewhere_is_left_alone(tmp_path):
    """A thread, and a process that is killed later, are each in the middle of a save."""
    target = tmp_path / "out"
    fill(target, OLD)
    here, lock = atomic._new_folder(target)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, os.fsencode(atomic._new_folder(target)[0]))
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


def test_the_old_folders_mode_is_kept(tmp_path):
    target = tmp_path / "out"
    fill(target, OLD)
    target.chmod(0o750)
    replace(target)
    assert target.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("where", ["", "data", "runs/deep/data", "file"])
@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_mount_in_the_folder_is_refused_and_not_emptied(tmp_path, where, kind):
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
        mounted = kind == "tmpfs" and where != "file" and sandbox.mount_tmpfs(place)
        if not (mounted or sandbox.mount_folder(volume, place)):
            return False
        mine = place if where == "file" else place / "mine"
        mine.write_text("mine")
        message = f"volume is mounted in the folder, at {place};" if where else "is a mount point"
        with pytest.raises(OSError, match=message):
            replace(target)
        assert mine.read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["out", "volume"]

    in_a_fork(test)


def test_a_volume_mounted_during_the_save_is_not_emptied(tmp_path):
    def test():
        if not sandbox.own_mounts():
            return False
        target = tmp_path / "out"
        fill(target, OLD)
        (target / "data").mkdir()
        with pytest.raises(OSError, match="volume is mounted in the folder"):
            with replace_dir(target, owned) as fresh:
                (fresh / "weights").write_text("new")
                if not sandbox.mount_tmpfs(target / "data"):
                    return False
                (target / "data" / "mine").write_text("mine")
        assert (target / "data" / "mine").read_text() == "mine"
        assert (target / "weights").read_text() == OLD["weights"]

    in_a_fork(test)


def test_threads_that_replace_one_folder_each_succeed(tmp_path, way):
    target = tmp_path / "out"
    fill(target, OLD)
    (target / "runs").mkdir()
    (target / "runs" / "log").write_text("mine")
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
    assert (target / "runs" / "log").read_text() == (target / "notes").read_text() == "mine"
    assert (target / "config.json").read_text() == (target / "weights").read_text()
    assert sorted(os.listdir(target)) == ["config.json", "notes", "runs", "weights"]


def test_a_folder_that_has_no_name_for_a_moment_is_not_refused(tmp_path, monkeypatch):
    target, writable = tmp_path / "out", atomic.is_writable
    fill(target, OLD)
    looks = []

    def others(path):
        looks.append(path)
        if len(looks) > 1:
            return writable(path)
        shutil.rmtree(path)  # the folder is absent during this look, and another one after it
        absent = writable(path)
        (tmp_path / "holds the old inode number").mkdir()
        fill(path, OLD)
        return absent

    monkeypatch.setattr(atomic, "is_writable", others)
    atomic.check_replaceable(target)
    assert len(looks) == 2


@pytest.mark.parametrize("rename", [1, 2])
def test_ctrl_c_around_a_rename_leaves_the_old_folder(tmp_path, monkeypatch, rename):
    target = tmp_path / "out"
    fill(target, OLD)
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    original, count = os.rename, 0

    def interrupted(a, b):
        nonlocal count
        count += 1
        if count == rename == 2:
            raise KeyboardInterrupt
        original(a, b)
        if count == rename:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(target)
    assert content(target) == OLD and os.listdir(tmp_path) == ["out"]


def test_a_load_between_two_renames_waits_for_the_second(tmp_path):
    target, aside = tmp_path / "out", tmp_path / f".out.replaced-{'a' * 16}"
    fill(aside, OLD)
    link = tmp_path / "link"
    link.symlink_to("out")
    for path in (target, link):
        lock = LockedFolder(aside)
        found = []
        waiting = threading.Thread(target=lambda p=path, f=found: f.append(recover_dir(p)))
        waiting.start()
        time.sleep(0.02)
        assert found == [] and not target.exists()
        fill(target, NEW)
        waiting.join()
        lock.close()
        assert found == [True] and content(target) == NEW and aside.exists()
        shutil.rmtree(target)
    assert recover_dir(link) and content(target) == OLD and not aside.exists()


def test_an_absent_folder_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / f".absent.replaced-{'0' * 16}").touch()
    (tmp_path / f".locked.replaced-{'0' * 16}").mkdir()
    monkeypatch.setattr(os, "rename", lambda a, b: os.close(10**6))  # as if it were not allowed
    assert not recover_dir(tmp_path / "locked")
    monkeypatch.undo()
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


@pytest.mark.parametrize("number", [2, 3])  # the looks just before the swap and just after it
def test_a_mount_that_comes_around_the_swap_brings_the_old_folder_back(
    tmp_path, way, monkeypatch, number
):
    target, looks = tmp_path / "out", []

    def refuse(folder):
        looks.append(folder)
        if len(looks) == number:
            raise OSError(errno.EBUSY, "a volume is mounted in the folder")

    fill(target, OLD)
    monkeypatch.setattr(atomic, "_refuse_mounts", refuse)
    with pytest.raises(OSError, match="a volume is mounted in the folder"):
        replace(target)
    assert content(target) == OLD and os.listdir(tmp_path) == ["out"]


def test_a_target_that_comes_and_goes(tmp_path, monkeypatch):
    """Another process makes it just before it is made here, once or again and again."""
    target, renames = tmp_path / "out", []
    locks = atomic.wait_for

    @contextlib.contextmanager
    def others(path):
        with locks(path) as exists:
            if path == tmp_path and len(renames) < times:
                renames.append(path)
                fill(target, OLD)
                yield exists
                shutil.rmtree(target)
            else:
                yield exists

    monkeypatch.setattr(atomic, "wait_for", others)
    monkeypatch.setattr(atomic, "ATTEMPTS", 5)
    times = 2
    replace(target)
    assert len(renames) == 2 and content(target) == {k: NEW[k] for k in ("config.json", "weights")}
    shutil.rmtree(target)
    times, renames[:] = 10**6, []
    with pytest.raises(OSError, match=r"other processes make and remove .*out all the time"):
        replace(target)
    assert os.listdir(tmp_path) == []


def test_a_new_folder_that_others_take_for_abandoned_is_made_again(tmp_path, monkeypatch):
    target, locks = tmp_path / "out", []

    class Taken(LockedFolder):
        def is_at(self, path):
            locks.append(path)
            return len(locks) > 1 and super().is_at(path)

    monkeypatch.setattr(atomic, "LockedFolder", Taken)
    fresh, lock = atomic._new_folder(target)
    assert len(locks) == 2 and os.listdir(tmp_path) == [fresh.name]
    lock.close()
    fresh.rmdir()
    monkeypatch.setattr(atomic, "LockedFolder", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        atomic._new_folder(target)
    assert os.listdir(tmp_path) == []


def test_a_current_directory_that_is_gone_is_no_error(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    fill(tmp_path / "out", OLD)
    replace(tmp_path / "out")
    assert content(tmp_path / "out") == NEW


def test_a_system_without_an_exchange_of_names(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.ctypes, "CDLL", Mock(spec=[], return_value=object()))
    fill(tmp_path / "out", OLD)
    replace(tmp_path / "out")
    assert content(tmp_path / "out") == NEW
