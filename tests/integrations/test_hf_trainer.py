"""LigerTrainer evaluates without logits, unless metrics ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

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
