"""Runs with a teacher: the student comes closer to it, counts exactly, and resumes exactly."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels import AutoLiger, LigerLlama
from ligermodels.errors import ConfigError, LigerError
from ligermodels.layers import LossHead
from ligermodels.losses.distillation import distillation
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.finetune import finetune
from ligermodels.training.model import load_checkpoint
from ligermodels.training.trainer import Trainer
from tests.training.tiny_run import (
    forget,
    make_checkpoint,
    make_text,
    make_tokenizer,
    options,
    same,
    tensors,
    tiny_config,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a student, a wider teacher and a text."""
    path = tmp_path_factory.mktemp("teacher")
    make_checkpoint(path / "model")
    torch.manual_seed(1)
    config = tiny_config(hidden_size=32, vocab_size=264, initializer_range=0.3)
    LigerLlama(config).save_hf(path / "teacher")  # padded to more classes than there are tokens
    make_tokenizer(path / "teacher")
    make_text(path / "text.txt")
    return path


def settings(folder: Path, out: Path, **changes):
    given = {
        "loss": "distillation",
        "teacher": str(folder / "teacher"),
        "temperature": 2.0,
        "eval_steps": 6,
    } | changes
    return options(folder / "model", folder / "text.txt", out, **given)


@pytest.mark.parametrize("beta", [0.5, pytest.param(0.0, marks=pytest.mark.long), 1.0])
def test_a_student_comes_closer_to_its_teacher_and_resumes(
    folder: Path, tmp_path: Path, beta: float
) -> None:
    result = finetune(settings(folder, tmp_path, beta=beta, save_steps=3), progress=False)
    assert result.eval_after["eval_loss"] < 0.95 * result.eval_before["eval_loss"]
    assert result.shown == ("eval_loss", "loss") and result.eval_after["eval_nll"] > 0
    trained = tensors(result.model_dir)
    forget(tmp_path, 6)  # it was killed after step 3
    with pytest.raises(LigerError, match=r"distill_weight: the run was started with 1.0"):
        finetune(settings(folder, tmp_path, beta=beta, resume=True, distill_weight=0.5))
    finetune(settings(folder, tmp_path, beta=beta, save_steps=3, resume=True), progress=False)
    assert same(tensors(result.model_dir), trained)


def test_an_adapter_is_a_teacher(folder: Path, tmp_path: Path) -> None:
    """The folder of an adapter may have no tokenizer, as that of PEFT. Its base must stay."""
    shutil.copytree(folder / "model", base := tmp_path / "base")
    given = {"lora_r": 2, "export": "adapter", "max_steps": 1}
    config = options(base, folder / "text.txt", tmp_path / "a", **given)
    adapter = finetune(config, progress=False)
    (adapter.model_dir / "tokenizer.json").unlink()
    teacher = {"teacher": str(adapter.model_dir), "max_steps": 1}
    made = finetune(settings(folder, tmp_path / "b", **teacher), progress=False)
    assert 0 < made.eval_before["eval_loss"] < 1e-3  # it was trained for one step
    negate(base / "model.safetensors")
    with pytest.raises(LigerError, match="was started with: teacher changed"):
        finetune(settings(folder, tmp_path / "b", resume=True, **teacher), progress=False)


def negate(file: Path) -> None:
    save_file({name: -x for name, x in load_file(file).items()}, file)


def test_a_run_is_not_resumed_with_another_teacher(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "teacher", teacher := tmp_path / "teacher")
    config = {"teacher": str(teacher), "save_steps": 1, "max_steps": 2}
    first = finetune(settings(folder, tmp_path / "run", **config), progress=False)
    load_checkpoint(first.output_dir, 1)
    shutil.rmtree(first.model_dir)
    forget(tmp_path / "run", 2)
    negate(teacher / "model.safetensors")
    with pytest.raises(LigerError, match="was started with: teacher changed"):
        finetune(settings(folder, tmp_path / "run", resume=True, **config), progress=False)


def test_the_loss_of_a_batch(folder: Path, tmp_path: Path) -> None:
    """It is the divergence of both models at the targets; micro-batches add up to it."""
    config = settings(folder, tmp_path, beta=0.3, distill_weight=0.75)
    model = AutoLiger.from_hf(folder / "model", dtype=torch.float32)
    teacher = AutoLiger.from_hf(folder / "teacher", dtype=torch.float32)
    objective = config.loss.objective(config)
    tokenizer = Tokenizer.from_hf(folder / "model")
    objective.open(tokenizer)
    rows = objective.rows([objective.read(config.data.train_files, tokenizer)])
    assert objective.load(model) == 0  # the plan counts the teacher
    trainer = Trainer(model, config, rows, None, torch.device("cpu"), objective)
    batch = rows.batch(range(4))
    count = torch.tensor(float(batch.num_targets))
    made = objective.loss(trainer.call, batch, count)
    given = {"position_ids": batch.position_ids}
    targets = torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=-100)
    ends = torch.nn.functional.pad(batch.position_ids[:, 1:] == 0, (0, 1), value=True)
    targets = targets.masked_fill(ends, -100)
    cut = LossHead(32, 258)
    cut.proj.weight = torch.nn.Parameter(teacher.head.weight[:258].detach())
    want = distillation(
        model.head,
        model(batch.input_ids, **given),
        cut,
        teacher(batch.input_ids, **given),
        targets=targets,
        beta=0.3,
        temperature=2.0,
    )
    own = model(batch.input_ids, labels=batch.labels, **given).loss
    torch.testing.assert_close(made.loss, 0.75 * want + 0.25 * own)
    halves = [
        objective.loss(trainer.call, rows.batch(part), count).loss for part in ((0, 1), (2, 3))
    ]
    torch.testing.assert_close(sum(halves), made.loss)


def test_a_budget_that_is_too_small_counts_the_teacher(folder: Path, tmp_path: Path) -> None:
    held = sum(x.nbytes for x in AutoLiger.from_hf(folder / "teacher").parameters())
    with pytest.raises(ConfigError, match="too small") as raised:
        finetune(settings(folder, tmp_path / "out", memory="1KiB"), progress=False)
    alone = options(folder / "model", folder / "text.txt", tmp_path / "out", memory="1KiB")
    with pytest.raises(ConfigError, match="too small") as without:
        finetune(alone, progress=False)
    least = [int(re.findall(r"at least (\d+)", str(x.value))[0]) for x in (raised, without)]
    assert least[0] > least[1] + held
    assert not (tmp_path / "out").exists()


def test_a_teacher_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"<s>"', '"<start>"'))
    config = settings(folder, tmp_path / "out", teacher=str(other))
    with pytest.raises(ConfigError, match=r"another vocabulary: its token 256 is '<start>'"):
        finetune(config, progress=False)
    small = make_checkpoint(tmp_path / "small")
    big = make_checkpoint(tmp_path / "big", vocab_size=270)
    config = options(
        big, folder / "text.txt", tmp_path / "out", loss="distillation", teacher=str(small)
    )
    with pytest.raises(ConfigError, match=r"a vocabulary of 258 classes and .* one of 270"):
        finetune(config, progress=False)
    assert not (tmp_path / "out").exists()
