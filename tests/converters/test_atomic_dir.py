import os
import signal
import subprocess
import sys

import pytest

from ligermodels.converters import atomic_dir as atomic
from ligermodels.converters.atomic_dir import recover_dir, replace_dir
from ligermodels.converters.files import sync_file

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
    target = tmp_path / "out"
    fill(target, OLD)
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        other = tmp_path / f"{atomic._prefix(target)}{alive.pid}"
        other.mkdir()
        foreign = tmp_path / ".out.saving-another-host-1"
        foreign.mkdir()
        replace(target)
        assert other.is_dir() and foreign.is_dir()
    finally:
        alive.communicate(b"\n")
    replace(target)
    assert not other.exists() and foreign.is_dir()


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


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    target = tmp_path / "out"
    fill(target, OLD)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == target)
    with pytest.raises(OSError, match="is a mount point; pass a folder inside it"):
        replace(target)
    assert content(target) == OLD and os.listdir(tmp_path) == ["out"]
