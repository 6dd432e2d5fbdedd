"""Tokenizer: where its files and settings come from, what it decodes, and what it refuses."""

import json

import pytest
import torch

from ligermodels.errors import CheckpointError, DataError
from ligermodels.text import Tokenizer


def test_unusable_folders_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        Tokenizer.from_hf(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no tokenizer.json; .* has no tokenizer files"):
        Tokenizer.from_hf(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the folder of a run, whose model is in model/"):
        Tokenizer.from_hf(tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"has merges.txt, vocab.json\n.*save_pretrained"):
        Tokenizer.from_hf(tmp_path)


def test_decode_takes_tensors_ints_and_ids_beyond_the_vocabulary(bpe):
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
    with pytest.raises(TypeError, match="must be a str, got tuple"):
        ours([("a", "b")])
    assert ours.id_to_token(-1) is ours.id_to_token(2**40) is None


def test_special_tokens_map_serves_where_the_config_is_silent(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im|>"}, "bos_token": "<s>"})
    )
    ours = Tokenizer.from_hf(str(tmp_path))
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (0, 2, None)
    assert ours.id_to_token(2) == "<|im|>" and ours.token_to_id("nothing") is None


def test_damaged_settings_are_named_by_folder(bpe, tmp_path, subtests):
    tokenizer = (bpe / "tokenizer.json").read_bytes()
    for name, content, key in (
        ("tokenizer_config.json", b'{"bos_token": 5}', "cannot use this file"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [5]}', "damaged: IndexError"),
        ("tokenizer_config.json", b'{"chat_template": [5]}', "damaged: TypeError"),
        ("tokenizer_config.json", b'{"padding_side": "Left"}', "'padding_side' is 'Left', exp"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: the content is not JSON"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: the file cannot be read"),
        ("tokenizer.json", b"{}", "cannot use this file"),
    ):
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / "tokenizer.json").write_bytes(tokenizer)
        (tmp_path / name).write_bytes(content)
        with subtests.test(f"{name}: {content[:40]!r}"):
            with pytest.raises(CheckpointError, match=key) as caught:
                Tokenizer.from_hf(tmp_path)
            assert str(caught.value).startswith(str(tmp_path))
