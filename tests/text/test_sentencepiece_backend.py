"""tokenizer.model gives the tokens of sentencepiece and of transformers' tokenizers."""

import json
import random
import re
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers

from ligermodels.errors import CheckpointError
from ligermodels.text import Tokenizer
from ligermodels.text.sentencepiece_backend import SentencePieceBackend
from tests.text.folders import LINES, SLOW, TEXTS, added, assert_same, configure


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


def test_a_bare_tokenizer_model_has_its_own_special_tokens(spm, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((spm / "tokenizer.model").read_bytes())
    ours = Tokenizer.from_hf(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)
    assert ours.encode("</s>") == [1, 2]
    assert ours.encode("the")[0] == 1 and ours.encode("the", add_special_tokens=False)[0] != 1


def test_a_model_without_prefix_space_gets_none(tmp_path):
    """Gemma's tokenizer adds no prefix space."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    ours = Tokenizer.from_hf(tmp_path)
    for text in ["the dog", " the dog", "é  x"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids[0] != ours.token_to_id("▁the") or text[0] == " "
        assert ours.decode(ids) == text


@pytest.mark.parametrize("content", [" x", "\n", " ", "x ", "[X]"])
def test_added_tokens_are_split_off_as_the_tokenizers_package_does(spm, tmp_path, content):
    """Whatever the token consists of, and whatever spaces it takes with it."""
    draw = random.Random(content)
    for number in range(8):
        flags = {name: draw.random() < 0.5 for name in ("lstrip", "rstrip", "single_word")}
        folder = tmp_path / str(number)
        folder.mkdir()
        config = {**SLOW, "added_tokens_decoder": added(360, content, **flags)}
        _, ours = configure(spm, folder, **config)
        theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
        theirs.add_tokens([tokenizers.AddedToken(content, normalized=False, **flags)])
        for _ in range(20):
            text = "".join(draw.choices([" ", "\n", "x", "a", "\u3000", "é", content], k=7))
            ids = ours.encode(text, add_special_tokens=False)
            assert ids.count(360) == theirs.encode(text).ids.count(1), (text, flags)


def test_contradictions_about_ids_are_refused(spm, tmp_path, subtests):
    for number, (decoder, older, message) in enumerate(
        (
            ({}, {"a1": 360, "b1": 360}, r"added_tokens.json: 'b1' is 360, but 'a1' has the same"),
            ({}, {"a1": -1}, r"added_tokens.json: 'a1' is -1, expected an id from 0"),
            ({}, {"a1": 2**31}, r"added_tokens.json: 'a1' is 2147483648, expected an id"),
            ({}, {"\ud800": 360}, r"added_tokens.json: '\\ud800' is not valid Unicode"),
            (added(360, "a1"), {"b1": 360}, r"added_tokens.json: 'b1' is 360, but 'a1' has the"),
            (added(360, "a1"), {"a1": 361}, r"added_tokens.json: 'a1' is 361, but added_tokens_d"),
            (added(300, "a1"), {}, r"tokenizer.model: token 300 is '.*' there, but .* 'a1'"),
            (added(360, "▁the"), {}, r"tokenizer.model: '▁the' is token \d+ there, .* it is 360"),
        )
    ):
        with subtests.test(message):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "tokenizer.model").write_bytes((spm / "tokenizer.model").read_bytes())
            config = {**SLOW, "added_tokens_decoder": decoder}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            (folder / "added_tokens.json").write_text(json.dumps(older))
            with pytest.raises(CheckpointError, match=message):
                Tokenizer.from_hf(folder)


def test_a_reserved_piece_may_get_another_text(spm, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((spm / "tokenizer.model").read_bytes())
    config = {"added_tokens_decoder": added(1, "<|begin|>"), "bos_token": "<|begin|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_hf(tmp_path)
    assert ours.encode("<|begin|>") == [1, 1] and ours.token_to_id("<s>") is None
    assert ours.id_to_token(1) == "<|begin|>"


def test_an_empty_special_token_is_none(spm, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((spm / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "", "pad_token": ""}')
    ours = Tokenizer.from_hf(tmp_path)
    assert (ours.bos_token_id, ours.pad_token_id, ours.vocab_size) == (1, None, 360)


def test_damaged_sentencepiece_files_are_named(spm, tmp_path, subtests):
    for name, content in (
        ("tokenizer.model", b""),
        ("tokenizer.model", b"\xff" * 99),
        ("added_tokens.json", b'{"a": 1.5}'),
    ):
        with subtests.test(f"{name}: {content[:9]!r}"):
            (tmp_path / "tokenizer.model").write_bytes((spm / "tokenizer.model").read_bytes())
            (tmp_path / name).write_bytes(content)
            with pytest.raises(CheckpointError) as caught:
                Tokenizer.from_hf(tmp_path)
            assert str(caught.value).startswith(f"{tmp_path / name}: ")


def test_a_fault_of_the_package_names_the_file():
    def encode(fault):
        def raises(text):
            raise fault

        backend = SimpleNamespace(path="a/tokenizer.model")
        return SentencePieceBackend._pieces(backend, SimpleNamespace(encode=raises), "text")

    with pytest.raises(CheckpointError, match=r"^a/tokenizer.model: .*: no piece$"):
        encode(RuntimeError("no piece\nat all"))
    with pytest.raises(MemoryError):
        encode(MemoryError())
