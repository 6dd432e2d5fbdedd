"""The command `ligermodels evaluate`."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass
from typing import Any

from ligermodels.cli.options import DEVICE, MODEL, LoadingOptions, data_library
from ligermodels.errors import LigerError
from ligermodels.training.options import option

HELP = "measure the perplexity of files, or run tasks of lm-eval"
OUT_OF_MEMORY = " (try a smaller --batch-size, a shorter --seq-len, or --dtype bfloat16)"
DESCRIPTION = (
    "Measure the perplexity of MODEL on each of the files, which have the formats of "
    "'ligermodels finetune' (only what is learned there counts), or run tasks of lm-eval "
    "(pip install 'ligermodels[trainers]' lm_eval), or both."
)


@dataclass(kw_only=True)
class Arguments(LoadingOptions):
    """The options of `evaluate`."""

    model: str = option(MISSING, MODEL, positional=True)
    files: list[str] = option((), "text or .jsonl files", metavar="FILE")
    tasks: list[str] = option((), "names of lm-eval's tasks", metavar="TASK")
    seq_len: int = option(1024, "tokens per row", at_least=2)
    batch_size: int = option(4, "rows of a forward pass", at_least=1)
    separator: str | None = option(
        None, "line that separates the documents of a text file", metavar="LINE"
    )
    num_fewshot: int | None = option(
        None, "examples before each question of a task (default: what the task says)", at_least=0
    )
    limit: int | None = option(None, "the most questions of a task", at_least=1)
    task_folder: str | None = option(None, "folder with YAML files of more tasks", metavar="DIR")
    device: str | None = option(None, DEVICE)
    json: bool = option(False, "print JSON")


def run(given: Arguments) -> None:
    """Print the perplexity of each file and of all, and the metrics of each task."""
    from ligermodels.converters.hub import resolve
    from ligermodels.models.auto import AutoLiger
    from ligermodels.training.data import local_files
    from ligermodels.training.finetune import pick_device

    if not given.files and not given.tasks:
        raise LigerError("evaluate: give --files, --tasks, or both")
    for_tasks = {name: getattr(given, name) for name in ("num_fewshot", "limit", "task_folder")}
    for name, value in for_tasks.items():
        if value is not None and not given.tasks:
            raise LigerError(f"evaluate: --{name.replace('_', '-')} is only for --tasks")
    paths = local_files(given.files, data_library, progress=sys.stderr.isatty())
    evaluate_tasks = _lm_eval() if given.tasks else None
    device = pick_device(given.device)
    folder = resolve(given.model, revision=given.revision)
    model = AutoLiger.from_hf(folder, device=device, **given.loading())
    found: dict[str, dict[str, Any]] = {}
    if given.files:
        found["files"] = _files(given, model, folder, dict(zip(given.files, paths)))
    if evaluate_tasks is not None:
        found["tasks"] = evaluate_tasks(
            model, str(folder), given.tasks, batch_size=given.batch_size, **for_tasks
        )
    if given.json:
        print(json.dumps(found, indent=2, default=str))
        return
    width = max(len(name) for results in found.values() for name in results)
    for file, result in found.get("files", {}).items():
        line = "perplexity {perplexity:.4f}  loss {loss:.4f}  {targets:,} targets"
        if result["truncated"]:
            line += "  (long examples cut: {truncated:,})"
        if result["untargeted"]:
            line += "  (without a target: {untargeted:,})"
        print(f"{file:<{width}}  " + line.format(**result))
    for task, result in found.get("tasks", {}).items():
        numbers = [f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float)]
        print(f"{task:<{width}}  " + "  ".join(numbers))


def _files(
    given: Arguments, model: Any, folder: Any, files: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the loss on each file; the last entry is that of all, if there are several."""
    from ligermodels.models.auto import tokenizer_folder
    from ligermodels.text.tokenizer import Tokenizer
    from ligermodels.training.evaluate import file_loss

    tokenizer = Tokenizer.from_hf(tokenizer_folder(folder))
    sizes = {name: getattr(given, name) for name in ("seq_len", "batch_size", "separator")}
    shows = sys.stderr.isatty()
    losses = {
        file: file_loss(model, tokenizer, [path], progress=shows, **sizes)
        for file, path in files.items()
    }
    if len(losses) > 1:
        first, *others = losses.values()
        losses["all files"] = sum(others, first)
    return {file: one.to_dict() for file, one in losses.items()}


def _lm_eval() -> Any:
    try:
        from ligermodels.integrations.lm_eval_tasks import evaluate_tasks
    except ImportError as error:
        raise LigerError(
            f"evaluate: --tasks needs lm-eval and transformers, but {error.name} is not "
            "installed (pip install 'ligermodels[trainers]' lm_eval)"
        ) from None
    return evaluate_tasks
