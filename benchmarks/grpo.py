"""Seconds of a GRPO step by part: sampling, rewards, the reference, the loss and the optimizer.

`python -m benchmarks.grpo` needs a GPU of 80 GB and about two minutes. The weights of
Llama-3.2-1B are random, in bfloat16. A step samples completions that all have their whole length,
with `generate_many`, and trains on them in micro-batches. The first step, which compiles kernels,
is not counted. Each part ends with a wait for the device. The stored row "before" is of an older
version, which sampled without CUDA graphs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.common import RESULTS, environment, write
from ligermodels.models.auto import families
from ligermodels.training import grpo
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.data import Document, Group
from ligermodels.training.trainer import Trainer


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return a number for each completion, which differ within a group."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


class NoText:
    """Stands for the tokenizer: the reward does not read the texts."""

    def decode(self, ids: list[int]) -> str:
        return ""


class Parts:
    """The seconds of the parts of a step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, Counter[str]()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds the time of its calls to a part."""

        def run(*args: Any, **options: Any) -> Any:
            start = self.now()
            made = function(*args, **options)
            self.seconds[name] += self.now() - start
            return made

        return run


def trainer_of(given: argparse.Namespace) -> Trainer:
    """Return the trainer of a run with random weights and random prompts."""
    device = torch.device(given.device)
    config = FinetuneConfig.from_options(
        model="random",
        train_files="random",
        output_dir="never",
        loss="grpo",
        reward_function="benchmarks.grpo:reward",
        num_generations=given.samples,
        max_completion_length=given.new,
        generation_batch_size=given.prompts * given.samples,
        beta=given.beta,
        batch_size=given.batch_size,
        gradient_accumulation_steps=given.prompts * given.samples // given.batch_size,
        seq_len=given.prompt + given.new,
        max_steps=10,
        learning_rate=1e-6,
        warmup_steps=0,
        precision="bf16",
    )
    cls = next(c for c in families().values() if given.preset in c.config_class.presets)
    made = cls.config_class.preset(given.preset)
    made.eos_token_id = None  # so that all completions are as long as they can be
    torch.manual_seed(0)
    with device:
        model = cls(made).to(torch.bfloat16)
    ids = np.random.default_rng(0).integers(3, 1000, (given.prompts, given.prompt))
    masks = np.zeros(given.prompt, dtype=np.bool_)
    documents = [Document(row.astype(np.int32), masks, divisible=False) for row in ids]
    groups = [Group((document,), record={"prompt": ""}) for document in documents]
    objective = config.loss.objective(config)
    objective.open(NoText())
    trainer = Trainer(model, config, objective.rows([groups]), None, device, objective)
    objective.load(model)
    return trainer


def measure(trainer: Trainer, steps: int) -> dict[str, float]:
    """Return the mean seconds of a step and of its parts, and metrics of the last step."""
    parts, objective, metrics = Parts(trainer.device), trainer.objective, {}
    with (
        patch.object(objective, "_sample", parts.timed("sample", objective._sample)),
        patch.object(objective, "_rewards", parts.timed("reward", objective._rewards)),
        patch.object(
            grpo,
            "reference_log_probs",
            parts.timed("reference", grpo.reference_log_probs),
        ),
        patch.object(objective, "begin", parts.timed("begin", objective.begin)),
        patch.object(trainer.optimizer, "step", parts.timed("optimizer", trainer.optimizer.step)),
    ):
        for step in range(steps):
            metrics = parts.timed("step", trainer.step)(step, trainer.micro_batches(step))
    seconds = {name: total / steps for name, total in parts.seconds.items()}
    begun = seconds.pop("begin")
    seconds["forward and backward"] = seconds["step"] - begun - seconds["optimizer"]
    difference = metrics.get("sampling/sampling_logp_difference/mean")
    if difference is not None:
        seconds["logp difference"] = float(difference)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--preset", default="llama-3.2-1b")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--beta", type=float, default=0.04, help="0 for no reference model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    trainer = trainer_of(given)
    measure(trainer, 1)  # compiles kernels
    rows = {"now": measure(trainer, given.steps)}
    sizes = {name: x for name, x in vars(given).items() if name != "out"}
    for name, row in rows.items():
        print(name, {part: round(x, 6) for part, x in row.items()}, flush=True)
    write("grpo.json", {"environment": environment(), "sizes": sizes, "rows": rows}, given.out)


if __name__ == "__main__":
    main()
