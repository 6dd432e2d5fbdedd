"""Text and JSONL files: the documents and targets they become, and the refused ones."""

from __future__ import annotations

import json

import pytest

from ligermodels.errors import DataError
from ligermodels.training.data import read_documents, split_text

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
        ('{"text": "\\ud800"}', "half a surrogate pair"),
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


def test_records_of_other_tools_are_read(tmp_path):
    file = write(
        tmp_path,
        "a.jsonl",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"instruction": "do", "input": "", "output": "x"},
    )
    chat, alpaca = map(plain, read_documents([file], Letters()))
    assert chat == ("<u>q$<a>a$", "........a$")
    assert alpaca[0].endswith("### Response:\nx$") and alpaca[1].strip(".") == "x$"


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("a.txt", b"fine\n\xff", "a.txt:2: the line is not UTF-8 text"),
        ("a.txt", b"a\nb\0b", "a.txt:2: the line holds NUL characters"),
        ("a.txt", b" \n", "there is no text"),
        ("a.json", b"[]", "there is no text"),
        ("a.json", b'[{"text": "a"},\n{"text" 1}]', "a.json: this is not JSON: .*: line 2 col"),
        ("a.json", b'[{"text": "a"}, 1]', "a.json: object 2: expected an object, found a number"),
        ("a.parquet", b"PAR1", ".parquet files are not supported"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_documents([tmp_path / name], Letters())
