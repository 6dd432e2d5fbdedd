"""Calls of a tokenizer, and its save, beside transformers'."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from transformers import AutoTokenizer

from ligermodels import Tokenizer
from tests.text.folders import CONFIG, TEXTS, configure
from tests.tiny_models import random_model

# Tokens before and after a text, and both sides of padding.
KINDS = {
    "bpe": CONFIG | {"pad_token": "<|im|>", "padding_side": "left", "truncation_side": "left"},
    "metaspace": CONFIG | {"pad_token": "</s>", "model_max_length": 7},
}


@pytest.fixture(params=KINDS)
def both(request, tmp_path):
    return configure(request.getfixturevalue(request.param), tmp_path, **KINDS[request.param])


def test_a_call_equals_transformers(both):
    theirs, ours = both
    grid = itertools.product(
        (True, False), (False, True, "max_length"), (False, True), (None, 5), ("left", None), TEXTS
    )
    for special, padding, truncation, length, side, text in grid:
        if (length is None) != (not truncation and padding != "max_length"):
            continue
        given = {"add_special_tokens": special, "padding": padding, "truncation": truncation}
        given |= {"max_length": length, "padding_side": side}
        for texts in (text, [text, *TEXTS[:3]]):
            expected = theirs(texts, **given)
            found = ours(texts, **given)
            assert found.keys() <= expected.keys(), given
            assert all(found[name] == expected[name] for name in found), (given, texts)


def test_tensors_go_into_a_model(both):
    theirs, ours = both
    given = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    expected, found = theirs(TEXTS[:3], **given), ours(TEXTS[:3], **given).to("cpu")
    assert found.input_ids.equal(expected.input_ids) and found.input_ids.dtype == torch.int64
    assert found.attention_mask.equal(expected.attention_mask)
    assert ours("the dog", return_tensors="pt").input_ids.shape[0] == 1
    model = random_model("llama", vocab_size=len(ours))
    new = model.generate(**found, max_new_tokens=2)
    kept = [row[mask.bool()] for row, mask in zip(found.input_ids, found.attention_mask)]
    assert new.equal(model.generate(kept, max_new_tokens=2, pad_token_id=ours.pad_token_id))
    assert ours.batch_decode(new) == [ours.decode(row) for row in new]


def test_calls_that_cannot_be_are_refused(both, subtests):
    _, ours = both
    for given, said in (
        ({"padding": "right"}, "padding='right'"),
        ({"return_tensors": "np"}, "return_tensors='np'"),
        ({"padding_side": "lft"}, "padding_side='lft'"),
        ({"truncation": "do_not_truncate"}, "truncation='do_not_truncate'"),
        ({"max_length": 0, "truncation": True}, "max_length=0: expected a number"),
        ({"max_length": 4}, "has no effect; pass truncation=True"),
        ({"max_length": 1, "truncation": True}, "no room for a text"),
        ({"return_tensors": "pt"}, "pass padding=True"),
    ):
        with subtests.test(said), pytest.raises(ValueError, match=said):
            ours(["the dog", "a sea in the town"], **given)
    with pytest.raises(AttributeError, match="an encoding has no 'labels'; it has input_ids, att"):
        _ = ours("a").labels


def test_a_padding_token_may_be_chosen(bpe, tmp_path):
    _, ours = configure(bpe, tmp_path, **CONFIG)
    with pytest.raises(ValueError, match=r"no pad_token; .* tokenizer.pad_token = tokenizer.eos"):
        ours(["a", "the dog"], padding=True)
    with pytest.raises(ValueError, match="model_max_length"):
        ours("a", truncation=True)
    ours.pad_token = ours.eos_token
    assert ours(["a", "the dog"], padding=True).input_ids[0][-1] == ours.eos_token_id
    assert ours.pad_token_id == ours.eos_token_id and ours.unk_token is None
    with pytest.raises(ValueError, match="pad_token: '<none>' is no token of this tokenizer"):
        ours.pad_token = "<none>"


def test_a_save_holds_the_files_and_what_was_changed(both, tmp_path):
    _, ours = both
    out = tmp_path / "out"
    random_model("llama").save_hf(out)
    (out / "tokenizer.model").write_bytes(b"of another tokenizer")
    model = (out / "model.safetensors").read_bytes(), (out / "config.json").read_bytes()
    ours.save_hf(out)
    for name, content in ours.source_files.items():
        assert (out / name).read_bytes() == content == (tmp_path / name).read_bytes()
    assert {p.name for p in out.glob("token*")} == ours.source_files.keys()
    assert ((out / "model.safetensors").read_bytes(), (out / "config.json").read_bytes()) == model
    ours.pad_token, ours.chat_template = ours.bos_token, "{{ messages[0].content }}"
    ours.save_pretrained(out)
    talk = [{"role": "user", "content": "the dog"}]
    for read in (Tokenizer.from_hf(out), AutoTokenizer.from_pretrained(out)):
        assert read.pad_token == "<s>" and read("the dog")["input_ids"] == ours("the dog").input_ids
        assert read.apply_chat_template(talk, tokenize=False) == "the dog"
    for template in ({"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}, None):
        ours.chat_template, ours.pad_token = template, template and "<s>"
        ours.save_hf(out)
        again, theirs = Tokenizer.from_hf(out), AutoTokenizer.from_pretrained(out)
        assert again.chat_template == theirs.chat_template == template
        assert again.pad_token == theirs.pad_token == ours.pad_token
        if template is not None:  # A change in place is a change.
            again.chat_template["tool_use"] = "{{ 3 }}"
            again.save_hf(out)
            assert Tokenizer.from_hf(out).chat_template == again.chat_template
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
