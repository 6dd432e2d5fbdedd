"""Where data comes from: the names of data sets, tables, and what is missing."""

from __future__ import annotations

import sys

import pytest

from ligermodels.cli.options import data_library
from ligermodels.errors import DataError
from ligermodels.training.data import _dataset, is_dataset, local_files


def test_the_names_of_data_sets(tmp_path, monkeypatch):
    assert _dataset("tatsu-lab/alpaca") == ("tatsu-lab/alpaca", None, "train")
    assert _dataset("a/b:test[:1%]") == ("a/b", None, "test[:1%]")
    assert _dataset("a/b:main:train[10:20]") == ("a/b", "main", "train[10:20]")
    for name in ("alpaca", "data/a.txt", "a/b/c", "/a/b", "a/b:"):
        assert _dataset(name) is None
    monkeypatch.chdir(tmp_path)
    assert is_dataset("a/b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_text("a text")
    assert not is_dataset("a/b") and str(local_files(["a/b"])[0]) == "a/b"


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"none\.txt: the file is missing"):
        local_files([str(tmp_path / "none.txt")])
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "ligermodels.integrations.hub_data", raising=False)
    monkeypatch.delattr("ligermodels.integrations.hub_data", raising=False)
    with pytest.raises(DataError, match=r"no/such: this needs the library datasets.*pip install"):
        local_files(["no/such"], data_library)
