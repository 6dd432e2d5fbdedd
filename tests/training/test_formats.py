"""ShareGPT and Alpaca records become messages, or a prompt and its completion."""

from __future__ import annotations

import pytest

from ligermodels.errors import DataError
from ligermodels.training.data import normalised


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
