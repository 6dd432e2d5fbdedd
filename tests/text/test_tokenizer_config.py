"""Tests of the settings of a tokenizer folder: which file wins, and errors that name the file."""

import json

import pytest

from ligermodels.errors import CheckpointError
from ligermodels.text import Tokenizer


def test_special_tokens_map_serves_where_the_config_is_silent(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im|>"}, "bos_token": "<s>"})
    )
    ours = Tokenizer.from_hf(str(tmp_path))
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (0, 2, None)
    assert ours.id_to_token(2) == "<|im|>" and ours.token_to_id("nothing") is None


def test_damaged_settings_are_named_by_file_and_key(bpe, tmp_path, subtests):
    for number, (name, content, key) in enumerate(
        (
            ("tokenizer_config.json", "[" * 100_000, "nested too deep"),
            ("tokenizer_config.json", '{"a": ' + "9" * 5000 + "}", "too many digits"),
            ("tokenizer_config.json", '{"a": 1, "a": 2}', "key 'a' appears twice"),
            ("tokenizer_config.json", '{"bos_token": 5}', "'bos_token' is 5"),
            ("tokenizer_config.json", '{"eos_token": {"x": 1}}', "'eos_token' is {'x': 1}"),
            ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "'added_tokens_decoder' is"),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"x": {}}}',
                "'added_tokens_decoder'",
            ),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"1": 4}}',
                "'added_tokens_decoder'",
            ),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"5": {"content": "x"}, "05": {"content": "y"}}}',
                "has the key '05'",
            ),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"2147483648": {"content": "x"}}}',
                "has the key '2147483648', expected an id from 0",
            ),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"5": {"content": "x"}, "6": {"content": "x"}}}',
                "has 'x' as 5 and as 6",
            ),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"5": {"content": "x", "lstrip": "no"}}}',
                "'added_tokens_decoder' is",
            ),
            ("tokenizer_config.json", '{"legacy": "false"}', "'legacy' is 'false', expected true"),
            ("tokenizer_config.json", r'{"bos_token": "\ud800"}', "'bos_token' is"),
            (
                "tokenizer_config.json",
                '{"chat_template": [{"name": "a", "template": ""}, {"name": "a", "template": ""}]}',
                "each with its own name",
            ),
            ("tokenizer_config.json", '{"chat_template": 5}', "'chat_template' is 5"),
            ("tokenizer_config.json", '{"chat_template": [5]}', r"'chat_template' is \[5\]"),
            ("special_tokens_map.json", '{"pad_token": []}', r"'pad_token' is \[\]"),
            ("chat_template.jinja", b"\xff", "cannot be read"),
            ("tokenizer.json", "", "not JSON"),
            ("tokenizer.json", "{}", "not a tokenizer file"),
        )
    ):
        with subtests.test(f"{name}: {content[:40]!r}"):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
            content = content if isinstance(content, bytes) else content.encode()
            (folder / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=key) as caught:
                Tokenizer.from_hf(folder)
            assert str(caught.value).startswith(f"{folder / name}: ")
