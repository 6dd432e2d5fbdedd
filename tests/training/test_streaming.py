"""Data on the disk: the same rows as in memory, mixed by weights, resumed in order."""

from __future__ import annotations

import json
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from ligermodels.errors import ConfigError, DataError, LigerError, SaveError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training import streaming
from ligermodels.training.data import Document, read_documents
from ligermodels.training.packing import PackedRows
from ligermodels.training.streaming import MixedOrder, StoredRows, stored_rows, token_store
from tests.training.tiny_run import make_text, run, same, tensors


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "ligermodels" / "tokens"


@pytest.fixture
def records(tmp_path):
    """Texts and examples of unequal lengths, some longer than a row."""
    draw = np.random.default_rng(0)
    lines = []
    for i in range(60):
        words = "the cat saw a dog " * int(draw.integers(1, 12))
        lines.append({"text": words} if i % 3 else {"prompt": words, "completion": " and ran"})
    lines[7:7] = [{"text": ""}, {"text": " "}]
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_ranks_that_share_rows_can_cut_them(checkpoint, records):
    given = {"separator": None, "seq_len": 62, "eval_fraction": 0.2, "seed": 0, "multiple": 4}
    made = stored_rows([records], [], Tokenizer.from_hf(checkpoint), checkpoint, **given)
    for rows in made:
        assert rows.width == 64 and rows.batch([0]).input_ids.shape == (1, 64)


@pytest.mark.parametrize("window", [2**16, 7])
def test_the_rows_are_those_in_memory(checkpoint, records, window, monkeypatch):
    monkeypatch.setattr(streaming, "_WINDOW", window)
    monkeypatch.setattr(streaming, "_BLOCK", 100 * window)
    tokenizer = Tokenizer.from_hf(checkpoint)
    plain = PackedRows(read_documents([records], tokenizer), 64)
    store = token_store(records, tokenizer, checkpoint)
    rows = StoredRows([store], [store.spans], 64)
    for name in ("num_tokens", "num_targets", "num_truncated", "num_dropped", "max_id"):
        assert getattr(rows, name) == getattr(plain, name), name
    assert rows.num_untargeted == plain.num_untargeted == 2
    if window == 7:
        assert len(rows) >= len(plain) and rows.width <= 64
        return
    assert (len(rows), rows.width) == (len(plain), plain.width)
    for index in range(len(rows)):
        ours, theirs = rows.batch([index]), plain.batch([index])
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert (ours.num_tokens, ours.num_targets) == (theirs.num_tokens, theirs.num_targets)


def test_tokens_are_written_once_and_not_half(checkpoint, records, cache, monkeypatch):
    tokenizer = Tokenizer.from_hf(checkpoint)
    first = token_store(records, tokenizer, checkpoint)
    monkeypatch.setattr(streaming, "iter_documents", None)
    with pytest.raises(TypeError):
        token_store(records, tokenizer, checkpoint, separator="other")
    assert token_store(records, tokenizer, checkpoint).digest == first.digest

    def breaks(*_):
        yield Document(np.arange(3, dtype=np.int32), np.array([False, True, True]))
        raise DataError("line 2 is wrong")

    monkeypatch.setattr(streaming, "iter_documents", breaks)
    before = sorted(cache.iterdir())
    with pytest.raises(DataError, match="line 2 is wrong"):
        token_store(records, tokenizer, checkpoint, separator="x")
    assert {path.suffix for path in {*cache.iterdir()} - {*before}} == {".lock"}


@pytest.mark.parametrize("name", ["ids", "loss_mask", "ends", "divisible", "facts.json", "all"])
def test_damaged_tokens_are_written_again(checkpoint, records, cache, name):
    tokenizer = Tokenizer.from_hf(checkpoint)
    first = token_store(records, tokenizer, checkpoint)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    if name == "all":
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "x").touch()
    else:
        file = folder / name if "." in name else folder / f"{name}.bin"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.unlink()  # `first` has it open
        file.write_bytes(content)
    again = token_store(records, tokenizer, checkpoint)
    assert again.digest == first.digest and np.array_equal(again.ids[:], first.ids[:])
    file = folder / "ids.bin"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"ids\.bin: the file was changed while a run was using it"):
        again.ids[:5]


def test_the_lock_is_not_written_through_a_link(checkpoint, records, cache, tmp_path):
    tokenizer = Tokenizer.from_hf(checkpoint)
    token_store(records, tokenizer, checkpoint)
    (lock,) = cache.glob("*.lock")
    lock.unlink()
    (tmp_path / "mine").write_text("mine")
    lock.symlink_to(tmp_path / "mine")
    with pytest.raises(SaveError, match=r"\.lock: cannot be written"):
        token_store(records, tokenizer, checkpoint)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_streamed_run_is_the_same_run(checkpoint, records, tmp_path):
    given = {"max_steps": 4, "save_steps": 2, "eval_steps": 4}
    plain = run(checkpoint, records, tmp_path / "a", **given)
    streamed = run(checkpoint, records, tmp_path / "b", **given, stream=True)
    assert same(tensors(plain.model_dir), tensors(streamed.model_dir))
    assert streamed.eval_loss_after == plain.eval_loss_after
    (tmp_path / "b/checkpoints/step-00000004.safetensors").unlink()
    again = run(checkpoint, records, tmp_path / "b", **given, stream=True, resume=True)
    assert same(tensors(again.model_dir), tensors(plain.model_dir))


def test_one_of_a_few_examples_is_held_out(checkpoint, tmp_path):
    """As without --stream. Of a single one nothing is left to train on."""
    file = tmp_path / "few.jsonl"
    lines = [json.dumps({"prompt": f"{i} is ", "completion": "a number " * i}) for i in range(1, 9)]
    file.write_text("\n".join(lines))
    given = {"max_steps": 2, "eval_steps": 2, "eval_fraction": 0.05}
    plain = run(checkpoint, file, tmp_path / "a", **given)
    streamed = run(checkpoint, file, tmp_path / "b", **given, stream=True)
    assert same(tensors(plain.model_dir), tensors(streamed.model_dir))
    assert streamed.eval_loss_after == plain.eval_loss_after
    file.write_text(lines[0])
    with pytest.raises(DataError, match="too small to hold out"):
        run(checkpoint, file, tmp_path / "c", **given, stream=True)


@pytest.mark.parametrize("separator", [None, ""])
def test_the_ends_of_a_few_texts_are_held_out(checkpoint, tmp_path, separator):
    """As without --stream. A text that is too short for two parts is for training."""
    file = tmp_path / "few.txt"
    file.write_text("\n\n".join(["the cat saw a dog " * 30, "a dog", "the dog ran " * 50]))
    given = {"max_steps": 2, "eval_steps": 2, "eval_fraction": 0.1, "separator": separator}
    plain = run(checkpoint, file, tmp_path / "a", **given)
    streamed = run(checkpoint, file, tmp_path / "b", **given, stream=True)
    assert same(tensors(plain.model_dir), tensors(streamed.model_dir))
    assert streamed.eval_loss_after == plain.eval_loss_after


def test_every_source_has_its_share_and_goes_through_its_rows():
    # No size divides a source's share of a cycle, and one is larger than its share.
    sizes, weights = [7, 701, 11], [3.0, 6.0, 1.0]
    order = MixedOrder(sizes, weights, seed=1)
    counts = [order(i) for i in range(2000)]
    again = MixedOrder(sizes, weights, seed=1)
    assert [again(i) for i in (1999, 3, 1000, 0)] == [counts[i] for i in (1999, 3, 1000, 0)]
    bounds = np.cumsum([0, *sizes])
    for source, weight in enumerate(weights):
        rows = [i for i in counts if bounds[source] <= i < bounds[source + 1]]
        assert len(rows) == 200 * weight
        size = sizes[source]
        for at in range(0, len(rows) - size + 1, size):
            assert sorted(rows[at : at + size]) == [*range(bounds[source], bounds[source + 1])]
    shares = [sum(i < 7 for i in counts[at : at + 100]) for at in range(0, 2000, 100)]
    assert min(shares) > 10 and max(shares) < 50


def test_a_mixed_run_resumes_in_order(checkpoint, text, records, tmp_path):
    other = make_text(tmp_path / "other.txt", seed=3)
    given = {"max_steps": 6, "save_steps": 3, "eval_steps": 6, "data_weights": [1, 3]}
    given |= {"train_files": [other, records]}
    done = run(checkpoint, text, tmp_path / "run", **given)
    (tmp_path / "run/checkpoints/step-00000006.safetensors").unlink()
    again = run(checkpoint, text, tmp_path / "run", **given, resume=True)
    assert same(tensors(again.model_dir), done.model.state_dict())
    assert done.eval_loss_after < done.eval_loss_before


def test_what_makes_no_sense_is_refused(checkpoint, text, tmp_path):
    with pytest.raises(ConfigError, match=r"data_weights: there are 2, but train_files has 1"):
        run(checkpoint, text, tmp_path / "a", data_weights=[1, 2])
    with pytest.raises(ConfigError, match="only for the loss sft, not dpo"):
        run(checkpoint, text, tmp_path / "a", stream=True, loss="dpo")
    short = tmp_path / "short.txt"
    short.write_text("a")
    tokenizer = Tokenizer.from_hf(checkpoint)
    options = {"separator": None, "seq_len": 64, "eval_fraction": 0.1, "seed": 0}
    with pytest.raises(DataError, match="too small to hold out"):
        stored_rows([short], [], tokenizer, checkpoint, **options)
    short.write_text(" ")
    with pytest.raises(DataError, match=r"short\.txt: there is no text"):
        stored_rows([short], [], tokenizer, checkpoint, **options)


def test_tokens_of_another_version_are_not_used(checkpoint, records, tmp_path, monkeypatch):
    """Such as one that did not give a record's tools to the chat template."""
    tokenizer = Tokenizer.from_hf(checkpoint)
    made = Mock(side_effect=streaming.iter_documents)
    monkeypatch.setattr(streaming, "iter_documents", made)
    token_store(records, tokenizer, checkpoint)
    token_store(records, tokenizer, checkpoint)
    assert made.call_count == 1
    files = streaming._code_files()
    assert {file.name for file in files} >= {"data.py", "formats.py", "chat_template.py"}
    other = tmp_path / "other.py"
    other.write_text("# another version")
    for i in range(len(files)):
        changed = [*files[:i], other, *files[i + 1 :]]
        monkeypatch.setattr(streaming, "_code_files", lambda changed=changed: changed)
        token_store(records, tokenizer, checkpoint)
        assert made.call_count == i + 2
    made.reset_mock()
    monkeypatch.setattr(streaming, "version", lambda name: "another")
    token_store(records, tokenizer, checkpoint)
    assert made.call_count == 1


def test_evaluation_files_are_held_out_whole(checkpoint, text, records):
    options = {"separator": None, "seq_len": 64, "eval_fraction": 0.5, "seed": 0}
    tokenizer = Tokenizer.from_hf(checkpoint)
    rows, held = stored_rows([records], [text], tokenizer, checkpoint, **options)
    for found, file in ((rows, records), (held, text)):
        plain = PackedRows(read_documents([file], tokenizer), 64)
        assert len(found) == len(plain) and found.num_targets == plain.num_targets


def test_a_file_of_which_no_row_is_left_is_named(checkpoint, records, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "a" * 100, "completion": "b"}))
    options = {"separator": None, "seq_len": 64, "eval_fraction": 0, "seed": 0}
    tokenizer = Tokenizer.from_hf(checkpoint)
    with pytest.raises(
        LigerError, match=r"long\.jsonl: no row is left to train on; leave the file"
    ):
        stored_rows([records, long], [], tokenizer, checkpoint, **options)
    with pytest.raises(DataError, match="no document has a target within the first 64 tokens"):
        stored_rows([long], [], tokenizer, checkpoint, **options)


def test_a_disk_that_fails_is_an_error_that_names_the_file(checkpoint, records, monkeypatch):
    store = token_store(records, Tokenizer.from_hf(checkpoint), checkpoint)
    fails = Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(streaming.OpenFile, "read_at", fails)
    with pytest.raises(DataError, match=r"ids\.bin: the file cannot be read: Input/output error"):
        store.ids[:5]
