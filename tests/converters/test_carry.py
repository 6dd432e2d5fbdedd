"""Files of others in the old folder, whatever they do to it while it is replaced."""

import contextlib
import os
from pathlib import Path

import pytest

from ligermodels.converters import atomic_dir as atomic
from ligermodels.converters.carry import Carry
from tests.converters.replaced import NEW, OLD, content, content_of, fill, in_a_fork, replace


def test_files_are_copied_where_links_are_not_possible(tmp_path, monkeypatch):
    target = tmp_path / "out"
    fill(target, OLD)

    def no_links(*args, **options):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    (target / "link").symlink_to("notes")
    replace(target)
    assert os.readlink(target / "link") == "notes"
    (target / "link").unlink()
    assert content(target) == NEW


@pytest.mark.parametrize("links", [True, False])
def test_what_others_do_to_the_old_folder_until_the_swap_is_kept(
    tmp_path, way, links, monkeypatch, before_the_swap
):
    target = tmp_path / "out"
    fill(target, OLD | {"gone": "", "replaced": "a", "appended": "a", "renamed": "a"})
    (target / "runs").mkdir()
    (target / "runs" / "empty").mkdir()
    if not links:
        monkeypatch.setattr(os, "link", lambda *args, **options: os.close(10**6))

    def others():
        (target / "gone").unlink()
        (target / "runs" / "empty").rmdir()
        (target / "runs" / "new").mkdir()
        (target / "runs" / "new" / "log").write_text("new")
        (target / "aside").write_text("b")
        os.replace(target / "aside", target / "replaced")
        os.replace(target / "renamed", target / "renamed to")
        with (target / "appended").open("a") as file:
            file.write("b")
        (target / "config.json").write_text("not theirs to write")

    before_the_swap(others)
    replace(target)
    found = {
        str(path.relative_to(target)): path.read_text()
        for path in target.rglob("*")
        if path.is_file()
    }
    assert found == NEW | {
        "replaced": "b",
        "appended": "ab",
        "renamed to": "a",
        "runs/new/log": "new",
    }
    assert not (target / "runs" / "empty").exists() and os.listdir(tmp_path) == ["out"]


def test_what_others_do_to_the_new_folder_after_the_swap_is_kept(tmp_path, way, monkeypatch):
    target = tmp_path / "out"
    fill(target, OLD | {"gone": "a", "replaced": "a"})
    swap = atomic._swap

    def others(fresh, target):
        (target / "gone").unlink()
        (target / "replaced").write_text("b b")
        (target / "come").write_text("a")
        old = swap(fresh, target)
        for name in ("gone", "replaced", "come"):
            with contextlib.suppress(FileNotFoundError):
                (target / name).unlink()
            (target / name).write_text("the newest")
        return old

    monkeypatch.setattr(atomic, "_swap", others)
    replace(target)
    expected = dict.fromkeys(("gone", "replaced", "come"), "the newest")
    assert content(target) == NEW | expected and os.listdir(tmp_path) == ["out"]


def test_a_call_that_found_the_old_folder_before_the_swap_loses_nothing(tmp_path, way, monkeypatch):
    """It changes that folder while the files that came late are added to the new one."""
    target, late = tmp_path / "out", []
    fill(target, OLD)
    over = Carry.over

    def others(carry, old, new):
        changed = over(carry, old, new)
        if new == target and len(late) < 3:
            late.append(f"late {len(late)}")
            (old / late[-1]).write_text("mine")
        return changed

    monkeypatch.setattr(Carry, "over", others)
    replace(target)
    assert content(target) == NEW | dict.fromkeys(late, "mine") and len(late) == 3


@pytest.mark.parametrize("links", [True, False])
def test_a_call_that_is_as_late_as_can_be_is_seen_or_fails(tmp_path, way, monkeypatch, links):
    """What others do just before the old folder disappears is in the new one."""
    target, rmdir = tmp_path / "out", Path.rmdir
    fill(target, OLD | {"replaced": "a", "stays": "a"})
    (target / "runs").mkdir()
    fill(target / "runs", {"moved": "a", "appended": "a", "gone": "a"})
    if not links:
        monkeypatch.setattr(os, "link", lambda *args, **options: os.close(10**6))
    empty = Carry._empty
    calls = []

    def others(carry, old, where):
        calls.append(where)
        if len(calls) == 1:  # Nothing is removed yet.
            os.replace(old / "runs" / "moved", old / "runs" / "log")
            (old / "runs" / "gone").unlink()
            with (old / "runs" / "appended").open("a") as file:
                file.write("b")
        return empty(carry, old, where)

    def late_rmdir(folder):
        if folder.parent == tmp_path and not (target / "late").exists():
            (folder / "late").write_text("mine")
            (folder / "aside").write_text("b b")
            os.replace(folder / "aside", folder / "replaced")
            with pytest.raises(FileNotFoundError):
                os.replace(folder / "stays", folder / "elsewhere")
        rmdir(folder)

    monkeypatch.setattr(Carry, "_empty", others)
    monkeypatch.setattr(Path, "rmdir", late_rmdir)
    replace(target)
    found = {
        str(path.relative_to(target)): path.read_text()
        for path in target.rglob("*")
        if path.is_file()
    }
    moved = {"runs/log": "a", "runs/appended": "ab"}
    assert found == NEW | moved | {"replaced": "b b", "stays": "a", "late": "mine"}
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_file_that_is_written_and_moved_around_the_swap_has_one_name(
    tmp_path, way, monkeypatch, moment
):
    target = tmp_path / "out"
    fill(target, OLD | {"aside": "m"})
    swap = atomic._swap

    def others(fresh, target):
        # It was added to the new folder before it was written.
        (target / "aside").write_text("mine")
        if moment == "before":
            os.replace(target / "aside", target / "log")
        old = swap(fresh, target)
        if (
            moment == "during"
        ):  # The call found the one folder before the swap, and the other after.
            os.replace(old / "aside", target / "log")
        if moment == "after":
            os.replace(target / "aside", target / "log")
        return old

    monkeypatch.setattr(atomic, "_swap", others)
    replace(target)
    assert content(target) == NEW | {"log": "mine"}


def test_of_a_file_that_is_written_and_replaced_before_the_swap_the_last_one_stays(
    tmp_path, way, before_the_swap
):
    target = tmp_path / "out"
    fill(target, OLD | {"log": "m"})

    def others():
        (target / "log").write_text("mine")
        (target / "aside").write_text("the newest")
        os.replace(target / "aside", target / "log")

    before_the_swap(others)
    replace(target)
    assert content(target) == NEW | {"log": "the newest"}


def test_a_file_that_comes_while_another_is_added_is_not_overwritten(tmp_path, monkeypatch):
    target, link = tmp_path / "out", os.link
    fill(target, OLD)

    def others(source, copy, **options):
        copy.write_text("the newest")
        link(source, copy, **options)

    monkeypatch.setattr(os, "link", others)
    replace(target)
    assert content(target) == NEW | {"notes": "the newest"}


def test_the_new_folder_of_a_killed_save_inside_does_not_come_along(tmp_path):
    target = tmp_path / "out"
    fill(target, OLD)
    left, lock = atomic._new_folder(target / "best")
    lock.close()
    (target / ".file.saving-0123456789abcdef").write_text("mine")
    replace(target)
    assert not left.exists() and (target / ".file.saving-0123456789abcdef").exists()


def test_another_save_inside_the_folder_is_an_error(tmp_path, before_the_swap):
    target, inner = tmp_path / "out", tmp_path / "out" / "best"
    fill(target, OLD)
    fill(inner, OLD)
    inside, lock = atomic._new_folder(inner)
    with pytest.raises(OSError, match=r"another save is at work in .*best"):
        replace(target)
    lock.close()
    inside.rmdir()
    assert content_of(target) == content_of(inner) == OLD
    before_the_swap(lambda: replace(inner))
    with pytest.raises(OSError, match="best was replaced meanwhile; try again"):
        replace(target)
    assert content_of(target) == OLD and content_of(inner) == NEW
    replace(target)
    assert content_of(target) == content_of(inner) == NEW and os.listdir(tmp_path) == ["out"]


def test_a_pipe_that_cannot_be_linked_is_not_copied(tmp_path, monkeypatch):
    target = tmp_path / "out"
    fill(target, OLD)
    os.mkfifo(target / "pipe")
    replace(target)
    assert (target / "pipe").is_fifo()
    monkeypatch.setattr(os, "link", lambda *args, **options: os.close(10**6))
    with pytest.raises(OSError):
        replace(target)
    assert (target / "pipe").is_fifo() and os.listdir(tmp_path) == ["out"]


def test_what_belongs_to_another_user_is_left_to_them(tmp_path):
    def test():
        target = tmp_path / "out"
        fill(target, OLD)
        (target / "a").mkdir()
        if os.geteuid() != 0:
            return False
        for folder in (tmp_path, target):
            os.chown(folder, 65534, 65534)
        for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
            os.chmod(folder, folder.stat().st_mode | 0o555)
        os.seteuid(65534)
        with pytest.raises(PermissionError, match="out/a belongs to another user, who would lose"):
            replace(target)
        (target / "a").rmdir()
        with pytest.raises(PermissionError, match="notes belongs to another user, who would lose"):
            replace(target)
        target.chmod(0o555)
        with pytest.raises(PermissionError, match="no permission to write to the folder"):
            replace(target)
        assert content_of(target) == OLD and os.listdir(tmp_path) == ["out"]

    in_a_fork(test)
