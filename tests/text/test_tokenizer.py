"""Tokenizer: where its files come from, what it decodes, and which folders it refuses."""

import pytest

from ligermodels.errors import CheckpointError, DataError
from ligermodels.text import Tokenizer


def test_a_hub_id_is_fetched_without_its_weights(bpe, monkeypatch):
    asked = []

    def resolve(name, revision, *, weights):
        asked.append((name, revision, weights))
        return bpe

    monkeypatch.setattr("ligermodels.text.tokenizer.resolve", resolve)
    assert Tokenizer.from_hf("someone/model", revision="v2").encode("the dog")
    assert asked == [("someone/model", "v2", False)]


def test_unusable_folders_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        Tokenizer.from_hf(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no tokenizer.model; .* has no tokenizer files"):
        Tokenizer.from_hf(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the folder of a run, whose model is in model/"):
        Tokenizer.from_hf(tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"has merges.txt, vocab.json\n.*save_pretrained"):
        Tokenizer.from_hf(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(CheckpointError, match=r"tokenizer.model: .* not a sentencepiece.*tiktoken"):
        Tokenizer.from_hf(tmp_path)


def test_decode_takes_tensors_ints_and_ids_beyond_the_vocabulary(bpe):
    import torch

    ours = Tokenizer.from_hf(bpe)
    ids = ours.encode("the dog")
    assert ours.decode(torch.tensor(ids)) == "the dog"
    assert ours.decode([*ids, 10**6, -100]) == "the dog"
    assert ours.decode(ids[-1]) == ours.decode(ids[-1:])
    # the file asks for truncation to 4 tokens, which encode ignores
    assert len(ours.encode("the quick brown fox jumps over the lazy dog")) > 4


def test_text_that_is_not_unicode(bpe):
    ours = Tokenizer.from_hf(bpe)
    with pytest.raises(DataError, match=r"not valid Unicode: character 2 is '\\ud800'"):
        ours.encode("ab\ud800")
    with pytest.raises(TypeError, match="must be a str, got bytes"):
        ours.encode(b"ab")
    assert ours.id_to_token(-1) is ours.id_to_token(2**40) is None
