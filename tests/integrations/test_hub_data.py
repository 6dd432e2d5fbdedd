"""Data sets of the hub and tables become JSONL files."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from ligermodels.errors import DataError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import local_files, read_documents, stored_documents
from ligermodels.training.finetune import finetune
from tests.training.tiny_run import make_checkpoint, make_text, options

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
    texts = [row | {"n": str(row["n"])} for row in ROWS]
    for name, wanted in (("a.parquet", ROWS), ("a.csv", texts)):
        (file,) = local_files([str(tmp_path / name)])
        assert rows(file) == wanted and file.is_relative_to(cache)
        assert local_files([str(tmp_path / name)]) == [file]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet: the file cannot be read"):
        local_files([str(tmp_path / "bad.parquet")])


def test_texts_of_a_csv_file_stay_as_they_are(tmp_path, cache):
    """Also those of many lines, and those that look like a date, a time or a number."""
    lines = "a line\n" * 200_000
    wanted = [
        {"text": text, "label": i % 2 == 0, "none": None}
        for i, text in enumerate((lines, "2024-01-01", "12:30", "01234", lines))
    ]
    (tmp_path / "a.csv").write_text(
        "text,label,none\n" + "".join(f'"{x["text"]}",{x["label"]},\n' for x in wanted)
    )
    for number in (1, 2, 3):
        one = tmp_path / f"{number}.csv"
        one.write_text(f"text\n{wanted[number]['text']}\n")
        assert rows(local_files([str(one)])[0]) == [{"text": wanted[number]["text"]}]
    assert rows(local_files([str(tmp_path / "a.csv")])[0]) == wanted
    (tmp_path / "latin.csv").write_bytes("text\ncafé\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.csv: the file cannot be read: .*UTF8"):
        local_files([str(tmp_path / "latin.csv")])


def test_a_copy_is_made_again_where_the_table_changed(tmp_path, cache):
    """Also if its time and size are the same, and its name looks like a pattern."""
    table = tmp_path / "a[1].csv"
    for word in ("first", "again"):
        table.write_text(f"text\n{word}\n")
        os.utime(table, ns=(10**18, 10**18))
        (file,) = local_files([str(table)])
        assert rows(file) == [{"text": word}]


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

    def tune(**more):
        config = options(checkpoint, "some/data:main:train[:5]", tmp_path / "run", **given, **more)
        return finetune(config, progress=False)

    done = tune()
    assert {("some/data", "main", "train[:5]"), ("some/data", None, "test")} <= {*asked}
    assert done.steps == 2 and "some/data:main:train[:5]" in (tmp_path / "run/run.yaml").read_text()
    again = tune(resume=True)
    assert again.metrics == done.metrics


def test_stored_documents_are_those_in_memory(tmp_path, cache):
    """They are written once, of several files, and again for another separator."""
    checkpoint = make_checkpoint(tmp_path / "tiny")
    tokenizer = Tokenizer.from_hf(checkpoint)
    files = [make_text(tmp_path / "a.txt", 3000), tmp_path / "b.jsonl"]
    files[1].write_text('{"prompt": "ab", "completion": "cd"}\n' * 5)
    for separator in ("", None):
        found = [stored_documents(files, tokenizer, separator) for _ in range(2)]
        wanted = read_documents(files, tokenizer, separator=separator)
        for stored in found:
            assert len(stored) == len(wanted)
            for one, other in zip(stored, wanted):
                assert np.array_equal(one.ids, other.ids) and one.divisible == other.divisible
                assert np.array_equal(one.loss_mask, other.loss_mask)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": \n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1: this is not JSON"):
        stored_documents([bad], tokenizer, None)


def test_a_streamed_run_equals_one_in_memory(tmp_path, cache):
    checkpoint, text = make_checkpoint(tmp_path / "tiny"), make_text(tmp_path / "a.txt")
    losses = []
    for stream in (False, True):
        config = options(checkpoint, [text, text], tmp_path / str(stream), stream=stream)
        made = finetune(config, progress=False)
        losses.append([entry.get("loss") for entry in made.metrics])
    assert losses[0] == losses[1]
