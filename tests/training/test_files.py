"""A file of a run is written whole or not at all."""

from __future__ import annotations

import os

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


def test_an_error_that_names_its_file_is_not_named_again(tmp_path):
    with pytest.raises(SaveError, match=r"^inner$"), writing(tmp_path / "outer"):
        raise SaveError("inner")
