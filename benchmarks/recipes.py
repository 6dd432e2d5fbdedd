"""Measure the recipes of examples/recipes on a GPU: python -m benchmarks.recipes --tokenizer FOLDER

Each recipe runs through `finetune` as a user would run it, in a process of its own, for some steps.
But its model has random weights of the published sizes, its text is a novel, and it exports
nothing: so no checkpoint is read or written. The step is the median of those after the fourth. The
peak is that of allocated bytes, from the first step on. What has taken how long is printed as it
happens. With --warm, all recipes first run at once with few layers, which fills the caches of
compiled kernels: less time is then spent on compiling, one recipe after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the command line

import torch
from safetensors.torch import save_file

from benchmarks.common import RESULTS, environment, table, write
from ligermodels import AutoLiger, Tokenizer, float8, progress
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig
from ligermodels.training import finetune as module
from ligermodels.training.config import FinetuneConfig, read_config
from ligermodels.training.trainer import Trainer

EXAMPLES = Path(__file__).parents[1] / "examples"
RECIPES = EXAMPLES / "recipes"
STEPS, WARMUP = 10, 4


def preset_of(hub_id: str) -> tuple[type[DecoderModel], ModelConfig]:
    """Return the family and the published sizes of a checkpoint on the hub."""
    name = hub_id.rpartition("/")[2].lower()
    for ending in ("-pt", "-it", "-base", "-instruct"):
        name = name.removesuffix(ending)
    family = next(each for each in families().values() if name in each.config_class.presets)
    return family, family.config_class.preset(name)


def shallow(sizes: ModelConfig) -> ModelConfig:
    """Return a config with as few layers as have all kinds of them."""
    kinds = sizes.types
    count = next(n for n in range(1, len(kinds) + 1) if {*kinds[:n]} == {*kinds})
    changes: dict[str, Any] = {"num_hidden_layers": count}
    if getattr(sizes, "layer_types", None):
        changes["layer_types"] = kinds[:count]
    return dataclasses.replace(sizes, **changes)


def write_data(folder: Path, loss: str, tokens: int, seq_len: int) -> Path:
    """Write texts from the novel, or pairs of them, into a file of the folder.

    The texts have about so many tokens in all, and fill rows of seq_len tokens: the first one is
    longer than a row, and the others have many lengths. Pairs are longer than their rows, and as
    many as the steps take, because the reference's probabilities of all pairs come first.
    """
    novel = (EXAMPLES / "data" / "persuasion-train.txt").read_text(encoding="utf-8").split()
    records: list[dict[str, str]] = []
    if loss == "dpo":
        for at in range(0, 100 * (1 + tokens // 1024), 100):
            half, other = novel[at : at + 300], novel[at + 1000 : at + 1900]
            chosen, rejected = (f" {' '.join(x)}" for x in (novel[at + 300 : at + 1200], other))
            records.append({"prompt": " ".join(half), "chosen": chosen, "rejected": rejected})
    else:
        lengths = itertools.chain([seq_len], itertools.cycle(range(100, 1500, 87)))
        at = 0
        while at < tokens:  # a word has more than one token
            words = next(lengths)
            left = at % (len(novel) - words)
            records.append({"text": " ".join(novel[left : left + words])})
            at += words
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return file


class Phases:
    """The seconds of the phases of a recipe, which are printed when they end."""

    def __init__(self, recipe: str) -> None:
        self.recipe, self.seconds, self.last = recipe, {}, time.perf_counter()

    def end(self, phase: str) -> None:
        """End a phase, and begin the next one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        print(f"{self.recipe}: {phase}: {now - self.last:.2f} s", flush=True)
        self.last = now

    @contextlib.contextmanager
    def stage(self, what: str, *args: Any, **options: Any) -> Any:
        """Show a stage of `finetune`, and time it."""
        self.end(f"before {what}")
        with progress.stage(what, *args, **options) as advance:
            yield advance
        self.end(what)


def run_one(
    recipe: str,
    tokenizer: str,
    device: str,
    result: Any = None,
    warms: bool = False,
    budget: str | None = None,
) -> dict[str, Any]:
    """Run a recipe, and return its median step and its peak, or send them to another process.

    Args: warms: whether the model has few layers, and makes two steps; budget: that of the memory,
        if the recipe has none.
    """
    phases = Phases(recipe)
    options = read_config(RECIPES / f"{recipe}.yaml")
    family, sizes = preset_of(options["model"])
    options.pop("from_scratch", None)
    if budget is not None and not warms:
        options.setdefault("memory", budget)
    steps = 2 if warms else STEPS

    def random_model(
        path: Any, *, dtype: torch.dtype, device: torch.device, **given: Any
    ) -> DecoderModel:
        torch.set_default_dtype(dtype)  # so that no larger copy is made
        try:
            with main_device:  # also if what is converted should come from the CPU
                model = family(shallow(sizes) if warms else sizes)
        finally:
            torch.set_default_dtype(torch.float32)
        if given["float8"] is not None:
            float8.convert(model, given["float8"])
        return model

    class Measured(module.Run):
        def _start(self, *args: Any) -> None:
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            super()._start(*args)

        def _finish(self, trainer: Any) -> Any:
            plan = self.model.memory_plan
            rows = self.run_dir.metrics.read()
            rows = [row for row in rows if row["step"] > (0 if warms else WARMUP)]
            seconds = [row["seconds"] for row in rows]
            measured["ms"] = 1e3 * statistics.median(seconds)
            measured["ms spread"] = 1e3 * (max(seconds) - min(seconds))
            measured["tokens/s"] = statistics.median(row["tokens_per_second"] for row in rows)
            if self.device.type == "cuda":
                measured["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
                measured["reserved GiB"] = torch.cuda.max_memory_reserved() / 2**30
            measured["plan"] = "everything is kept" if plan is None else module.summary(plan)
            measured["last loss"] = rows[-1]["loss"]
            raise Done

    class Timed(Trainer):
        def _log(self, *args: Any) -> None:
            super()._log(*args)
            phases.end("first step" if self.done == 1 else "later steps")

    measured: dict[str, Any] = {"recipe": recipe}
    main_device = torch.device(device)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        source.mkdir()
        Tokenizer.from_hf(tokenizer).save_hf(source)
        (source / "config.json").write_text("{}")
        save_file({}, source / "model.safetensors")
        loss = options.get("loss", "sft")
        seq_len = options["seq_len"]
        tokens = steps * options["batch_size"] * seq_len
        config = FinetuneConfig.from_options(
            **options
            | {"model": str(source), "device": device, "max_steps": steps, "save_steps": 0}
            | {"train_files": [str(write_data(folder, loss, tokens, seq_len))], "logging_steps": 1}
            | {"output_dir": str(folder / "run"), "eval_fraction": 0}
        )
        phases.end("data and config")
        if main_device.type == "cuda":
            torch.zeros((), device=main_device).item()
            phases.end("CUDA")
        with (
            mock.patch.object(AutoLiger, "from_hf", random_model),
            mock.patch.object(module, "Run", Measured),
            mock.patch.object(module, "Trainer", Timed),
            mock.patch.object(module, "stage", phases.stage),
        ):
            try:
                module.finetune(config, progress=False)
            except Done:
                pass
    measured["seconds in all"] = time.perf_counter() - began
    measured["seconds of phases"] = {k: round(x, 2) for k, x in phases.seconds.items()}
    if result is not None:
        result.send(measured)
    return measured


class Done(BaseException):
    """The steps are made, and nothing is exported."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "recipes", nargs="*", default=sorted(x.stem for x in RECIPES.glob("*.yaml"))
    )
    parser.add_argument("--tokenizer", required=True, help="folder or hub id of any tokenizer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for recipes.json")
    parser.add_argument("--limit", type=int, default=120, help="seconds of a recipe")
    parser.add_argument("--warm", type=int, default=0, help="seconds to fill caches first")
    parser.add_argument("--budget", help="memory of a smaller GPU, such as 78GiB")
    given = parser.parse_args()
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("forkserver")  # which imports everything once
    context.set_forkserver_preload(["benchmarks.recipes"])

    def start(recipe: str, warms: bool = False) -> tuple[Any, Any]:
        result, sends = context.Pipe(duplex=False)
        args = recipe, given.tokenizer, given.device, sends, warms, given.budget
        process = context.Process(target=run_one, args=args)
        process.start()
        return process, result

    def end(process: Any) -> None:
        process.kill()
        process.join()  # until then its memory is taken

    if given.warm:
        started = [start(recipe, warms=True) for recipe in given.recipes]
        for process, _ in started:
            process.join(max(0.0, began + given.warm - time.perf_counter()))
        for process, _ in started:
            end(process)
        print(f"filled the caches in {time.perf_counter() - began:.1f} s", flush=True)
    for recipe in given.recipes:
        process, result = start(recipe)
        process.join(given.limit)
        if process.exitcode == 0:
            rows.append(result.recv())
        else:
            code = process.exitcode
            why = f"stopped after {given.limit} s" if code is None else f"exit code {code}"
            rows.append({"recipe": recipe, "error": why})
        end(process)
        print(rows[-1], flush=True)
        write("recipes.json", {"environment": environment(), "rows": rows}, given.out)
    print(table(rows, ["recipe", "ms", "tokens/s", "peak GiB", "plan", "error"]))


if __name__ == "__main__":
    main()
