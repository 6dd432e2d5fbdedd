"""tokenizer.model gives the tokens of sentencepiece and of transformers' tokenizers."""

import json
import random
import re

import pytest
import sentencepiece

from ligermodels.errors import CheckpointError
from ligermodels.text import Tokenizer
from tests.text.folders import (
    LINES,
    SLOW,
    TEXTS,
    added,
    assert_same,
    configure,
    train_sentencepiece,
)


@pytest.mark.parametrize(
    "config",
    [
        SLOW,
        {**SLOW, "legacy": True},
        {**SLOW, "legacy": False, "add_eos_token": True},
        {**SLOW, "add_bos_token": False, "pad_token": "</s>"},
        {**SLOW, "pad_token": "[PAD]"},
        {**SLOW, "add_prefix_space": False},
    ],
)
def test_tokenizer_model_equals_transformers(spm, tmp_path, config):
    theirs, ours = configure(spm, tmp_path, **config)
    draw = random.Random(1)
    words = [*" ".join(LINES).split(), "é", "<|im|>", "😀x", "\n", "[X]", "9"]
    drawn = [
        "".join(draw.choice(words) + " " * draw.randrange(3) for _ in range(9)).lstrip()
        for _ in range(20)
    ]
    texts = [*TEXTS, *drawn]
    if config.get("legacy"):
        # Then each piece of text between special tokens gets a prefix. transformers 5 omits it if
        # the piece begins with a space (see test_leading_spaces_are_sentencepieces).
        texts = [re.sub(r"([>\]]) +", r"\1", text) for text in texts]
    assert_same(theirs, ours, texts)


def test_leading_spaces_are_sentencepieces(spm, tmp_path):
    _, ours = configure(spm, tmp_path, **SLOW)
    model = sentencepiece.SentencePieceProcessor(model_file=str(spm / "tokenizer.model"))
    for text in [" the dog", "   the", "\n the", " "]:
        assert ours.encode(text, add_special_tokens=False) == model.encode(text)
        assert ours.decode(ours.encode(text)) == text
    # text after a special token gets no prefix
    ids = ours.encode("<|im|>the<|im|> the", add_special_tokens=False)
    assert ids.count(360) == 2
    assert ours.decode(ids, skip_special_tokens=False) == "<|im|>the<|im|> the"


def test_a_bare_tokenizer_model_has_its_own_special_tokens(spm):
    ours = Tokenizer.from_hf(spm)
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)
    assert ours.encode("</s>") == [1, 2]
    assert ours.encode("the")[0] == 1 and ours.encode("the", add_special_tokens=False)[0] != 1


def test_a_model_without_prefix_space_gets_none(tmp_path):
    """Gemma's tokenizer adds no prefix space."""
    train_sentencepiece(tmp_path, add_dummy_prefix=False)
    ours = Tokenizer.from_hf(tmp_path)
    for text in ["the dog", " the dog", "é  x"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids[0] != ours.token_to_id("▁the") or text[0] == " "
        assert ours.decode(ids) == text


def test_added_tokens_take_spaces_with_them_as_in_the_tokenizers_package(spm, tmp_path):
    token, text = "[X]", "x [X] x[X]\u3000\n[X][X] é[X]"
    for number, flag in enumerate(("lstrip", "rstrip", "single_word", "special")):
        (folder := tmp_path / flag).mkdir()
        config = {**SLOW, "added_tokens_decoder": added(360, token, **{flag: True})}
        _, ours = configure(spm, folder, **config)
        ids = ours.encode(text, add_special_tokens=False)
        wanted = "x[X] x[X][X][X] é[X]", "x [X]x[X][X][X]é[X]", text, text
        assert ours.decode(ids, False) == wanted[number], flag
        assert ids.count(360) == (3 if flag == "single_word" else 5)


def test_contradictions_about_ids_are_refused(spm, tmp_path, subtests):
    (tmp_path / "tokenizer.model").write_bytes((spm / "tokenizer.model").read_bytes())
    for decoder, older, message in (
        ({}, {"a1": 360, "b1": 360}, r"added_tokens.json: 'b1' has the id 360 of another token"),
        (added(360, "a1"), {"a1": 361}, r"'a1' is token 360, but among .*, 'a1' is 361"),
        (added(300, "a1"), {}, r"tokenizer.model: '.*' is token 300 .*, 'a1' is 300"),
        (added(360, "▁the"), {}, r"tokenizer.model: .*'▁the' is token \d+, .* '▁the' is 360"),
    ):
        config = {**SLOW, "added_tokens_decoder": decoder}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "added_tokens.json").write_text(json.dumps(older))
        with subtests.test(message), pytest.raises(CheckpointError, match=message):
            Tokenizer.from_hf(tmp_path)


def test_a_reserved_piece_may_get_another_text_and_an_empty_token_is_none(spm, tmp_path):
    config = {"added_tokens_decoder": added(1, "<|begin|>"), "bos_token": "<|begin|>"}
    _, ours = configure(spm, tmp_path, **config, eos_token="", pad_token="")
    assert ours.encode("<|begin|>") == [1, 1] and ours.token_to_id("<s>") is None
    assert ours.id_to_token(1) == "<|begin|>"
    assert (ours.eos_token_id, ours.pad_token_id, ours.vocab_size) == (2, None, 360)


def test_damaged_sentencepiece_files_are_named(spm, tmp_path, subtests):
    for name, content in (("tokenizer.model", b""), ("tokenizer.model", b"\xff" * 99)):
        (tmp_path / name).write_bytes(content)
        with subtests.test(content[:9]), pytest.raises(CheckpointError, match=name):
            Tokenizer.from_hf(tmp_path)
