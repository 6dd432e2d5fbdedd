"""Tests of the settings of a tokenizer folder: which file wins, and errors that name the file."""

import json

import pytest

from ligermodels.errors import CheckpointError
from ligermodels.text import Tokenizer

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
    cases = (*(("tokenizer_config.json", *case) for case in config), *others)
    for number, (name, content, key) in enumerate(cases):
        with subtests.test(f"{name}: {content[:40]!r}"):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
            content = content if isinstance(content, bytes) else content.encode()
            (folder / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=key) as caught:
                Tokenizer.from_hf(folder)
            assert str(caught.value).startswith(f"{folder / name}: ")
