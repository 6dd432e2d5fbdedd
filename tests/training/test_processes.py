"""Fine-tuning runs of two processes make the steps of one, and each resumes the other's runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ligermodels import AutoLiger, ConfigError, LigerError
from ligermodels.ranks import rank
from ligermodels.training import finetune as stages
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.data import Document, Group
from ligermodels.training.finetune import finetune
from ligermodels.training.grpo import GRPOObjective, Sample
from ligermodels.training.processes import (
    Interrupted,
)
from ligermodels.training.trainer import Trainer
from tests.parallel.ranks import Case, check, run_ranks
from tests.rounding import ADAM_EPSILON
from tests.training.tiny_run import make_checkpoint, make_text

SIZES: dict[str, Any] = {
    "seq_len": 32,
    "batch_size": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "adam_epsilon": ADAM_EPSILON,
    "save_steps": 2,
    "save_total_limit": 5,
    "max_eval_rows": 5,
    "eval_fraction": 0.25,
    "device": "cpu",
}


LORA = {"lora_r": 2, "load_in": "4bit", "learning_rate": 1e-2}
REWARDS = f"{__name__}:rewards"
ADAPTED = {"lora_r": 2, "learning_rate": 1e-2}
BALANCE = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}


def options(folder: Path, name: str, **changes: Any) -> FinetuneConfig:
    return FinetuneConfig.from_options(
        model=str(folder / "base"),
        train_files=[str(folder / "text.txt")],
        output_dir=str(folder / name),
        **{**SIZES, **changes},
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoLiger.from_hf(folder / "model").state_dict()


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry.get("loss", entry.get("eval_loss")) for entry in map(json.loads, lines)]


def metrics(folder: Path) -> dict[str, list[float]]:
    """Return all that a run has logged, but for the times."""
    found: dict[str, list[float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line).items():
            if name not in ("seconds", "tokens_per_second"):
                found.setdefault(name, []).append(value)
    return found


def pairs(folder: Path, name: str, loss: str, **changes: Any) -> FinetuneConfig:
    """Return a run with a loss of pairs, whose steps and evaluations have three batches."""
    changes = {"gradient_accumulation_steps": 3, "eval_fraction": 0.25, **changes}
    changes = {"seq_len": 64, "max_eval_rows": None, "loss": loss, **changes}
    config = options(folder, name, **changes)
    config.data.train_files = [str(folder / "pairs.jsonl")]
    return config


def make_pairs(file: Path) -> None:
    words = "cat dog bird fish".split()
    records = [
        {"prompt": f"{a} {i}:", "chosen": f" {a}" * (1 + i % 3), "rejected": f" {b}"}
        for i in range(5)
        for a, b in zip(words, words[1:] + words[:1])
    ]
    file.write_text("\n".join(map(json.dumps, records)))


def back_to(folder: Path, step: int) -> None:
    """Let a run look as if it had been killed after a step."""
    shutil.rmtree(folder / "model")
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def test_two_processes_make_the_steps_of_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    make_checkpoint(tmp_path / "base")
    make_text(tmp_path / "text.txt")
    alone = options(tmp_path, "alone", gradient_accumulation_steps=2)
    finetune(alone, progress=False)
    # The processes resume these.
    shutil.copytree(tmp_path / "alone", tmp_path / "from alone")
    back_to(tmp_path / "from alone", 2)
    make_resumed_pairs(tmp_path, "dpo")
    finetune(with_experts(tmp_path, "experts alone", 4), progress=False)
    finetune(with_experts(tmp_path, "adapted experts alone", 4, **ADAPTED), progress=False)
    check(run_ranks(__name__, 2, tmp_path), subtests)

    expected = weights(tmp_path / "alone")
    for name in ("two", "from alone", "split"):
        with subtests.test(name):
            assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
            for key, value in weights(tmp_path / name).items():
                torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=2e-6)
    for name in ("dpo", "experts", "adapted experts"):
        with subtests.test(name):
            compare(tmp_path, name)
    assert metrics(tmp_path / "split")["tokens"] == metrics(tmp_path / "alone")["tokens"]
    with subtests.test("a process resumes the run of two"):
        back_to(tmp_path / "two", 2)
        one = options(tmp_path, "two", resume=True)
        finetune(one, progress=False)
        for key, value in weights(tmp_path / "two").items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=2e-6)


@pytest.mark.long
def test_two_processes_of_other_losses(tmp_path: Path, subtests: pytest.Subtests) -> None:
    make_checkpoint(tmp_path / "base")
    make_text(tmp_path / "text.txt")
    make_resumed_pairs(tmp_path, "kto")
    finetune(
        pairs(tmp_path, "dpo even alone", "dpo", gradient_accumulation_steps=2), progress=False
    )
    config = pairs_with_experts(tmp_path, "alone", gradient_accumulation_steps=2)
    finetune(config, progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOObjective, "_sample", drawn)
        finetune(grpo(tmp_path, "grpo alone", gradient_accumulation_steps=2), progress=False)
    adapted = options(tmp_path, "adapted alone", gradient_accumulation_steps=2, **LORA)
    finetune(adapted, progress=False)
    make_checkpoint(tmp_path / "teacher", hidden_size=32)
    finetune(taught(tmp_path, "taught alone", gradient_accumulation_steps=2), progress=False)
    check(run_ranks(__name__, 2, tmp_path, True), subtests)
    for name in ("kto", "dpo even", "dpo experts", "grpo", "taught"):
        with subtests.test(name):
            compare(tmp_path, name)
    back_to(tmp_path / "adapted again", 2)
    finetune(options(tmp_path, "adapted again", resume=True, **LORA), progress=False)
    expected_adapted = weights(tmp_path / "adapted alone")
    for name in ("adapted two", "adapted again"):
        with subtests.test(name):
            alone_losses = losses(tmp_path / "adapted alone")
            assert losses(tmp_path / name) == pytest.approx(alone_losses, rel=1e-5)
            for key, value in weights(tmp_path / name).items():
                torch.testing.assert_close(value, expected_adapted[key], rtol=1e-4, atol=1e-5)


def compare(folder: Path, name: str) -> None:
    """Assert that a run of two processes logs what a run of one does, and has its weights."""
    one, two = (folder / f"{name} {count}" for count in ("alone", "two"))
    logged = metrics(one)
    assert logged.keys() == metrics(two).keys()
    for key, values in metrics(two).items():
        assert values == pytest.approx(logged[key], rel=1e-4, abs=1e-5), key
    expected = weights(one)
    for key, value in weights(two).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=2e-6)


def cases(ranks: int, of_other_losses: bool = False) -> dict[str, Case]:
    if of_other_losses:
        return {
            "adapters, and again from the middle": partial(
                run_twice, "adapted two", "adapted again", **LORA
            ),
            "losses of pairs": losses_of_pairs,
            "copies and samples on two ranks": copies_and_samples,
        }
    return {
        "a run, and again from its middle": partial(run_twice, "two", "again"),
        "an interrupted evaluation": interrupted_evaluation,
        "a resumed run of one process": resume_alone,
        "rows that both compute": split_rows,
        "experts that both hold": split_experts,
        "adapters of experts": adapted_experts,
        "a resumed loss of pairs": resumed_pairs,
        "an interrupted plan": interrupted_plan,
        "an error on one rank": partial(error_on_a_rank, 1),
    }


def run_twice(
    first: str, again: str, number: int, folder: Path, **changes: Any
) -> dict[str, float]:
    """Resuming on as many ranks gives the same files, bit for bit."""
    root = folder.parent
    result = finetune(options(root, first, **changes), progress=False)
    if number == 0:
        shutil.copytree(root / first, root / again)
        back_to(root / again, 2)
    dist.barrier()
    finetune(options(root, again, resume=True, **changes), progress=False)
    dist.barrier()
    files = [(root / name / "model/model.safetensors").read_bytes() for name in (first, again)]
    return {"steps": abs(result.steps - 4), "files": float(files[0] != files[1])}


def interrupted_evaluation(number: int, folder: Path) -> dict[str, float]:
    """A signal between two batches of an evaluation loses nothing."""
    root, evaluate = folder.parent, Trainer.evaluate

    def interrupted(self: Trainer, check: Callable[[], None]) -> dict[str, float]:
        def check_and_send() -> None:
            check()
            if self.done == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        return evaluate(self, check_and_send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", interrupted)
        with pytest.raises(Interrupted) as stop:
            finetune(options(root, "interrupted"), progress=False)
    assert "the state after step 3 is saved" in str(stop.value), stop.value
    dist.barrier()
    finetune(options(root, "interrupted", resume=True), progress=False)
    dist.barrier()
    names = ("two", "interrupted")
    files = [(root / name / "model/model.safetensors").read_bytes() for name in names]
    return {"files": float(files[0] != files[1])}


def interrupted_plan(number: int, folder: Path) -> dict[str, float]:
    """A signal that rank 0 alone gets while it plans the memory ends the run on all ranks."""

    def interrupted(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ligermodels.memory.fit.find_plan", interrupted)
        with pytest.raises(Interrupted, match="before the run began"):
            finetune(options(folder.parent, "planned", memory="8GiB"), progress=False)
    return {"run": float((folder.parent / "planned/run.json").exists())}


def resume_alone(number: int, folder: Path) -> dict[str, float]:
    config = options(folder.parent, "from alone", gradient_accumulation_steps=2, resume=True)
    return {"steps": abs(finetune(config, progress=False).steps - 4)}


def split_rows(number: int, folder: Path) -> dict[str, float]:
    """Context parallelism makes the steps of one process."""
    changes: dict[str, Any] = {"context_parallel": 2, "gradient_accumulation_steps": 2}
    config = options(folder.parent, "split", **changes)
    result = finetune(config, progress=False)
    with pytest.raises(ConfigError, match="context_parallel: 3 processes for each row, but 2 run"):
        finetune(options(folder.parent, "odd", context_parallel=3), progress=False)
    return {"steps": abs(result.steps - 4)}


def with_experts(folder: Path, name: str, count: int, **changes: Any) -> FinetuneConfig:
    """Return a run of a model with three experts, in so many micro-batches a step."""
    config = options(folder, name, gradient_accumulation_steps=count, **BALANCE, **changes)
    config.model.path = str(base_of_experts(folder))
    return config


def pairs_with_experts(folder: Path, name: str, **changes: Any) -> FinetuneConfig:
    """Return such a run with a loss of pairs."""
    config = pairs(folder, f"dpo experts {name}", "dpo", **BALANCE, **changes)
    config.model.path = str(base_of_experts(folder))
    return config


def base_of_experts(folder: Path) -> Path:
    base = folder / "base of experts"
    if not base.exists():
        sizes = {"num_experts": 3, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
        make_checkpoint(base, "qwen3_moe", **sizes)
    return base


def split_experts(number: int, folder: Path) -> dict[str, float]:
    """Expert parallelism makes the steps of one process, and so does its resumed half."""
    config = with_experts(folder.parent, "experts two", 2, expert_parallel=2)
    result = finetune(config, progress=False)
    dist.barrier()
    if number == 0:
        back_to(folder.parent / "experts two", 2)
    dist.barrier()
    finetune(replace(config, output=replace(config.output, resume=True)), progress=False)
    with pytest.raises(ConfigError, match="expert_parallel: 3 processes for the experts of a lay"):
        finetune(with_experts(folder.parent, "odd", 2, expert_parallel=3), progress=False)
    return {"steps": abs(result.steps - 4)}


def adapted_experts(number: int, folder: Path) -> dict[str, float]:
    """So do adapters, which are merged at first, and exported alone by the resumed half."""
    config = with_experts(folder.parent, "adapted experts two", 2, expert_parallel=2, **ADAPTED)
    steps = finetune(config, progress=False).steps
    dist.barrier()
    if number == 0:
        back_to(folder.parent / "adapted experts two", 2)
    dist.barrier()
    alone = replace(config.adapter, export="adapter")
    output = replace(config.output, resume=True)
    finetune(replace(config, output=output, adapter=alone), progress=False)
    return {"steps": abs(steps - 4)}


def make_resumed_pairs(folder: Path, loss: str) -> None:
    """Make a run with a loss of pairs, and half of it for two processes to resume."""
    make_pairs(folder / "pairs.jsonl")
    finetune(pairs(folder, f"{loss} alone", loss), progress=False)
    shutil.copytree(folder / f"{loss} alone", folder / f"{loss} two")
    back_to(folder / f"{loss} two", 2)


def resumed_pairs(number: int, folder: Path, loss: str = "dpo") -> dict[str, float]:
    """Two ranks share out three batches."""
    config = pairs(folder.parent, f"{loss} two", loss, resume=True)
    return {"steps": abs(finetune(config, progress=False).steps - 4)}


def losses_of_pairs(number: int, folder: Path) -> dict[str, float]:
    """With two batches, the ranks also compute the reference's file."""
    changes = {"expert_parallel": 2, "gradient_accumulation_steps": 1}
    finetune(pairs_with_experts(folder.parent, "two", **changes), progress=False)
    even = pairs(folder.parent, "dpo even two", "dpo", gradient_accumulation_steps=1)
    return {
        "even steps": abs(finetune(even, progress=False).steps - 4),
        **resumed_pairs(number, folder, "kto"),
    }


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Return the share of letters in each completion."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


def rewards_of_rank_0(completions: list[str], **_: Any) -> list[float | None]:
    """Return no reward on the other ranks, as if their prompts had none."""
    return [None if rank() else float(i) for i in range(len(completions))]


def drawn(objective: GRPOObjective, groups: list[Group]) -> list[Sample]:
    """Return completions that depend on the prompts alone, and not on which rank samples them."""
    samples = []
    for i, group in enumerate(groups):
        prompt = group.documents[0].ids
        generator = torch.Generator().manual_seed(int(prompt.sum()) * 4 + i % 4)
        new = torch.randint(97, 123, (6,), generator=generator).numpy()
        ids = np.concatenate([prompt, new.astype(np.int32)])
        document = Document(ids, np.arange(len(ids)) >= len(prompt), divisible=False)
        samples.append(Sample(document, True, torch.zeros(6)))
    return samples


def grpo(folder: Path, name: str, **changes: Any) -> FinetuneConfig:
    """Return a run whose steps sample four completions of each of two prompts."""
    sampling = {"num_generations": 4, "max_completion_length": 6, "reward_function": REWARDS}
    common = {"batch_size": 4, "beta": 0.1, "max_steps": 2}
    common |= {"eval_steps": 2, "max_eval_rows": 3}
    return pairs(folder, name, "grpo", **{"save_steps": 0} | sampling | common | changes)


def taught(folder: Path, name: str, **changes: Any) -> FinetuneConfig:
    teacher = {"loss": "distillation", "teacher": str(folder / "teacher"), "distill_weight": 0.7}
    return options(folder, name, max_steps=2, eval_steps=2, save_steps=0, **teacher, **changes)


def copies_and_samples(number: int, folder: Path) -> dict[str, float]:
    """Two ranks learn as one does, and sample on policy."""
    root = folder.parent
    config = grpo(root, "grpo two", gradient_accumulation_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOObjective, "_sample", drawn)
        finetune(config, progress=False)
    finetune(taught(root, "taught two"), progress=False)
    once = {"gradient_accumulation_steps": 1, "max_steps": 3}
    reward = f"{__name__}:rewards_of_rank_0"
    some = finetune(grpo(root, "grpo some", reward_function=reward, **once), progress=False)
    key = "sampling/sampling_logp_difference/mean"
    differences = [each[key] for each in some.metrics if key in each]
    assert len(differences) == 3
    of_some = next(each["reward"] for each in some.metrics if "reward" in each)
    return {
        "weights of the sampler": float(max(differences) > 1e-5),
        "rewards of rank 0": abs(of_some - 1.5),
    }


def error_on_a_rank(failing: int, number: int, folder: Path) -> dict[str, float]:
    """All ranks raise the error of one of them, and one of them reports it."""
    config = options(folder.parent, f"failed {number if number == failing else 0}")
    if number == failing:
        config.data.train_files = [str(folder / "missing.txt")]
    try:
        finetune(config, progress=False)
    except LigerError as error:
        assert "missing.txt" in str(error), error
        return {"reported": float(error.is_repeated == (number == failing))}
    raise AssertionError("a missing file is no error")


def test_the_end_of_another_process_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "[/pytorch/third_party/gloo/pair.cc:537] Connection reset by peer"
    monkeypatch.setattr(stages.Run, "run", Mock(side_effect=RuntimeError(said)))
    with pytest.raises(LigerError, match=r"has ended or hangs: .*reset by peer"):
        finetune(options(tmp_path, "run"), progress=False)
