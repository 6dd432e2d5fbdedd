"""Measure perplexity, or run tasks of lm-eval.

Measure the perplexity of MODEL on each of the files, which have the formats of 'ligermodels
finetune' (only what is learned there counts), or run tasks of lm-eval (pip install
'ligermodels[trainers]' lm_eval), or both.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass
from typing import Any

from ligermodels.cli.options import LoadingOptions
from ligermodels.errors import LigerError
from ligermodels.training.options import option

OUT_OF_MEMORY = " (try a smaller --batch-size, a shorter --seq-len, or --dtype bfloat16)"


@dataclass(kw_only=True)
class Arguments(LoadingOptions):
    """The options of `evaluate`.

    Attributes:
        model: hub id or local folder of a checkpoint
        files: text or .jsonl files
        tasks: names of lm-eval's tasks
        seq_len: tokens per row
        batch_size: rows of a forward pass (default: 4; where text is generated, what fits into
            memory)
        separator: line that separates the documents of a text file
        num_fewshot: examples before each question of a task (default: what the task says)
        limit: the most questions of a task
        task_folder: folder with YAML files of more tasks
        device: cpu or cuda (default: cuda if there is a GPU)
        json: print JSON
    """

    model: str = option(MISSING, positional=True)
    files: list[str] = option((), metavar="FILE")
    tasks: list[str] = option((), metavar="TASK")
    seq_len: int = option(1024, at_least=2)
    batch_size: int | None = option(None, at_least=1)
    separator: str | None = option(None, metavar="LINE")
    num_fewshot: int | None = option(None, at_least=0, needs="tasks")
    limit: int | None = option(None, at_least=1, needs="tasks")
    task_folder: str | None = option(None, metavar="DIR", needs="tasks")
    device: str | None = option(None)
    json: bool = option(False)


def run(given: Arguments) -> None:
    """Print the perplexity of each file and of all, and the metrics of each task."""
    from ligermodels.converters.hub import resolve
    from ligermodels.models.auto import AutoLiger
    from ligermodels.training.data import local_files
    from ligermodels.training.finetune import pick_device
    from ligermodels.training.reports import lm_eval

    if not given.files and not given.tasks:
        raise LigerError("evaluate: give --files, --tasks, or both")
    paths = local_files(given.files, progress=sys.stderr.isatty())
    evaluate_tasks = lm_eval("tasks") if given.tasks else None
    device = pick_device(given.device)
    folder = resolve(given.model, revision=given.revision)
    model = AutoLiger.from_hf(folder, device=device, **given.loading())
    found: dict[str, dict[str, Any]] = {}
    if given.files:
        found["files"] = _files(given, model, folder, dict(zip(given.files, paths)))
    if evaluate_tasks is not None:
        names = ("batch_size", "num_fewshot", "limit", "task_folder")
        options = {name: getattr(given, name) for name in names}
        found["tasks"] = evaluate_tasks(model, str(folder), given.tasks, **options)
    if given.json:
        print(json.dumps(found, indent=2, default=str))
        return
    width = max(len(name) for results in found.values() for name in results)
    for file, result in found.get("files", {}).items():
        line = "perplexity {perplexity:.4f}  loss {loss:.4f}  {targets:,} targets"
        if result.get("truncated"):
            line += "  (long examples cut: {truncated:,})"
        if result.get("untargeted"):
            line += "  (without a target: {untargeted:,})"
        print(f"{file:<{width}}  " + line.format(**result))
    for task, result in found.get("tasks", {}).items():
        numbers = [f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float)]
        print(f"{task:<{width}}  " + "  ".join(numbers))


def _files(
    given: Arguments, model: Any, folder: Any, files: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the loss on each file, and of all if there are several."""
    from ligermodels.models.auto import tokenizer_folder
    from ligermodels.text.tokenizer import Tokenizer
    from ligermodels.training.evaluate import file_loss

    tokenizer = Tokenizer.from_hf(tokenizer_folder(folder))
    options: dict[str, Any] = {
        "seq_len": given.seq_len,
        "batch_size": given.batch_size or 4,
        "separator": given.separator,
        "progress": sys.stderr.isatty(),
    }
    losses = {file: file_loss(model, tokenizer, [files[file]], **options) for file in files}
    if len(losses) > 1:
        first, *others = losses.values()
        losses["all files"] = sum(others, first)
    return {file: one.to_dict() for file, one in losses.items()}
