"""LigerTrainer evaluates without logits, unless metrics ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ligermodels.errors import ConfigError
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.integrations.hf_trainer import LigerTrainer
from ligermodels.layers import LossHead
from tests.integrations.test_hf_model import examples
from tests.models import hf_models, zoo
from tests.tiny_models import random_model


def test_logits_are_made_only_for_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    logits = LossHead.logits

    def count(self: LossHead, *args: Any) -> Any:
        made.append(1)
        return logits(self, *args)

    monkeypatch.setattr(LossHead, "logits", count)
    model = LigerForCausalLM.from_native(random_model("llama", vocab_size=131))
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    rows = examples([12, 3])
    loss = LigerTrainer(model, arguments).evaluate(rows)["eval_loss"]
    assert not made
    metrics = {"compute_metrics": lambda found: {"size": found.predictions.size}}
    found = LigerTrainer(model, arguments, **metrics).evaluate(rows)
    assert made and found["eval_size"] == 2 * 12 * 131 and found["eval_loss"] == loss
    assert Trainer(model, arguments).evaluate(rows)["eval_loss"] == loss


def test_smoothed_labels_have_their_logits(tmp_path: Path) -> None:
    model = LigerForCausalLM.from_native(random_model("llama", vocab_size=131))
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, **options)
    rows = examples([12, 3])
    found = [cls(model, arguments).evaluate(rows)["eval_loss"] for cls in (LigerTrainer, Trainer)]
    assert found[0] == found[1]


def test_a_native_model_is_refused_where_logits_are_needed(tmp_path: Path) -> None:
    """Trainer itself fails, too, but with words about other things."""
    model = random_model("llama", vocab_size=131)
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    for name, value in {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0}.items():
        arguments = TrainingArguments(str(tmp_path), **{name: value}, **options)
        with pytest.raises(ConfigError, match=rf"{name}: .*LigerForCausalLM.from_native"):
            LigerTrainer(model, arguments)
    arguments = TrainingArguments(str(tmp_path), **options)
    with pytest.raises(ConfigError, match="compute_metrics: "):
        LigerTrainer(model, arguments, compute_metrics=lambda found: {})
    with pytest.raises(ConfigError, match="predict: "):
        LigerTrainer(model, arguments).predict(examples([12, 3]))
    assert LigerTrainer(model, arguments).evaluate(examples([12, 3]))["eval_loss"] > 0


def test_optimizer_states_of_transformers_model(tmp_path: Path) -> None:
    """They are resumed with split projections, in the order of HF's parameters, or refused."""
    # All biases and norms of this qwen2 have the same shape, so that only their order tells them.
    feature = zoo.Feature(config={"num_key_value_heads": 4, "head_dim": 12, "hidden_size": 48})
    hf_models.build("qwen2", feature).save_pretrained(tmp_path / "hf")
    rows = examples([12, 3, 7, 1, 9, 12, 2, 5])
    options: dict[str, Any] = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1}
    options |= {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True, **options)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    Trainer(hf, arguments, train_dataset=rows).train()
    states = torch.load(tmp_path / "run" / "checkpoint-2" / "optimizer.pt")["state"]
    assert states
    resume = str(tmp_path / "run" / "checkpoint-2")
    split = LigerForCausalLM.from_pretrained(tmp_path / "hf", split_projections=True)
    Trainer(split, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
    expected = dict(hf.named_parameters())
    for name, weight in split.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)

    packed = LigerForCausalLM.from_pretrained(tmp_path / "hf")
    trainer = LigerTrainer(packed, arguments, train_dataset=rows)
    with pytest.raises(ConfigError, match=r"checkpoint-2: its optimizer .* split_projections=True"):
        trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 2
