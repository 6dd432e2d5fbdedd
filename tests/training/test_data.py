"""Text and JSONL files: the documents and targets they become, and the refused ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ligermodels.errors import DataError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import (
    _dataset,
    local_files,
    normalised,
    read_documents,
    read_judged,
    read_pairs,
    read_prompts,
    split_text,
)
from ligermodels.training.packing import hold_out
from tests.training.tiny_run import TEMPLATE, make_tokenizer

BOS, EOS = 1, 2


class Letters:
    """A tokenizer whose tokens are characters, with ids from 10 and a template with turn ends."""

    eos_token_id = EOS

    def encode(self, text, add_special_tokens=True):
        ids = [EOS if c == "$" else ord(c) + 10 for c in text]
        return [BOS, *ids] if add_special_tokens else ids

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True):
        text = "".join(f"<{m['role'][0]}>{m['content']}$" for m in messages)
        return text + ("<a>" if add_generation_prompt else "")


class Pairs(Letters):
    """A tokenizer that merges "ab" into one token, across the boundary of two texts."""

    def encode(self, text, add_special_tokens=True):
        ids = super().encode(text.replace("ab", "\x00"), False)
        return [BOS, *ids] if add_special_tokens else ids


def plain(document):
    """Return a Letters document's text, and the same with a dot for each ignored token."""
    names = {BOS: "^", EOS: "$"}
    text = [names.get(int(i)) or chr(int(i) - 10) for i in document.ids]
    return "".join(text), "".join(c if t else "." for c, t in zip(text, document.loss_mask))


def write(folder, name, *lines):
    file = folder / name
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return file


def test_a_text_file_is_one_document_with_its_ends(tmp_path):
    file = write(tmp_path, "a.txt", "one", "", "two")
    (document,) = read_documents([file], Letters())
    assert plain(document) == ("^one\n\ntwo$", ".one\n\ntwo$")
    assert document.divisible


def test_separators_make_documents():
    lines = ["one", "two", "%", "", "%", "  three", ""]
    assert [*split_text(lines, "%")] == ["one\ntwo", "  three"]
    assert [*split_text(["a", "b", "", "", " ", "c"], "")] == ["a\nb", "c"]
    assert [*split_text([" ", ""], None)] == []


def test_the_order_is_that_of_the_files(tmp_path):
    files = [
        write(tmp_path, "b.txt", "b"),
        write(tmp_path, "a.jsonl", {"text": "a"}, "", {"text": "c"}),
    ]
    assert [plain(d)[0] for d in read_documents(files, Letters())] == ["^b$", "^a$", "^c$"]


def test_windows_line_ends_and_byte_order_marks_are_removed(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert plain(read_documents([file], Letters())[0])[0] == "^one\ntwo$"
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n')
    assert plain(read_documents([lines], Letters())[0])[0] == "^a$"


def test_only_the_completion_is_learnt(tmp_path):
    file = write(tmp_path, "a.jsonl", {"prompt": "2+2=", "completion": "4"})
    (document,) = read_documents([file], Letters())
    assert plain(document) == ("^2+2=4$", ".....4$")
    assert not document.divisible


def test_a_prompt_that_would_merge_with_its_completion_keeps_its_own_tokens(tmp_path):
    file = write(tmp_path, "a.jsonl", {"prompt": "xa", "completion": "by"})
    (document,) = read_documents([file], Pairs())
    assert plain(document) == ("^xaby$", "...by$")


def test_a_completion_that_does_not_merge_is_encoded_as_one_text(tmp_path):
    file = write(tmp_path, "a.jsonl", {"prompt": "x", "completion": "aby"})
    (document,) = read_documents([file], Pairs())
    assert plain(document) == ("^x\x00y$", "..\x00y$")


def test_only_the_assistants_turns_are_learnt(tmp_path):
    turns = [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "hi"),
        ("user", "r"),
        ("assistant", "yo"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    for more in ({}, {"prompt": "q"}):  # many data sets repeat the first question
        file = write(tmp_path, "a.jsonl", {"messages": messages} | more)
        (document,) = read_documents([file], Letters())
        assert plain(document) == (
            "<s>s$<u>q$<a>hi$<u>r$<a>yo$",
            ".............hi$........yo$",
        )


def test_a_completion_may_be_messages(tmp_path):
    """All of them are learnt, as TRL's SFTTrainer does."""
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    turns = [("assistant", "hi"), ("user", "r"), ("assistant", "yo")]
    completion = [{"role": role, "content": content} for role, content in turns]
    file = write(tmp_path, "a.jsonl", {"prompt": prompt, "completion": completion})
    (document,) = read_documents([file], Letters())
    assert plain(document) == (
        "<s>s$<u>q$<a>hi$<u>r$<a>yo$",
        ".............hi$<u>r$<a>yo$",
    )
    assert not document.divisible


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    class Forgetful(Letters):
        def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True):
            last = len(messages) - 1
            shown = [
                {**m, "content": m["content"] if i == last or m["role"] == "user" else ""}
                for i, m in enumerate(messages)
            ]
            return super().apply_chat_template(shown, add_generation_prompt, tokenize)

    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file = write(tmp_path, "a.jsonl", {"messages": turn}, {"messages": turn + turn})
    with pytest.raises(DataError, match=r"a\.jsonl:2: the chat template renders message 2"):
        read_documents([file], Forgetful())

    class Another(Letters):  # another beginning of the text where an answer is asked for
        def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True):
            rendered = super().apply_chat_template(messages, add_generation_prompt, tokenize)
            return "!" + rendered if add_generation_prompt else rendered

    file = write(tmp_path, "b.jsonl", {"prompt": turn[:1], "completion": turn[1:]})
    with pytest.raises(DataError, match=r"b\.jsonl:1: the chat template renders message 2 diff"):
        read_documents([file], Another())


def test_a_template_that_fails_is_named_with_the_line(tmp_path):
    class NoTemplate(Letters):
        def apply_chat_template(self, *args, **kwargs):
            raise ValueError("no chat template\nin this folder")

    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    file = write(tmp_path, "a.jsonl", {"messages": messages})
    with pytest.raises(DataError) as error:
        read_documents([file], NoTemplate())
    assert str(error.value) == f"{file}:1: the chat template fails: no chat template"


def test_an_end_token_that_the_tokenizer_adds_is_not_doubled(tmp_path):
    class Ends(Letters):
        def encode(self, text, add_special_tokens=True):
            ids = super().encode(text, add_special_tokens)
            return [*ids, EOS] if add_special_tokens else ids

    file = write(tmp_path, "a.jsonl", {"text": "t"}, {"prompt": "p", "completion": "c"})
    assert [plain(d)[0] for d in read_documents([file], Ends())] == ["^t$", "^pc$"]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "a"', "this is not JSON: Expecting ',' delimiter: line 1 column 13"),
        ("[1]", "expected an object, found a list"),
        ({}, "found no keys"),
        ({"text": None, "b": 1}, "found 'text' (null), 'b'"),
        ({"text": "a", "prompt": "b"}, 'expected one of the keys "text"'),
        ({"text": 3}, '"text" must be a string, found a number'),
        ({"prompt": "a"}, '"completion" is missing'),
        ({"prompt": "a", "completion": [{"role": "a", "content": ""}]}, "is a string, the other"),
        ({"messages": []}, '"messages" must be a list'),
        ({"messages": ["hello"]}, "a message must be an object, found a string"),
        ({"messages": [{"role": "user"}]}, '"content" is missing'),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "begins with a turn of the"),
        ({"messages": [{"role": "gpt", "content": "b"}]}, "its roles are 'gpt'; name the turns"),
        ('{"text": "a", "meta": {"x": 1, "x": 2}}', "key 'x' appears twice"),
        ("[" * 100_000, "this is not JSON: maximum recursion depth"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, line, message):
    file = write(tmp_path, "bad.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(DataError) as error:
        read_documents([file], Letters())
    assert str(error.value).startswith(f"{file}:3: ")
    assert message in str(error.value)


def test_a_json_file_is_a_list_or_lines(tmp_path):
    records = [{"text": "a"}, {"prompt": "b", "completion": "c"}]
    lines = write(tmp_path, "lines.json", *records)
    whole = tmp_path / "list.json"
    whole.write_text(json.dumps(records, indent=1))
    for file in (lines, whole):
        found = [plain(document)[0] for document in read_documents([file], Letters())]
        assert found == ["^a$", "^bc$"]


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("a.txt", b"fine\n\xff", "a.txt:2: the line is not UTF-8 text"),
        ("a.txt", "fine".encode("utf-16-le"), "a.txt:1: the line holds NUL characters"),
        ("a.json", b'[{"text": "a"},\n{"text" 1}]', "a.json: this is not JSON: .*: line 2 col"),
        ("a.json", b'[{"text": "a"}, 1]', "a.json: object 2: expected an object, found a number"),
        ("a.parquet", b"PAR1", "this is a table"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_documents([tmp_path / name], Letters())


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_other_records_stay_as_they_are():
    for record in ({"text": "a"}, {"prompt": "a", "instruction": "b"}, {"messages": [], "x": 1}):
        assert normalised(record, has_template=True) is record


def test_sharegpt():
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a", "weight": 1},
        {"role": "user", "content": "r"},
    ]
    found = normalised({"id": 1, "conversations": turns}, has_template=True)
    assert found == messages(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"))
    apart = normalised({"conversations": turns[1:3], "system": "s"}, has_template=True)
    assert apart == messages(("system", "s"), ("user", "q"), ("assistant", "a"))


def test_alpaca_with_a_chat_template():
    record = {"instruction": "i", "input": "x", "output": "o"}
    found = normalised(record, has_template=True)
    assert found == messages(("user", "i\n\nx"), ("assistant", "o"))
    longer = {**record, "input": "", "system": "s", "history": [["a", "b"]]}
    assert normalised(longer, has_template=True) == messages(
        ("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "i"), ("assistant", "o")
    )


def test_alpaca_without_a_chat_template_has_the_prompt_of_alpaca():
    found = normalised({"instruction": "i", "output": "o"}, has_template=False)
    assert found["completion"] == "o"
    assert found["prompt"].endswith("request.\n\n### Instruction:\ni\n\n### Response:\n")
    found = normalised({"instruction": "i", "input": "x", "output": "o"}, has_template=False)
    assert found["prompt"].endswith("### Instruction:\ni\n\n### Input:\nx\n\n### Response:\n")


def test_parts_that_make_no_sense_are_refused(subtests):
    alpaca = {"instruction": "i", "output": "o"}
    for record, message in (
        ({"conversations": "a"}, '"conversations" must be a list'),
        (
            {"conversations": [{"from": ["human"], "value": "a"}]},
            r'"from": \[.human.\] is not known',
        ),
        ({"conversations": [{"from": "tool", "value": "a"}]}, """"from": 'tool' is not known"""),
        ({**alpaca, "instruction": 3}, '"instruction" must be a string'),
        ({**alpaca, "history": ["a"]}, '"history" must be a list of pairs'),
    ):
        with subtests.test(message), pytest.raises(DataError, match=message):
            normalised(record, has_template=True)
    with pytest.raises(DataError, match='"history" needs a chat template'):
        normalised({**alpaca, "history": [["a", "b"]]}, has_template=False)


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
        ({"tools": [{"name": "\ud800"}]}, r"\.jsonl:1: the text is not valid Unicode"),
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


def test_the_names_of_data_sets(tmp_path, monkeypatch):
    assert _dataset("tatsu-lab/alpaca") == ("tatsu-lab/alpaca", None, "train")
    assert _dataset("a/b:test[:1%]") == ("a/b", None, "test[:1%]")
    assert _dataset("a/b:main:train[10:20]") == ("a/b", "main", "train[10:20]")
    for name in ("alpaca", "data/a.txt", "a/b/c", "/a/b", "a/b:"):
        assert _dataset(name) is None
    monkeypatch.chdir(tmp_path)
    assert _dataset("a/b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_text("a text")
    assert not _dataset("a/b") and str(local_files(["a/b"])[0]) == "a/b"


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"none\.txt: the file is missing"):
        local_files([str(tmp_path / "none.txt")])
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "ligermodels.integrations.hub_data", raising=False)
    monkeypatch.delattr("ligermodels.integrations.hub_data", raising=False)
    with pytest.raises(DataError, match=r"no/such: this needs the library datasets.*pip install"):
        local_files(["no/such"])
