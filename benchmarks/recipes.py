"""Measure the recipes of examples/recipes on a GPU: python -m benchmarks.recipes --tokenizer FOLDER

Each recipe runs through `finetune` as a user would run it, in a process of its own, for some steps.
But its model has random weights of the published sizes, its text is a novel, and it exports
nothing: so no checkpoint is read or written. The step is the median of those after the fourth. The
peak is that of allocated bytes, from the first step on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from benchmarks.common import RESULTS, environment, table, write
from ligermodels import AutoLiger, Tokenizer, float8
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig
from ligermodels.training import finetune as module
from ligermodels.training.config import FinetuneConfig, read_config

EXAMPLES = Path(__file__).parents[1] / "examples"
RECIPES = EXAMPLES / "recipes"
STEPS, WARMUP = 10, 4


def preset_of(hub_id: str) -> tuple[type[DecoderModel], ModelConfig]:
    """Return the family and the published sizes of a checkpoint on the hub."""
    name = hub_id.rpartition("/")[2].lower()
    for ending in ("-pt", "-base", "-instruct"):
        name = name.removesuffix(ending)
    family = next(each for each in families().values() if name in each.config_class.presets)
    return family, family.config_class.preset(name)


def write_data(folder: Path, loss: str) -> Path:
    """Write texts from the novel, or pairs of them, into a file of the folder."""
    # The reference's probabilities of all pairs are computed before the first step.
    words, rows = (600, 5 * STEPS) if loss == "dpo" else (1200, 400)
    novel = (EXAMPLES / "data" / "persuasion-train.txt").read_text(encoding="utf-8").split()
    starts = range(0, len(novel) - words, words)
    parts = [[*novel[start : start + words]] for start in starts]
    if loss == "dpo":
        half, other = words // 2, [*parts[1:], parts[0]]
        records: Any = (
            {
                "prompt": " ".join(part[:half]),
                "chosen": " " + " ".join(part[half:]),
                "rejected": " " + " ".join(wrong[half:]),
            }
            for part, wrong in zip(parts, other)
        )
    else:
        records = ({"text": " ".join(part)} for part in parts)
    file = folder / "data.jsonl"
    lines = [json.dumps(each) + "\n" for each in records]
    file.write_text("".join(itertools.islice(itertools.cycle(lines), rows)), encoding="utf-8")
    return file


def run_one(recipe: str, tokenizer: str, device: str, result: Any = None) -> dict[str, Any]:
    """Run a recipe, and return its median step and its peak, or send them to another process."""
    options = read_config(RECIPES / f"{recipe}.yaml")
    family, sizes = preset_of(options["model"])
    options.pop("from_scratch", None)

    def random_model(
        path: Any, *, dtype: torch.dtype, device: torch.device, **given: Any
    ) -> DecoderModel:
        with torch.device(main_device):  # the GPU also draws what is converted one by one
            model = family(sizes)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
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
            seconds = [row["seconds"] for row in rows if row["step"] > WARMUP]
            measured["ms"] = 1e3 * statistics.median(seconds)
            measured["ms spread"] = 1e3 * (max(seconds) - min(seconds))
            measured["tokens/s"] = statistics.median(
                row["tokens_per_second"] for row in rows if row["step"] > WARMUP
            )
            if self.device.type == "cuda":
                measured["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
                measured["reserved GiB"] = torch.cuda.max_memory_reserved() / 2**30
            measured["plan"] = "everything is kept" if plan is None else module.summary(plan)
            measured["last loss"] = rows[-1]["loss"]
            raise Done

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
        config = FinetuneConfig.from_options(
            **options
            | {"model": str(source), "device": device, "max_steps": STEPS, "save_steps": 0}
            | {"train_files": [str(write_data(folder, options.get("loss", "sft")))]}
            | {"output_dir": str(folder / "run"), "eval_fraction": 0}
        )
        with (
            mock.patch.object(AutoLiger, "from_hf", random_model),
            mock.patch.object(module, "Run", Measured),
        ):
            try:
                module.finetune(config)
            except Done:
                pass
    measured["seconds in all"] = time.perf_counter() - began
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
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("forkserver")  # which imports everything once
    context.set_forkserver_preload(["benchmarks.recipes"])
    for recipe in given.recipes:
        result, sends = context.Pipe(duplex=False)
        process = context.Process(
            target=run_one, args=(recipe, given.tokenizer, given.device, sends)
        )
        process.start()
        process.join(given.limit)
        if result.poll():
            rows.append(result.recv())
        else:
            process.kill()
            code = process.exitcode
            why = f"stopped after {given.limit} s" if code is None else f"exit code {code}"
            rows.append({"recipe": recipe, "error": why})
        print(rows[-1], flush=True)
        write("recipes.json", {"environment": environment(), "rows": rows}, given.out)
    print(table(rows, ["recipe", "ms", "tokens/s", "peak GiB", "plan", "error"]))


if __name__ == "__main__":
    main()
