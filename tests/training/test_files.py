"""A file of a run is written whole or not at all."""

from __future__ import annotations

import os
import stat

import pytest

from ligermodels.errors import SaveError
from ligermodels.training.run_dir import atomic_write, writing


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def full_disk(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(SaveError, match=r"a\.txt: cannot be written: No space left on device"):
        atomic_write(file, full_disk)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_interrupted_write_leaves_no_litter_either(tmp_path):
    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "a.txt", interrupted)
    assert os.listdir(tmp_path) == []


def test_a_write_goes_through_no_link(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("a.txt", "a.txt.part"):
        (tmp_path / name).symlink_to(mine)
    atomic_write(tmp_path / "a.txt", lambda path: path.write_text("new"))
    assert mine.read_text() == "mine" and (tmp_path / "a.txt").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "mine"]


def test_a_file_has_the_mode_of_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        atomic_write(tmp_path / "a.txt", lambda path: path.write_text(""))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


def test_an_error_that_names_its_file_is_not_named_again(tmp_path):
    with pytest.raises(SaveError, match=r"^inner$"), writing(tmp_path / "outer"):
        raise SaveError("inner")
