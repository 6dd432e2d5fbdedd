"""Data sets of the hub and tables become JSONL files."""

from __future__ import annotations

import json
import os

import pytest

from ligermodels.errors import DataError
from ligermodels.training.data_sources import local_files
from tests.training.tiny_run import make_checkpoint, run

datasets = pytest.importorskip("datasets")
ROWS = [{"text": "the cat saw a dog", "n": i} for i in range(20)] + [{"text": "ä 🙂", "n": 20}]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    return tmp_path / "home"


def rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_tables_are_read(tmp_path, cache):
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "a.parquet")
    table.to_csv(tmp_path / "a.csv")
    for name in ("a.parquet", "a.csv"):
        (file,) = local_files([str(tmp_path / name)])
        assert rows(file) == ROWS and file.is_relative_to(cache)
        assert local_files([str(tmp_path / name)]) == [file]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet: the file cannot be read"):
        local_files([str(tmp_path / "bad.parquet")])


def test_a_copy_is_made_again_where_it_or_the_table_changed(tmp_path, cache):
    table = tmp_path / "a[1].csv"
    table.write_text("text\nfirst\n")
    (file,) = local_files([str(table)])
    for content in ('{"text": "other"}\n', ""):
        file.write_text(content)
        assert local_files([str(table)]) == [file] and rows(file) == [{"text": "first"}]
    (file.parent / f"{file.name}.sha256").unlink()
    assert local_files([str(table)]) == [file] and rows(file) == [{"text": "first"}]
    assert len([*file.parent.iterdir()]) == 2
    at = table.stat().st_mtime_ns
    table.write_text("text\nagain\n")
    os.utime(table, ns=(at, at))
    (file,) = local_files([str(table)])
    assert rows(file) == [{"text": "again"}]


def test_bars_are_hidden_where_nothing_is_shown(tmp_path, cache, capfd):
    (tmp_path / "a.csv").write_text("text\nfirst\n")
    (tmp_path / "b.csv").write_text("text\nsecond\n")
    local_files([str(tmp_path / "a.csv")], progress=False)
    assert capfd.readouterr().err == ""
    local_files([str(tmp_path / "b.csv")])
    assert "examples/s" in capfd.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path, cache):
    cache.write_text("no folder")
    (tmp_path / "a.csv").write_text("text\nfirst\n")
    with pytest.raises(DataError, match="the file cannot be written"):
        local_files([str(tmp_path / "a.csv")])


def test_a_run_learns_from_a_data_set_of_the_hub(tmp_path, cache, monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "no/such":
            raise ConnectionError("the hub cannot be reached\nat all")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="no/such: the data set cannot be loaded: the hub cannot"):
        local_files(["no/such"])
    checkpoint = make_checkpoint(tmp_path / "tiny")
    given = {"max_steps": 2, "eval_files": ["some/data:test"]}
    done = run(checkpoint, "some/data:main:train[:5]", tmp_path / "run", **given)
    assert {("some/data", "main", "train[:5]"), ("some/data", None, "test")} <= {*asked}
    assert done.steps == 2 and "some/data:main:train[:5]" in (tmp_path / "run/run.yaml").read_text()
    again = run(checkpoint, "some/data:main:train[:5]", tmp_path / "run", **given, resume=True)
    assert again.metrics == done.metrics
