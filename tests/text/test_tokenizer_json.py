"""tokenizer.json gives the tokens that transformers' tokenizers give."""

import json

import pytest

from ligermodels.errors import CheckpointError
from ligermodels.text import Tokenizer
from tests.text.folders import CONFIG, TEXTS, added, assert_same, configure


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        {**CONFIG, "add_bos_token": True, "add_eos_token": True},
        {**CONFIG, "eos_token": "<|im|>", "pad_token": "<|im|>"},
        {**CONFIG, "pad_token": "[PAD]"},  # this is not in the vocabulary, so it is appended
        {
            **CONFIG,
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


def with_parts(bpe, folder, **parts):
    """Write the tokenizer.json of a folder with other parts, and return its content."""
    content = json.loads((bpe / "tokenizer.json").read_text()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return content


def test_what_the_package_would_take_silently_is_refused(bpe, tmp_path, subtests):
    content = with_parts(bpe, tmp_path)
    model, tokens = content["model"], content["added_tokens"]
    first = next(iter(model["vocab"]))
    other = {**tokens[0], "content": "[Z]", "id": 999}
    changed = json.dumps(content).replace('"vocab": {', f'"vocab": {{{json.dumps(first)}: 9, ')
    for text, message in (
        (changed, f"tokenizer.json: key {first!r} appears twice"),
        (
            json.dumps(content | {"model": {**model, "vocab": model["vocab"] | {"zz": 0}}}),
            rf"tokenizer.json: the vocabulary has {first!r} and 'zz' as 0",
        ),
        (
            json.dumps(content | {"added_tokens": [*tokens, other]}),
            r"tokenizer.json: .* '\[Z\]' has id 999, but with tokenizer.json .* id 330",
        ),
        (
            json.dumps(content),
            r"tokenizer_config.json: .* '</s>' has id 7, but with tokenizer.json .* id 1",
        ),
    ):
        config = CONFIG | ({"added_tokens_decoder": added(7, "</s>")} if "id 7" in message else {})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_text(text)
        with subtests.test(message), pytest.raises(CheckpointError, match=message):
            Tokenizer.from_hf(tmp_path)


def test_dropout_is_off(bpe, tmp_path):
    model = json.loads((bpe / "tokenizer.json").read_text())["model"]
    with_parts(bpe, tmp_path, model={**model, "dropout": 1.0})
    text = "the quick brown fox"
    assert Tokenizer.from_hf(tmp_path).encode(text) == Tokenizer.from_hf(bpe).encode(text)


def test_panics_and_faults_of_the_package_are_errors_of_the_checkpoint(bpe, tmp_path, subtests):
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    for parts, message in (
        ({"pre_tokenizer": {**split, "pattern": {"Regex": "(a+)+$"}}}, "retry-limit"),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}}, "unk_id"),
    ):
        with subtests.test(message):
            with_parts(bpe, tmp_path, **parts, added_tokens=[])
            with pytest.raises(CheckpointError, match=f"tokenizer.json: .*{message}"):
                Tokenizer.from_hf(tmp_path).encode("a" * 40 + "!")


def test_ids_with_gaps_are_decoded(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1000}, "unk_token": "a"}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours = Tokenizer.from_hf(tmp_path)
    assert ours.encode("b") == [1000] and ours.decode([1000]) == "b"
