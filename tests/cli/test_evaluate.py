"""`ligermodels evaluate`: files, tasks, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from ligermodels.training.evaluate import is_right
from tests.cli.helpers import assert_one_line

SMALL = ["--seq-len", "64", "--device", "cpu"]


def test_files_are_measured_one_by_one_and_together(call, checkpoint, text, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    code, out, _ = call("evaluate", checkpoint, "--files", text, other, *SMALL, "--separator", "")
    assert code == 0
    first, second, both = out.splitlines()
    assert first.startswith(text) and "perplexity " in first and "loss 5." in first
    assert second.startswith(str(other)) and second.endswith("2 targets")
    counts = [int(line.split()[-2].replace(",", "")) for line in out.splitlines()]
    assert both.startswith("all files ") and counts[2] == counts[0] + counts[1]
    code, out, _ = call("evaluate", checkpoint, "--files", text, *SMALL, "--json")
    found = json.loads(out)["files"]
    assert list(found) == [text] and 0 < found[text]["targets"] < found[text]["tokens"]
    other.write_text(json.dumps({"prompt": "a" * 60, "completion": "b" * 40}) + "\n")
    code, out, _ = call("evaluate", checkpoint, "--files", other, *SMALL)
    assert code == 0 and out.endswith(" 4 targets  (long examples cut: 1)\n")
    other.write_text(json.dumps({"prompt": "a" * 99, "completion": "b"}) + "\n")
    assert_one_line(call("evaluate", checkpoint, "--files", other, *SMALL), f"{other}: no document")
    other.write_text("")
    assert_one_line(call("evaluate", checkpoint, "--files", other, *SMALL), f"{other}: there is no")


def test_answers_are_compared_with_references(call, checkpoint, tmp_path):
    """The references are made from what the model generates."""
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = ["the cat", "a dog", "I run"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    generate = ["generate", checkpoint, "--input", prompts, "--output", answers]
    limits = ["--max-new-tokens", "6", "--device", "cpu"]
    assert call(*generate, *limits)[0] == 0
    made = [json.loads(line)["generated"] for line in answers.read_text().splitlines()]
    ask, chat = [{"role": "user", "content": "hi"}], tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [*ask, {"role": "assistant", "content": "no"}]}))
    files = tmp_path / "questions.jsonl"
    references = [f" {made[0]}\n", ["no", made[1]], 12]
    records = [{"prompt": a, "completion": b} for a, b in zip(texts, references)]
    files.write_text("".join(json.dumps(record) + "\n" for record in records))
    output = tmp_path / "found.jsonl"
    command = ["evaluate", checkpoint, "--files", files, chat, "--generate", *limits]
    code, out, err = call(*command, "--output", output)
    assert (code, err) == (0, "")
    first, second = (line.split(maxsplit=1) for line in out.splitlines())
    assert first == [str(files), "exact match 0.6667  2 of 3"]
    assert second == [str(chat), "exact match 0.0000  0 of 1"]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line.pop("right") for line in lines] == [True, True, False, False]
    expected = [{**record, "generated": text} for record, text in zip(records, made)]
    assert lines[:3] == expected and lines[3]["messages"][0] == ask[0]
    whole = output.read_bytes()
    output.write_bytes(whole[: whole.index(b"\n") + 9])  # as a kill leaves it
    said = f"{output}: 1 of 4 prompts answered\n"
    assert call(*command, "--output", output) == (0, out, said) and output.read_bytes() == whole
    assert_one_line(call(*command, "--output", answers), "this line is not an answer to prompt 1")
    chat.write_text(json.dumps({"messages": ask}))
    assert_one_line(call(*command), "chat.jsonl:1: ", "must end with a turn of the assistant")


def test_answers_that_something_else_made_are_not_counted(call, checkpoint, tmp_path):
    """A line may hold what str.splitlines takes for the end of one."""
    files, output = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    record = {"prompt": "the\u2028cat\x85", "completion": "a"}
    files.write_text(json.dumps(record, ensure_ascii=False) + "\n", "utf-8")
    limits = ["--device", "cpu", "--output", output, "--max-new-tokens"]
    command = ["evaluate", checkpoint, "--files", files, "--generate", *limits]
    first = call(*command, 2)
    assert first[0] == 0 and first[1].endswith("0.0000  0 of 1\n")
    assert call(*command, 2) == (*first[:2], f"{output}: 1 of 1 prompt answered\n")
    beside = "answers.jsonl.options.json"
    assert_one_line(
        call(*command, 3), f"{beside} says", "{'max_new_tokens': 2}, and not with {'max"
    )
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    command[1] = other
    assert_one_line(call(*command, 2), f"{beside} says", "'files': ", f"'model': '{checkpoint}'")
    (tmp_path / beside).unlink()
    assert_one_line(call(*command, 2), f"{beside} is missing")
    output.unlink()
    assert call("generate", other, "--input", files, *limits, 2)[0] == 0
    assert_one_line(call(*command, 2), "'command': 'generate'")


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (" Paris \n", "Paris", True),
        ("Paris.", "Paris", False),
        ("3 + 4 = 7, so the sum is 7.", 7, True),
        ("It costs $1,234.50", "1234.5", True),
        ("12-15", -15, False),
        ("at -15 degrees", -15, True),
        ("7 or 8", "7", False),
        ("none", 0, False),
    ],
)
def test_an_answer_is_right(text, reference, right):
    assert is_right(text, [reference]) == right


def test_what_tasks_need_is_said(call, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "ligermodels.integrations.lm_eval_tasks", raising=False)
    assert_one_line(
        call("evaluate", checkpoint, "--tasks", "arc_easy"), "tasks: lm_eval is not installed"
    )


@pytest.mark.usefixtures("quick_lm_eval")
def test_tasks_of_lm_eval_run(call, checkpoint, tmp_path):
    questions = [{"question": "the cat", "answer": 0}, {"question": "a dog", "answer": 1}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "cats.yaml").write_text(
        "task: cats\ndataset_path: json\noutput_type: multiple_choice\ntest_split: train\n"
        f"dataset_kwargs: {{data_files: {tmp_path}/data.jsonl}}\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: answer\ndoc_to_choice: [' saw', ' ran']\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    tasks = ["--tasks", "cats", "--task-folder", tmp_path, "--device", "cpu"]
    code, out, _ = call("evaluate", checkpoint, *tasks)
    assert code == 0 and out.startswith("cats  acc,none ")
    code, out, _ = call("evaluate", checkpoint, *tasks, "--limit", "1", "--json")
    assert json.loads(out)["tasks"]["cats"]["acc,none"] in (0.0, 1.0)
    result = call("evaluate", checkpoint, *tasks[:1], "cat", *tasks[2:])
    assert result[0] == 2 and "tasks: lm-eval knows no task 'cat'; did you" in result[2]
