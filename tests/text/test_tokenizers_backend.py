"""tokenizer.json gives the tokens that transformers' tokenizers give."""

import json

import pytest

from ligermodels.errors import CheckpointError
from ligermodels.text import Tokenizer
from tests.text.folders import FAST, TEXTS, added, assert_same, configure


@pytest.mark.parametrize(
    "config",
    [
        FAST,
        {**FAST, "add_bos_token": False},
        {**FAST, "add_bos_token": True, "add_eos_token": True},
        {**FAST, "bos_token": None, "add_bos_token": True},
        {**FAST, "eos_token": "<|im|>", "pad_token": "<|im|>"},
        {**FAST, "pad_token": "[PAD]"},  # this is not in the vocabulary, so it is appended
        {
            **FAST,
            "eos_token": {"content": "</s>", "__type": "AddedToken"},
            "added_tokens_decoder": {
                **added(330, "[X]", special=False),
                **added(331, "[Y]", lstrip=True),
            },
        },
    ],
)
def test_tokenizer_json_equals_transformers(bpe, tmp_path, config):
    theirs, ours = configure(bpe, tmp_path, **config)
    assert_same(theirs, ours, [*TEXTS, " a leading space", "x [Y]y", "word " * 20])


def test_ids_of_an_added_token_must_agree(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    config = {**FAST, "added_tokens_decoder": added(400, "[X]")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: added_.*'\[X\]' id 400"):
        Tokenizer.from_hf(tmp_path)
