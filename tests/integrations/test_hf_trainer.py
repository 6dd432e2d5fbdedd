"""LigerTrainer evaluates without logits, unless metrics ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from ligermodels.errors import ConfigError
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.integrations.hf_trainer import LigerTrainer
from ligermodels.layers import LossHead
from tests.integrations.test_hf_model import examples
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
