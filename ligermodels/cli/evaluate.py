"""The command `ligermodels evaluate`."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass
from typing import Any

from ligermodels.cli.options import LoadingOptions, data_library
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

    model: str = option(MISSING, "hub id or local folder of a checkpoint", positional=True)
    files: list[str] | None = option(None, "text or .jsonl files", metavar="FILE")  # noqa: RUF009
    tasks: list[str] | None = option(  # noqa: RUF009
        None, "names of lm-eval's tasks", metavar="TASK"
    )
    seq_len: int = option(1024, "tokens per row", at_least=2)
    batch_size: int = option(4, "rows of a forward pass", at_least=1, at_most=2**20)
    separator: str | None = option(
        None, "line that separates the documents of a text file", metavar="LINE"
    )
    num_fewshot: int | None = option(
        None, "examples before each question of a task (default: what the task says)", at_least=0
    )
    limit: int | None = option(None, "the most questions of a task", at_least=1, at_most=2**20)
    task_folder: str | None = option(None, "folder with YAML files of more tasks", metavar="DIR")
    device: str | None = option(None, "cpu or cuda (default: cuda if there is a GPU)")
    json: bool = option(False, "print JSON")


def run(given: Arguments) -> None:
    """Print the perplexity of each file and of all, and the metrics of each task."""
    from ligermodels.converters.hub import resolve
    from ligermodels.models.auto import AutoLiger
    from ligermodels.training.data import local_files
    from ligermodels.training.finetune import pick_device

    if not given.files and not given.tasks:
        raise LigerError("evaluate: give --files, --tasks, or both")
    for name in ("num_fewshot", "limit", "task_folder"):
        if getattr(given, name) is not None and not given.tasks:
            raise LigerError(f"evaluate: --{name.replace('_', '-')} is only for --tasks")
    files = dict(
        zip(
            given.files or (),
            local_files(given.files or (), data_library, progress=sys.stderr.isatty()),
        )
    )
    evaluate_tasks = _lm_eval() if given.tasks else None
    device = pick_device(given.device)
    folder = resolve(given.model, revision=given.revision)
    model = AutoLiger.from_hf(folder, device=device, **given.loading())
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
    given: Arguments, model: Any, folder: Any, files: dict[str, Any]
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
    found = {}
    for file, one in losses.items():
        found[file] = {"perplexity": one.perplexity, **vars(one)}
        found[file]["tokens_per_second"] = one.tokens / max(found[file].pop("seconds"), 1e-9)
    return found


def _lm_eval() -> Any:
    try:
        from ligermodels.integrations.lm_eval_tasks import evaluate_tasks
    except ImportError as error:
        raise LigerError(
            f"evaluate: --tasks needs lm-eval and transformers, but {error.name} is not "
            "installed (pip install 'ligermodels[trainers]' lm_eval)"
        ) from None
    return evaluate_tasks
