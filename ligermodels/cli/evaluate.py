"""The command `ligermodels evaluate`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ligermodels.cli.options import loading_arguments, loading_options, number
from ligermodels.errors import LigerError

HELP = "measure the perplexity of files, or run tasks of lm-eval"
OUT_OF_MEMORY = " (try a smaller --batch-size, a shorter --seq-len, or --dtype bfloat16)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the model, the files or tasks, and the options for loading."""
    command.description = (
        "Measure the perplexity of MODEL on each of the files, which have the formats of "
        "'ligermodels finetune' (only what is learned there counts), or run tasks of lm-eval "
        "(pip install 'ligermodels[trainers]' lm_eval), or both."
    )
    add = command.add_argument
    add("model", metavar="MODEL", help="hub id or local folder of a checkpoint")
    add("--files", nargs="+", metavar="FILE", default=[], help="text or .jsonl files")
    add("--tasks", nargs="+", metavar="TASK", default=[], help="names of lm-eval's tasks")
    count = number(int, at_least=1, at_most=2**20)
    add("--seq-len", type=number(int, at_least=2), default=1024, metavar="N", help="tokens per row")
    add("--batch-size", type=count, default=4, metavar="N", help="rows of a forward pass")
    add("--separator", metavar="LINE", help="line that separates the documents of a text file")
    add(
        "--num-fewshot",
        type=number(int, at_least=0),
        metavar="N",
        help="examples before each question of a task (default: what the task says)",
    )
    add("--limit", type=count, metavar="N", help="the most questions of a task")
    add("--task-folder", metavar="DIR", help="folder with YAML files of more tasks")
    add("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    add("--json", action="store_true", help="print JSON")
    loading_arguments(command)


def run(given: argparse.Namespace) -> None:
    """Print the perplexity of each file and of all, and the metrics of each task."""
    from ligermodels.converters.hub import resolve
    from ligermodels.models.auto import AutoLiger
    from ligermodels.training.data_sources import local_files
    from ligermodels.training.finetune import pick_device

    if not given.files and not given.tasks:
        raise LigerError("evaluate: give --files, --tasks, or both")
    for name in ("num_fewshot", "limit", "task_folder"):
        if getattr(given, name) is not None and not given.tasks:
            raise LigerError(f"evaluate: --{name.replace('_', '-')} is only for --tasks")
    files = dict(zip(given.files, local_files(given.files, progress=sys.stderr.isatty())))
    evaluate_tasks = _lm_eval() if given.tasks else None
    device = pick_device(given.device)
    folder = resolve(given.model, revision=given.revision)
    model = AutoLiger.from_hf(folder, device=device, **loading_options(given))
    found: dict[str, Any] = {}
    if given.files:
        found["files"] = _files(given, model, folder, files)
    if evaluate_tasks is not None:
        found["tasks"] = evaluate_tasks(
            model,
            str(folder),
            given.tasks,
            batch_size=given.batch_size,
            num_fewshot=given.num_fewshot,
            limit=given.limit,
            task_folder=given.task_folder,
        )
    if given.json:
        print(json.dumps(found, indent=2, default=str))
        return
    names = [*found.get("files", ()), *found.get("tasks", ())]
    width = max(map(len, names))
    for file, result in found.get("files", {}).items():
        cut = f"  (long examples cut: {result['truncated']:,})" if result["truncated"] else ""
        if result["untargeted"]:
            cut += f"  (without a target: {result['untargeted']:,})"
        print(
            f"{file:<{width}}  perplexity {result['perplexity']:.4f}  loss {result['loss']:.4f}  "
            f"{result['targets']:,} targets{cut}"
        )
    for task, result in found.get("tasks", {}).items():
        numbers = {k: v for k, v in result.items() if isinstance(v, float)}
        print(f"{task:<{width}}  " + "  ".join(f"{k} {v:.4f}" for k, v in numbers.items()))


def _files(
    given: argparse.Namespace, model: Any, folder: Any, files: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Return the loss on each file; the last entry is that of all, if there are several."""
    from ligermodels.models.auto import tokenizer_folder
    from ligermodels.text.tokenizer import Tokenizer
    from ligermodels.training.evaluate import file_loss

    tokenizer = Tokenizer.from_hf(tokenizer_folder(folder))
    losses = {
        file: file_loss(
            model,
            tokenizer,
            [path],
            seq_len=given.seq_len,
            batch_size=given.batch_size,
            separator=given.separator,
            progress=sys.stderr.isatty(),
        )
        for file, path in files.items()
    }
    if len(losses) > 1:
        first, *others = losses.values()
        losses["all files"] = sum(others, first)
    return {
        file: {
            "perplexity": one.perplexity,
            "loss": one.loss,
            "targets": one.targets,
            "tokens": one.tokens,
            "truncated": one.truncated,
            "untargeted": one.untargeted,
            "tokens_per_second": one.tokens / max(one.seconds, 1e-9),
        }
        for file, one in losses.items()
    }


def _lm_eval() -> Any:
    try:
        from ligermodels.integrations.lm_eval_tasks import evaluate_tasks
    except ImportError as error:
        raise LigerError(
            f"evaluate: --tasks needs lm-eval and transformers, but {error.name} is not "
            "installed (pip install 'ligermodels[trainers]' lm_eval)"
        ) from None
    return evaluate_tasks
