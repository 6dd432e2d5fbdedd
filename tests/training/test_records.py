"""Files of preferences, judged completions and prompts, beside how TRL prepares them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ligermodels.errors import DataError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import read_documents, read_judged, read_pairs, read_prompts
from ligermodels.training.packing import hold_out
from tests.training.tiny_run import TEMPLATE, make_tokenizer

ASK = [{"role": "user", "content": "hi"}]


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_tokenizer(tmp_path)
    return Tokenizer.from_hf(tmp_path)


def jsonl(folder: Path, *records: object) -> list[Path]:
    file = folder / "data.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))
    return [file]


def texts(tokenizer: Tokenizer, document) -> tuple[str, str]:
    """Return the prompt and the completion of a document."""
    ids, mask = document.ids, document.loss_mask
    assert np.array_equal(np.sort(mask), mask)  # the completion is the end
    prompt, completion = ids[~mask], ids[mask]
    return tuple(tokenizer.decode(x, skip_special_tokens=False) for x in (prompt, completion))


def test_forms_of_pairs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = jsonl(
        tmp_path,
        {"prompt": "ab", "chosen": " c", "rejected": "", "score": 2},
        {"prompt": ASK, "chosen": says("yes"), "rejected": says("no")},
        {"chosen": ASK + says("yes"), "rejected": ASK + says("no")},
    )
    first, second, third = read_pairs(files, tokenizer)
    found = [texts(tokenizer, document) for document in first.documents]
    assert found == [("ab", " c</s>"), ("ab", "</s>")]
    assert first.record["score"] == 2
    found = [texts(tokenizer, document) for document in second.documents]
    assert found == [("<|user|>hi</s><|assistant|>", f"{x}</s>") for x in ("yes", "no")]
    for one, other in zip(second.documents, third.documents):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.loss_mask, other.loss_mask)


def test_conversations_are_what_trl_makes_of_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("trl", exc_type=ImportError)
    from transformers import PreTrainedTokenizerFast
    from trl.data_utils import apply_chat_template, maybe_extract_prompt

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = TEMPLATE
    start = [{"role": "system", "content": "be kind"}, *ASK, *says("hello"), *ASK]
    record = {"chosen": start + says("yes"), "rejected": start + says("no")}
    # Many data sets repeat the last question. The template does not read what it does not know.
    for more in ({}, {"prompt": "hi"}, {"tools": [{"name": "x"}]}):
        (group,) = read_pairs(jsonl(tmp_path, record | more), tokenizer)
        made = apply_chat_template(maybe_extract_prompt(record | more), theirs)
        for document, key in zip(group.documents, ("chosen", "rejected")):
            assert texts(tokenizer, document) == (made["prompt"], made[key])


def test_tools_and_variables_reach_the_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tools, more = [{"name": "clock"}], {"mood": "calm"}
    own = "{{ mood }}{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
    tokenizer.chat_template = own + TEMPLATE.replace("['content']", ".content or ''")
    call = {"role": "assistant", "tool_calls": [{"name": "clock"}], "content": None}
    given = {"tools": tools, "chat_template_kwargs": more}
    record = {"prompt": ASK, "chosen": [call, *says("yes")], "rejected": says("no")}
    (group,) = read_pairs(jsonl(tmp_path, record | given), tokenizer)
    start = "calm[clock]<|user|>hi</s><|assistant|>"
    pair = [texts(tokenizer, document) for document in group.documents]
    assert pair == [(start, "</s><|assistant|>yes</s>"), (start, "no</s>")]
    judged = {"prompt": ASK, "completion": says("no"), "label": True}
    for tools in (given["tools"], json.dumps(given["tools"])):
        groups = read_judged(jsonl(tmp_path, *[judged | given | {"tools": tools}] * 2), tokenizer)
        assert texts(tokenizer, groups[0].documents[0]) == (start, "no</s>")
    (group,) = read_prompts(jsonl(tmp_path, {"prompt": ASK, **given}), tokenizer)
    assert texts(tokenizer, group.documents[0])[0] == start
    (document,) = read_documents(
        jsonl(tmp_path, {"messages": ASK + says("no"), **given}), tokenizer
    )
    assert tokenizer.decode(document.ids, skip_special_tokens=False) == start + "no</s>"
    for none in ({"tools": None, "chat_template_kwargs": None}, {"tools": "", "x": 1}):
        (group,) = read_pairs(jsonl(tmp_path, record | none), tokenizer)
        assert texts(tokenizer, group.documents[1])[0] == start.removeprefix("calm[clock]")
    for wrong, fault in (
        ({"tools": "clock"}, '"tools": this is not JSON'),
        ({"tools": ["clock"]}, '"tools" must be a list of objects'),
        ({"chat_template_kwargs": [1]}, '"chat_template_kwargs" must be an object, found a list'),
        ({"tools": [{"name": "\ud800"}]}, r"\.jsonl:1: a text holds half a"),
    ):
        with pytest.raises(DataError, match=fault):
            read_pairs(jsonl(tmp_path, record | wrong), tokenizer)


def test_judged_completions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = jsonl(
        tmp_path,
        {"prompt": "a", "completion": "1", "label": True},
        {"prompt": "b", "chosen": "2", "rejected": "3"},
    )
    groups = read_judged(files, tokenizer)
    assert [group.label for group in groups] == [True, True, False]
    found = [[texts(tokenizer, document) for document in group.documents] for group in groups]
    assert found == [
        [("a", "1</s>"), ("a", "2</s>")],
        [("b", "2</s>"), ("b", "1</s>")],  # not the other completion of its own prompt
        [("b", "3</s>"), ("b", "1</s>")],
    ]
    pairs = [{"prompt": p, "chosen": p + "1", "rejected": p + "2"} for p in "aba"]
    groups = read_judged(jsonl(tmp_path, *pairs), tokenizer)
    others = [texts(tokenizer, group.documents[1])[1] for group in groups]
    assert others == ["b1</s>", "b1</s>", "a1</s>", "a1</s>", "b1</s>", "b1</s>"]
    groups = read_judged(jsonl(tmp_path, pairs[0]), tokenizer)  # there is no other prompt
    assert [texts(tokenizer, group.documents[1])[1] for group in groups] == ["a2</s>", "a1</s>"]
    with pytest.raises(DataError, match="at least two examples"):
        read_judged(jsonl(tmp_path, {"prompt": "a", "completion": "1", "label": True}), tokenizer)


def test_both_completions_of_a_pair_are_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pairs = [{"prompt": str(i), "chosen": "a", "rejected": "b"} for i in range(8)]
    train, held = hold_out(read_judged(jsonl(tmp_path, *pairs), tokenizer), 0.25, 0)
    prompts = [{group.record["prompt"] for group in part} for part in (train, held)]
    assert len(train) == 12 and len(held) == 4 and not prompts[0] & prompts[1]


def test_prompts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = jsonl(tmp_path, {"prompt": "ab", "answer": 4}, {"prompt": ASK})
    groups = read_prompts(files, tokenizer)
    assert [texts(tokenizer, group.documents[0])[0] for group in groups] == [
        "ab",
        "<|user|>hi</s><|assistant|>",
    ]
    assert groups[0].record["answer"] == 4 and groups[0].documents[0].num_targets == 0


def test_what_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for record, fault in (
        ([1], "expected an object"),
        ({"prompt": "a", "chosen": "b"}, '"rejected" is missing'),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, '"rejected" must be a string'),
        ({"prompt": ASK, "chosen": "b", "rejected": "c"}, "write both as one of the two"),
        ({"chosen": "b", "rejected": "c"}, '"prompt" is missing'),
        ({"chosen": says("b"), "rejected": says("c")}, "no common beginning"),
        ({"prompt": [], "chosen": says("b"), "rejected": says("c")}, "at least one message"),
        ({"prompt": [3], "chosen": says("b"), "rejected": says("c")}, "must be an object"),
    ):
        with pytest.raises(DataError, match=f"data.jsonl:1: .*{fault}"):
            read_pairs(jsonl(tmp_path, record), tokenizer)
    with pytest.raises(DataError, match='"label" must be true or false'):
        read_judged(jsonl(tmp_path, {"prompt": "a", "completion": "b", "label": 1}), tokenizer)
    with pytest.raises(DataError, match="the prompt is empty"):
        read_prompts(jsonl(tmp_path, {"prompt": ""}), tokenizer)
    text = tmp_path / "data.txt"
    text.write_text("words")
    with pytest.raises(DataError, match=r"expected a \.jsonl file"):
        read_pairs([text], tokenizer)
    (tmp_path / "data.jsonl").write_text("\n")
    with pytest.raises(DataError, match="there is no record"):
        read_pairs([tmp_path / "data.jsonl"], tokenizer)
