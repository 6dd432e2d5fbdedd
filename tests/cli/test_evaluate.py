"""`ligermodels evaluate`: files, tasks, and what is refused."""

from __future__ import annotations

import json
import sys

import pytest

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
