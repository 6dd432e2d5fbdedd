"""Reports of a run: metrics for loggers, samples, its result, and an upload."""

from __future__ import annotations

import contextlib
import shlex
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ligermodels import float8
from ligermodels.errors import ConfigError, LigerError, SaveError, counted, first_line
from ligermodels.heads.classifier import SequenceClassifier
from ligermodels.kernels import dispatch
from ligermodels.models.auto import tokenizer_folder
from ligermodels.models.base import DecoderModel
from ligermodels.progress import say
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.config import DataOptions, OutputOptions
from ligermodels.training.model import summary
from ligermodels.training.processes import num_row_ranks
from ligermodels.training.run_dir import Metrics, RunDir
from ligermodels.training.trainer import Trainer, shown_perplexity


def logger_openers(names: list[str]) -> list[Any]:
    """Return what opens each of the loggers with these names.

    Raises:
        ConfigError: a package is not installed.
    """
    from ligermodels.integrations.loggers import loggers_by_name

    return loggers_by_name(names)


@contextlib.contextmanager
def logged(run_dir: RunDir, openers: list[Any], settings: Any, start: int) -> Iterator[None]:
    """Let loggers get each line of metrics within the context.

    A logger that fails is left out from then on, with a warning: training goes on.

    Args: openers: what `logger_openers` returns; start: the step from which the run goes on.
    Raises:
        LigerError: a logger cannot be opened.
    """
    loggers = []
    for opener in openers:
        try:
            loggers.append(opener(run_dir.path, settings, start))
        except Exception as error:  # each package raises its own errors
            what = f"{run_dir.path}: report_to: the {opener.__name__} cannot be opened"
            raise LigerError(f"{what}: {first_line(error)}") from error

    def each(call: Callable[[Any], object]) -> None:
        for logger in [*loggers]:
            try:
                call(logger)
            except Exception as error:
                loggers.remove(logger)
                what = f"report_to: the {type(logger).__name__} fails, and gets no more metrics"
                warnings.warn(f"{what}: {first_line(error)}", stacklevel=2)

    def listen(entry: Metrics) -> None:
        values = {name: value for name, value in entry.items() if name != "step"}
        each(lambda logger: logger.log(int(entry["step"]), values))

    run_dir.listener = listen
    try:
        yield
    finally:
        run_dir.listener = None
        each(lambda logger: logger.close())


class Sampler:
    """Continues the same prompts greedily, whenever it is called.

    Args: options: which may have `sample_prompts`.
    Raises:
        CheckpointError: a chat template is needed, and there is none.
        ConfigError: a prompt has no tokens.
    """

    def __init__(self, options: OutputOptions, tokenizer: Tokenizer, run_dir: RunDir) -> None:
        self.tokenizer, self.options, self.run_dir = tokenizer, options, run_dir
        self.prompts = {each: self._encode(each) for each in options.sample_prompts or []}
        if [] in self.prompts.values():
            raise ConfigError("sample_prompts: a prompt is empty; give each prompt some text")

    def _encode(self, prompt: str) -> Any:
        if not self.options.sample_chat:
            return self.tokenizer.encode(prompt)
        told = {"system": self.options.sample_system, "user": prompt}
        messages = [{"role": role, "content": text} for role, text in told.items() if text]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    @torch.no_grad()
    def __call__(self, model: DecoderModel, autocast: Callable[[], Any], step: int) -> None:
        """Write the texts with which the model continues each prompt after a step."""
        model.eval()
        if self.prompts:
            self.run_dir.samples.cut(step - 1)
        for prompt, ids in self.prompts.items():
            with autocast():
                made = model.generate([ids], max_new_tokens=self.options.sample_tokens)
            text = self.tokenizer.decode(made[0, len(ids) :])
            self.run_dir.samples.append({"step": step, "prompt": prompt, "text": text})
            say(f"step {step}: {prompt} -> {text}")


@dataclass(kw_only=True)
class FinetuneResult:
    """The result of a run. Losses are per token, in nats; perplexity is their exponential.

    `model_dir` is the folder of the export, and `model` is the trained model in the export's dtype.
    Its weights are those after `exported_step`, which is the last of `steps` unless the best ones
    were kept. `eval_before` and `eval_after` hold the metrics of the first evaluation and of that
    after the exported step; they are empty if no data was held out. `shown` is the key of the
    metric that matters most, and its name. A loss is None if a resumed run found a metrics.jsonl
    without it, or nothing was held out.
    """

    output_dir: Path
    model_dir: Path
    steps: int
    exported_step: int
    loss: float | None
    eval_before: dict[str, float]
    eval_after: dict[str, float]
    shown: tuple[str, str]
    metrics: list[dict[str, Any]] = field(repr=False)
    model: DecoderModel = field(repr=False)
    notes: list[str] = field(default_factory=list, repr=False)

    @property
    def last_shown(self) -> float | None:
        """What `shown` names, in the last training step that has it: a mean reward, for example."""
        key = self.shown[0].removeprefix("eval_")
        return next((entry[key] for entry in reversed(self.metrics) if key in entry), None)


def beginning(trainer: Trainer, model: DecoderModel) -> dict[str, str]:
    """Return what a run is about to do, by name, for a terminal."""
    config, device, rows = trainer.config, trainer.device, trainer.rows
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if trainer.batches_per_step > trainer.objective.batches_per_step:
        where += f", {num_row_ranks()} processes"
    weights = [*trainer.model.parameters()]
    count = sum(p.numel() for p in weights)
    trained = sum(p.numel() for p in weights if p.requires_grad)
    per_step = trainer.objective.batch_size * trainer.batches_per_step
    name, reason = dispatch.choose(device, next(model.parameters()).dtype)
    plan = model.memory_plan
    steps = f"{trainer.total_steps:,} of {per_step:,} x {rows.width:,} tokens"
    if trainer.done:
        steps += f", of which {trainer.done:,} are done"
    learned = f", of which {rows.num_targets:,} are learned" if rows.num_targets else ""
    return {
        "model": f"{config.model.path} ({type(model).__name__})",
        "parameters": f"{count:,}, of which {trained:,} ({100 * trained / count:.3g}%) are trained",
        "device": f"{where}, {trainer.precision}",
        "loss": f"{config.loss.name}, {config.optimizer.name}, "
        f"learning rate {config.schedule.learning_rate:g}",
        "data": f"{counted(len(rows), 'row')}, {counted(rows.num_tokens, 'token')}{learned}",
        "steps": steps,
        "memory": "everything is kept for backward"
        if plan is None
        else summary(plan).rpartition(" for ")[0],
        **({"kept by layer": plan.bars()} if plan and (plan.recomputes or plan.uses_host) else {}),
        "kernels": float8.report(model) or f"{name} ({reason})",
        "folder": str(config.output.output_dir),
    }


def end(result: FinetuneResult, modules: Sequence[str] = ()) -> dict[str, str]:
    """Return what a run has reached, by name, and the next command, for a terminal.

    Args: modules: those that the command line imports with --import.
    """
    rows: dict[str, str] = {}
    key, name = result.shown
    shown = shown_perplexity if name == "perplexity" else "{:.4f}".format
    for each, label, text in (("eval_loss", "loss", "{:.4f}".format), (key, name, shown)):
        found = [x[each] for x in (result.eval_before, result.eval_after) if each in x]
        if found:
            rows[f"held-out {label}"] = " -> ".join(map(text, found))
    if result.loss is not None:
        rows["training loss"] = f"{result.loss:.4f}"
    if (last := result.last_shown) is not None and key != "eval_loss":
        rows[f"{name} in training"] = f"{last:.4f}"
    for each, label, text in (
        ("tokens_per_second", "tokens per second", "{:,.0f}".format),
        ("mfu", "of the GPU's peak", "{:.1%}".format),
    ):
        if found := [entry[each] for entry in result.metrics if each in entry]:
            rows[label] = text(statistics.median(found))
    if torch.cuda.is_initialized():
        peak = max(map(torch.cuda.max_memory_reserved, range(torch.cuda.device_count())))
        rows["peak of memory"] = f"{peak / 2**30:.1f} GiB"
    rows["steps"] = f"{result.steps:,}"
    if result.exported_step != result.steps:
        rows["steps"] += f"; exported is step {result.exported_step:,}, the best evaluation"
    rows["export"] = str(result.model_dir)
    for file in ("loss.png", "metrics.jsonl"):
        if (result.output_dir / file).exists():
            rows["loss" if file == "loss.png" else "metrics"] = str(result.output_dir / file)
    if not isinstance(result.model, SequenceClassifier):
        imported = [word for module in modules for word in ("--import", module)]
        command = ["ligermodels", "generate", str(result.model_dir), *imported]
        rows["try it"] = shlex.join([*command, "Once upon"])
        if Tokenizer.from_hf(tokenizer_folder(result.model_dir)).chat_template is not None:
            rows["or chat"] = shlex.join([*command, "--chat"])
    return rows


def check_login() -> None:
    """Ask the hub who is logged in, so that a run does not find out at its end.

    Raises:
        ConfigError: nobody is, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # A missing connection raises many kinds of errors.
        raise ConfigError(
            f"push_to_hub: the hub does not say who is logged in: {first_line(error)}; log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error


def lm_eval(option: str) -> Any:
    """Import what runs the tasks of lm-eval.

    Args: option: which needs it.
    Raises:
        ConfigError: it, or transformers, is not installed.
    """
    try:
        from ligermodels.integrations.lm_eval_tasks import evaluate_tasks
    except ImportError as error:
        raise ConfigError(f"{option}: {first_line(error)}") from None
    return evaluate_tasks


def task_scores(
    model: DecoderModel, folder: Path, options: DataOptions, autocast: Callable[[], Any]
) -> Metrics:
    """Return the numbers that tasks of lm-eval give a model, without their errors; {} for none.

    Args: folder: of its tokenizer.
    """
    if not options.eval_tasks:
        return {}
    with autocast(), torch.random.fork_rng():
        found = lm_eval("eval_tasks")(
            *(model, str(folder), options.eval_tasks),
            limit=options.eval_tasks_limit,
            task_folder=options.eval_tasks_folder,
        )
    return {
        f"eval_{task}/{name.removesuffix(',none')}": float(value)
        for task, result in found.items()
        for name, value in result.items()
        if isinstance(value, (int, float)) and "_stderr" not in name and name != "sample_len"
    }


def push(folder: Path, repo: str, *, private: bool, what: str = "the fine-tuned model") -> str:
    """Create a repository if it is not there, put the files of a folder into it, return its URL.

    Raises:
        SaveError: the hub refuses something or cannot be reached. The folder is unchanged.
    """
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repo, private=private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message=f"Upload {what}"
        )
    except Exception as error:
        raise SaveError(
            f"push_to_hub: {repo}: {first_line(error)}; the model is in {folder}, and "
            f"'hf upload {repo} {folder}' sends it"
        ) from error
    return str(url)
