"""A loss of one's own that trains Medusa's heads: both stages, the export, generation with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import medusa
from ligermodels import AutoLiger
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.heads.medusa_file import load_heads
from ligermodels.training.finetune import finetune
from tests.models.pairs import relative
from tests.models.test_base import tokens, with_third
from tests.training.tiny_run import forget, make_checkpoint, options, same, tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("medusa")
    make_checkpoint(path / "model")
    (path / "text.txt").write_text("\n\n".join(["the cat saw a dog and a cat. " * 3] * 30))
    return path


def settings(folder: Path, out: Path, model: Path | None = None, **changes):
    given = {
        "loss": medusa.Medusa.name,
        "medusa_heads": 2,
        "eval_steps": 6,
        "learning_rate": 1e-2,
    } | changes
    return options(model or folder / "model", folder / "text.txt", out, **given)


def test_both_stages(folder: Path, tmp_path: Path) -> None:
    one = finetune(settings(folder, tmp_path / "one", save_steps=3), progress=False)
    key = one.shown[0]
    assert one.eval_after[key] < one.eval_before[key]
    assert one.eval_after["eval_head_2_loss"] < one.eval_before["eval_head_2_loss"]
    assert same(tensors(one.model_dir), tensors(folder / "model"))  # the body was frozen
    first = load_heads(one.model, one.model_dir)
    assert first is not None and len(first.blocks) == 2 and not first.tied
    forget(tmp_path / "one", 6)
    finetune(settings(folder, tmp_path / "one", save_steps=3, resume=True), progress=False)
    again = load_heads(one.model, one.model_dir)
    assert again is not None and same(first.state_dict(), again.state_dict())

    second = {"medusa_stage": 2, "max_steps": 2, "learning_rate": 1e-3}
    two = finetune(settings(folder, tmp_path / "two", one.model_dir, **second), progress=False)
    # The second stage began with the heads of the first one.
    assert two.eval_before[key] == pytest.approx(one.eval_after[key], rel=1e-5)
    assert two.eval_after[key] < two.eval_before[key]
    assert not same(tensors(two.model_dir), tensors(one.model_dir))

    model = AutoLiger.from_hf(two.model_dir)
    heads = load_heads(model, two.model_dir)
    prompt = list(b"the cat saw")
    given = {"max_new_tokens": 24, "eos_token_id": []}
    greedy = model.generate(prompt, **given)
    assert torch.equal(model.generate(prompt, heads=heads, **given), greedy)


def test_tied_heads_and_micro_batches(folder: Path, tmp_path: Path) -> None:
    """Two micro-batches of a step give the loss of one batch; few targets are skipped to."""
    losses = []
    for size, count in ((4, 1), (2, 2)):
        config = settings(
            folder,
            tmp_path / str(count),
            batch_size=size,
            gradient_accumulation_steps=count,
            medusa_tied=True,
            max_steps=2,
        )
        result = finetune(config, progress=False)
        losses.append([entry["loss"] for entry in result.metrics if "loss" in entry])
        assert load_heads(result.model, result.model_dir).tied
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_losses_of_the_stages() -> None:
    """The first trains the heads alone; the second also the body, with what its layers add."""
    body = with_third()
    heads = MedusaHeads(body.head, 2)
    first, (ids, labels) = medusa.MedusaModel(body, heads), tokens()
    first(ids, labels=labels).loss.backward()
    assert all(x.grad is None for x in body.parameters())
    assert all(x.grad is not None for x in heads.parameters())
    second = medusa.MedusaModel(body, heads, freeze_body=False, heads_weight=0.5)
    for given in ({}, {"normalizer": 40}):
        out, own = second(ids, labels=labels, **given), body(ids, labels=labels, **given)
        assert own.auxiliary_loss > 0
        wanted = own.loss + 0.5 * first(ids, labels=labels, **given).loss
        assert relative(out.loss, wanted) <= 1e-6
    out.loss.backward()
    assert all(x.grad is not None for x in body.parameters())
