"""Files whose steps could make a text so long that the memory is exhausted are refused."""

import base64
import json

import pytest
import sentencepiece

from ligermodels.errors import CheckpointError
from ligermodels.text import Tokenizer, growth
from ligermodels.text.growth import growth_of, growth_of_charsmap, growth_of_model
from tests.text.folders import LINES


def replace(found, put, kind="String"):
    return {"type": "Replace", "pattern": {kind: found}, "content": put}


def sequence(*steps, kind="normalizers"):
    return {"type": "Sequence", kind: list(steps)}


def test_growth_is_a_bound():
    import tokenizers

    text = "aab\u0130\ufdfa é"
    for step, bound in (
        (None, 1),
        (replace("a", "bcd"), 3),
        (replace("aa", "bcd"), 1.5),
        (replace("aab", ""), 1),
        (replace("", "x"), 3),
        (replace("a*", "xy", "Regex"), 5),
        ({"type": "Prepend", "prepend": "xyz"}, 4),
        ({"type": "NFKC"}, 18),
        ({"type": "Lowercase"}, 3),
        (sequence(replace("a", "aa"), replace("a", "aa"), {"type": "NFD"}), 16),
    ):
        assert growth_of(step) == bound
        if step:
            made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(normalizer=step)))
            assert len(made.normalizer.normalize_str(text)) <= bound * len(text)
            for odd in ({}, {"type": {}}, {"type": "?"}):  # the library goes by the other keys
                named = step["type"] in ("NFKC", "Lowercase")
                assert growth_of({**step, "type": None} | odd) == (1 if named else bound)
    processor = {"type": "TemplateProcessing", "single": [{}] * 7}
    assert growth_of(sequence(processor, processor, kind="processors")) == 49


def tokenizer_json(**steps):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return {"version": "1.0", "added_tokens": [], "model": model, **steps}


def table_of(replacement):
    return (4).to_bytes(4, "little") + bytes(4) + b"x\0" + replacement + b"\0"


def test_bombs_are_refused_and_long_texts_that_would_grow_too(tmp_path):
    file = tmp_path / "tokenizer.json"
    doubling = [replace("a", "aa")] * 40
    table = base64.b64encode(table_of(b"y" * 20_000)).decode()
    for steps, step in (
        ({"normalizer": sequence(*doubling)}, "normalizer"),
        ({"normalizer": replace("a", "b" * 20_000)}, "normalizer"),
        ({"decoder": sequence(*doubling, kind="decoders")}, "decoder"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": table}}, "tokenizer.json"),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 20_000,
                    "pair": [],
                    "special_tokens": {},
                }
            },
            "post_processor",
        ),
    ):
        file.write_text(json.dumps(tokenizer_json(**steps)))
        with pytest.raises(CheckpointError, match=step):
            Tokenizer.from_hf(tmp_path)
    file.write_text(json.dumps(tokenizer_json(normalizer=sequence(*doubling[:12]))))
    ours = Tokenizer.from_hf(tmp_path)
    assert ours.encode("aa") == [0]
    with pytest.raises(CheckpointError, match=r"the text has 100,000 characters, .* shorter parts"):
        ours.encode("a" * 100_000)


def test_the_table_of_a_sentencepiece_model_is_found(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="nfkc",
        minloglevel=2,
    )
    raw = (tmp_path / "tokenizer.model").read_bytes()
    assert growth_of_model(raw) == 33  # of \ufdfa, in bytes
    assert growth_of_model(raw[: raw.index(b"nfkc") - 40]) == 1
    assert growth_of_charsmap(table_of(b"y" * 300)) == 300
    assert growth_of_charsmap(b"") == 1
    assert len(Tokenizer.from_hf(tmp_path).encode("\ufdfa", add_special_tokens=False)) > 10


def test_fields_of_a_message_are_found_between_others():
    """A number, 8 bytes, 4 bytes and two texts; the field 3 is asked for."""
    others = b"\x08\x96\x01" + b"\x11" + bytes(8) + b"\x25" + b"\x1a\x01x\0"
    assert growth._fields(others + b"\x1a\x03abc" + b"\x2a\x01y", 3) == [b"abc"]
    assert growth._fields(b"\x1a\x63abc", 3) == [b"abc"]  # cut off
    assert growth._fields(b"\xff" * 40, 3) == []  # no number has so many bytes


def test_what_no_library_reads_does_not_grow():
    assert growth_of({"type": "Precompiled", "precompiled_charsmap": "a"}) == 1
    assert growth_of({"type": "TemplateProcessing", "single": [{}, {}, {}]}) == 3
