"""A file of a run is written whole or not at all."""

from __future__ import annotations

import os
import stat

import pytest

from ligermodels.errors import SaveError
from ligermodels.training.run_dir import atomic_write, writing


@pytest.mark.parametrize(
    "fault, raised, message",
    [
        (OSError(28, "No space left"), SaveError, r"a\.txt: cannot be written: No space left"),
        (KeyboardInterrupt("pressed"), KeyboardInterrupt, "pressed"),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, fault, raised, message):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def failing(path):
        path.write_text("half")
        raise fault

    with pytest.raises(raised, match=message):
        atomic_write(file, failing)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


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
