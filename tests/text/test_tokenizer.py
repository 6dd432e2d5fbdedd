"""Tokenizer: where its files and settings come from, what it decodes, and what it refuses."""

import json

import pytest
import torch

from ligermodels.errors import CheckpointError, DataError
from ligermodels.text import Tokenizer


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


TEMPLATE = {"name": "a", "template": ""}


def test_special_tokens_map_serves_where_the_config_is_silent(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im|>"}, "bos_token": "<s>"})
    )
    ours = Tokenizer.from_hf(str(tmp_path))
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (0, 2, None)
    assert ours.id_to_token(2) == "<|im|>" and ours.token_to_id("nothing") is None


def test_damaged_settings_are_named_by_file_and_key(bpe, tmp_path, subtests):
    decoder = '{"added_tokens_decoder": %s}'
    one = '{"content": "x"}'
    config = (
        ('{"bos_token": 5}', "'bos_token' is 5"),
        ('{"eos_token": {"x": 1}}', "'eos_token' is {'x': 1}"),
        ('{"legacy": "false"}', "'legacy' is 'false', expected true"),
        (decoder % '{"5": {"content": "x", "lstrip": "no"}}', "'added_tokens_decoder' is"),
        (decoder % f'{{"5": {one}, "05": {one}}}', "'added_tokens_decoder' is .*'05'"),
        (decoder % f'{{"5": {one}, "6": {one}}}', "the added token 'x' has id 5, but with"),
        ('{"padding_side": "both"}', "'padding_side' is 'both', expected one of"),
        ('{"chat_template": 5}', "'chat_template' is 5"),
        (f'{{"chat_template": [{", ".join([json.dumps(TEMPLATE)] * 2)}]}}', "no name twice"),
    )
    others = (
        ("special_tokens_map.json", '{"pad_token": []}', r"'pad_token' is \[\]"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
        ("tokenizer.json", "{}", "cannot use this file"),
    )
    tokenizer = (bpe / "tokenizer.json").read_bytes()
    for name, content, key in (*(("tokenizer_config.json", *case) for case in config), *others):
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / "tokenizer.json").write_bytes(tokenizer)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with subtests.test(f"{name}: {content[:40]!r}"):
            with pytest.raises(CheckpointError, match=key) as caught:
                Tokenizer.from_hf(tmp_path)
            assert str(caught.value).startswith(f"{tmp_path / name}: ")
