"""A task of lm-eval without the hub: which sentence follows in a novel?

    python -m examples.lm_eval_task build/smollm2 --output-dir runs/lm_eval_task

The task is a YAML file and a file of questions, as lm-eval takes them. Each question has the true
next sentence and three from elsewhere. `ligermodels evaluate MODEL --tasks follows --task-folder
runs/lm_eval_task` runs it again; the tasks that lm-eval knows need a connection for their data.
"""

import json
import random
from pathlib import Path

import torch

from examples.command import HELD_OUT, call, draw_bars, report, write_lines
from ligermodels import AutoLiger
from ligermodels.converters.hub import resolve
from ligermodels.integrations.lm_eval_tasks import evaluate_tasks


def write_task(folder: Path, questions: int, seed: int = 0) -> None:
    """Write the task `follows` and its questions into a folder."""
    text = HELD_OUT.read_text(encoding="utf-8").replace("\n", " ")
    sentences = [each.strip() for each in text.split(". ") if 8 <= len(each.split()) <= 30]
    draw, records = random.Random(seed), []
    for place in draw.sample(range(len(sentences) - 1), questions):
        others = [x for i, x in enumerate(sentences) if i not in (place, place + 1)]
        choices, answer = draw.sample(others, 3), draw.randrange(4)
        choices.insert(answer, sentences[place + 1])
        records.append({"text": f"{sentences[place]}.", "choices": choices, "answer": answer})
    task = {
        "task": "follows",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(write_lines(folder / "questions.jsonl", records))},
        "output_type": "multiple_choice",
        "test_split": "train",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "follows.yaml").write_text(json.dumps(task, indent=1) + "\n")  # JSON is YAML, too


def main(model: str, output_dir: Path, *, questions: int = 40) -> dict[str, float]:
    """Run the task, and return its scores."""
    write_task(output_dir.absolute(), questions)
    on_gpu = torch.cuda.is_available()
    network = AutoLiger.from_hf(
        model,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        device="cuda" if on_gpu else "cpu",
    )
    tasks = {"tasks": ["follows"], "task_folder": str(output_dir.absolute())}
    found = evaluate_tasks(network, str(resolve(model)), **tasks)["follows"]
    right, right_by_length = found["acc,none"], found["acc_norm,none"]
    bars = {"by chance": 0.25, "likeliest": right, "likeliest per character": right_by_length}
    draw_bars(output_dir, f"share of {questions} sentences found", bars, "{:.0%}")
    return report(output_dir, right=right, right_by_length=right_by_length, questions=questions)


if __name__ == "__main__":
    call(main, __doc__)
