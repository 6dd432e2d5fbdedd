import os
import signal
import traceback
from pathlib import Path

import pytest

from ligermodels.converters import atomic_dir as atomic
from ligermodels.converters.atomic_dir import recover_dir, replace_dir
from ligermodels.converters.files import sync_file
from tests import sandbox

OLD = {"config.json": "old config", "weights": "old weights", "notes": "mine"}
NEW = {"config.json": "new config", "weights": "new weights", "notes": "mine"}


def fill(folder, content):
    folder.mkdir(exist_ok=True)
    for name, text in content.items():
        (folder / name).write_text(text)


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def owned(name):
    return name in ("config.json", "weights")


def replace(target):
    with replace_dir(target, owned) as fresh:
        for name in ("config.json", "weights"):
            (fresh / name).write_text(NEW[name])
            sync_file(fresh / name)


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    """Run a test with both ways to replace a folder; some systems lack the first."""
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    return request.param


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
                os._exit(1)
            os._exit(0)
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


def test_files_are_copied_where_links_are_not_possible(tmp_path, monkeypatch):
    target = tmp_path / "out"
    fill(target, OLD)

    def no_links(*args, **options):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    replace(target)
    assert content(target) == NEW


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
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 3:
        pytest.skip("the machine does not allow this")
    assert code == 0


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
