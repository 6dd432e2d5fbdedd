"""A run ends early, keeps its best weights, and stops when its time is up; noise and smoothing."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import EarlyStoppingCallback
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.trainer_pt_utils import LabelSmoother

from ligermodels import LigerLlama
from ligermodels.errors import ConfigError
from ligermodels.training.processes import Interrupted
from ligermodels.training.trainer import Trainer
from tests.training.tiny_run import make_checkpoint, make_text, options, run, tensors, tiny_config


@pytest.fixture
def inputs(tmp_path):
    return make_checkpoint(tmp_path / "model"), make_text(tmp_path / "text.txt")


@pytest.fixture
def measured(monkeypatch):
    """Replace the perplexities of the evaluations after each step."""
    values = {0: 9.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 1.0}

    def evaluate(trainer, check):
        check()
        return {"eval_loss": 1.0, "eval_perplexity": values[trainer.done], "targets": 1}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    return values


def test_early_stopping_keeps_the_best_and_a_resumed_run_ends_there(inputs, measured, tmp_path):
    early = {"early_stopping_patience": 2, "keep_best": True, "eval_steps": 2, "max_steps": 10}
    early |= {"save_total_limit": 1, "save_steps": 8, "schedule": "constant", "warmup_steps": 0}
    result = run(*inputs, tmp_path / "run", **early)
    assert (result.steps, result.exported_step) == (8, 4)
    assert result.eval_after["eval_perplexity"] == 3.0
    assert any("ended early after step 8" in note for note in result.notes)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000008"]
    four = run(*inputs, tmp_path / "four", **early | {"max_steps": 4})
    one, other = tensors(four.model_dir), tensors(result.model_dir)
    assert all(torch.equal(one[name], other[name]) for name in one)

    again = run(*inputs, tmp_path / "run", resume=True, **early)
    assert (again.steps, again.eval_after) == (8, result.eval_after)


@pytest.mark.parametrize("higher", [True, False])
def test_early_stopping_ends_where_that_of_transformers_ends(higher):
    """For random evaluations, many of which are equal, and after none or a few of them."""
    args = SimpleNamespace(metric_for_best_model="x", greater_is_better=higher)
    draw, ends = random.Random(0), []
    for _ in range(200):
        patience, values = draw.randint(1, 3), [draw.randrange(5) for _ in range(8)]
        trainer = object.__new__(Trainer)
        trainer.objective = SimpleNamespace(higher_is_better=higher)
        trainer.config = SimpleNamespace(schedule=SimpleNamespace(early_stopping_patience=patience))
        trainer._evaluated, trainer.total_steps = {}, 100
        theirs, state = EarlyStoppingCallback(patience), SimpleNamespace(best_metric=None)
        control = SimpleNamespace(should_training_stop=False)
        for step, value in enumerate(values, 1):
            trainer.done = step
            trainer._evaluated[step] = value
            theirs.on_evaluate(args, state, control, {"eval_x": value})
            best = state.best_metric
            if best is None or (value > best if higher else value < best):
                state.best_metric = value  # as its Trainer does then
            assert trainer._is_at_end() == control.should_training_stop
            if control.should_training_stop:
                break
        ends.append(step)
    assert len({*ends}) > 5


def test_a_run_says_if_it_began_with_its_best_evaluation(inputs, measured, tmp_path):
    measured[0] = 0.5
    result = run(*inputs, tmp_path / "run", keep_best=True, eval_steps=2, max_steps=4)
    assert result.exported_step == 4
    assert any("no evaluation is better than that before" in note for note in result.notes)


def test_a_run_stops_when_its_time_is_up_and_goes_on(inputs, tmp_path):
    base = {"eval_fraction": 0, "max_steps": 2}
    with pytest.raises(Interrupted, match="max_hours: the time of 1e-09 hours was over before"):
        run(*inputs, tmp_path / "run", max_hours=1e-9, **base)
    result = run(*inputs, tmp_path / "run", resume=True, **base)
    whole = run(*inputs, tmp_path / "whole", **base)
    one, other = tensors(result.model_dir), tensors(whole.model_dir)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_noise_is_that_of_transformers_and_only_in_training(inputs, tmp_path):
    config = options(*inputs, tmp_path / "run", neftune_noise_alpha=5.0)
    model = LigerLlama(tiny_config())
    ids = torch.arange(12).view(2, 6)
    plain = model.embed_tokens(ids)
    objective = config.loss.objective(config)
    objective.module(model)
    torch.manual_seed(3)
    noisy = model.embed_tokens(ids)
    model.embed_tokens.neftune_noise_alpha = 5.0
    torch.manual_seed(3)
    assert torch.equal(noisy, neftune_post_forward_hook(model.embed_tokens, ids, plain))
    assert torch.equal(model.eval().embed_tokens(ids), plain)
    objective.end()
    assert torch.equal(model.train().embed_tokens(ids), plain)


def test_label_smoothing_changes_the_loss_of_training_alone(inputs, tmp_path):
    run(*inputs, tmp_path / "plain", max_steps=1)
    run(*inputs, tmp_path / "smooth", max_steps=1, label_smoothing=0.3)
    logs = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "smooth")
    ]
    assert logs[0][0]["eval_loss"] == logs[1][0]["eval_loss"]
    assert logs[1][1]["loss"] != logs[0][1]["loss"]
    model = LigerLlama(tiny_config())
    ids = torch.arange(12).view(2, 6)
    smooth = LabelSmoother(0.3)({"logits": model.head.logits(model(ids))}, ids, shift_labels=True)
    torch.testing.assert_close(model(ids, labels=ids, label_smoothing=0.3).loss, smooth)
    with pytest.raises(ConfigError, match="label_smoothing: this is for loss_type nll, not dft"):
        options(*inputs, tmp_path, label_smoothing=0.1, loss_type="dft")


@pytest.mark.parametrize("name", ["early_stopping_patience", "keep_best"])
def test_what_needs_an_evaluation_is_refused_without_one(inputs, tmp_path, name):
    with pytest.raises(ConfigError, match=f"{name}: this needs eval_files"):
        options(*inputs, tmp_path, eval_fraction=0, **{name: True if name == "keep_best" else 1})
