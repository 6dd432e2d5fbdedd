"""HF's Trainer on wrappers and native models: the numbers of transformers' model, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ligermodels.heads.classifier import LigerClassifier
from ligermodels.integrations.hf_model import LigerForCausalLM, LigerForSequenceClassification
from ligermodels.integrations.hf_trainer import LigerTrainer
from ligermodels.layers import LossHead
from ligermodels.models.auto import AutoLiger
from tests.integrations.tiny import theirs, tokenizer
from tests.models import hf_models, zoo
from tests.tiny_models import random_model


def quiet(folder: Path, **options: Any) -> TrainingArguments:
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(str(folder), **(quiet | options))


def examples(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Rows of 12 tokens with labels for so many of them."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in lengths:
        row = torch.randint(3, 131, (12,), generator=generator).tolist()
        rows.append({"input_ids": row, "labels": [-100] * (12 - length) + row[12 - length :]})
    return rows


def train(
    model: Any, folder: Path, rows: list[Any], collator: Any = None, **options: Any
) -> list[float]:
    """Return the losses of a run of Trainer."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 1,
    }
    given = quiet(folder, **(arguments | options))
    trainer = Trainer(model, given, collator, train_dataset=rows)
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


LOADS = {"native": AutoLiger.from_hf, "wrapper": LigerForCausalLM.from_pretrained}


def test_losses_of_trainer(folders: dict[str, Path], tmp_path: Path) -> None:
    """With noise on the embeddings; cells of the matrix are plain and recompute."""
    rows, options = examples([12, 3, 7, 1, 9, 12, 2, 5] * 5), {"neftune_noise_alpha": 3.0}
    ours = train(LigerForCausalLM.from_pretrained(folders["llama"]), tmp_path, rows, **options)
    expected = train(theirs(folders["llama"]), tmp_path, rows, **options)
    assert ours == pytest.approx(expected, rel=1e-5) and len(set(ours)) == len(ours)


def test_an_optimizer_that_sees_whole_matrices(folders: dict[str, Path], tmp_path: Path) -> None:
    """Adafactor keeps sums of rows and of columns, so that packed projections share them."""
    rows, options = examples([12, 3, 7, 1, 9, 12, 2, 5]), {"optim": "adafactor"}
    ours = LigerForCausalLM.from_pretrained(folders["llama"], split_projections=True)
    expected = train(theirs(folders["llama"]), tmp_path, rows, **options)
    assert train(ours, tmp_path, rows, **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}], ids=len)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_flattened_batches_equal_padded_ones(
    load: Any, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The collator gives the starts of documents in five ways; no document sees another one."""
    ids = [row["input_ids"][: 3 + i % 5] for i, row in enumerate(examples([0] * 8))]
    padded = [
        {
            "input_ids": row + [2] * (7 - len(row)),
            "labels": row + [-100] * (7 - len(row)),
            "attention_mask": [1] * len(row) + [0] * (7 - len(row)),
        }
        for row in ids
    ]
    flat = DataCollatorWithFlattening(return_seq_idx=bool(options), **options)
    found = []
    for rows, collator in (([{"input_ids": row} for row in ids], flat), (padded, None)):
        model = load(folders["llama"])
        losses = train(model, tmp_path, rows, collator)
        metrics = Trainer(model, quiet(tmp_path), collator, eval_dataset=rows).evaluate()
        found.append([*losses, metrics["eval_loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_documents_told_by_seq_idx_alone_are_refused(load: Any, folders: dict[str, Path]) -> None:
    numbers = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seq_idx: .*position_ids or cu_seq_lens_q"):
        load(folders["llama"])(input_ids=torch.tensor([[5, 6, 7]]), seq_idx=numbers)


@pytest.mark.parametrize(("family", "kind"), [("llama", "native"), ("gemma", "wrapper")])
def test_it_resumes_bitwise(
    family: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The checkpoints of a wrapper have HF's names."""
    rows = examples([12, 3, 7, 1, 9, 12, 2, 5])
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    whole, again = (LOADS[kind](folders[family]) for _ in range(2))
    losses = train(whole, tmp_path, rows, **options)
    resume = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    assert train(again, tmp_path, rows, **resume, **options) == losses
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    models, reader = (LOADS[kind](folders[family]), theirs(folders[family])), tokenizer()
    ours, expected = (
        Trainer(x, quiet(tmp_path), processing_class=reader).evaluate(rows) for x in models
    )
    assert ours["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    if kind == "wrapper":
        theirs(tmp_path / "checkpoint-4")


def test_labels_are_smoothed_by_the_head(folders: dict[str, Path], tmp_path: Path) -> None:
    """Trainer's own smoothing needs logits; the head's gives the same numbers."""
    rows, model = examples([12, 3, 7, 1]), AutoLiger.from_hf(folders["llama"])
    model.head.loss_options["label_smoothing"] = 0.1
    hf = train(theirs(folders["llama"]), tmp_path, rows, label_smoothing_factor=0.1)
    assert train(model, tmp_path, rows) == pytest.approx(hf, rel=1e-5)


def test_logits_are_made_only_for_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    logits = LossHead.logits

    def count(self: LossHead, *args: Any) -> Any:
        made.append(1)
        return logits(self, *args)

    monkeypatch.setattr(LossHead, "logits", count)
    model = LigerForCausalLM.from_native(random_model("llama", vocab_size=131))
    arguments = quiet(tmp_path)
    rows = examples([12, 3])
    loss = LigerTrainer(model, arguments).evaluate(rows)["eval_loss"]
    assert not made
    metrics = {"compute_metrics": lambda found: {"size": found.predictions.size}}
    found = LigerTrainer(model, arguments, **metrics).evaluate(rows)
    assert made and found["eval_size"] == 2 * 12 * 131 and found["eval_loss"] == loss
    assert Trainer(model, arguments).evaluate(rows)["eval_loss"] == loss


def token_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def test_a_loss_of_its_own_has_its_logits(tmp_path: Path) -> None:
    model = LigerForCausalLM.from_native(random_model("llama", vocab_size=131))
    arguments = quiet(tmp_path)
    rows, loss = examples([12, 3]), {"compute_loss_func": token_mean}
    expected = Trainer(model, arguments).evaluate(rows)["eval_loss"]
    assert LigerTrainer(model, arguments, **loss).evaluate(rows)["eval_loss"] == pytest.approx(
        expected, rel=1e-6
    )
    with pytest.raises(ValueError, match=r"for compute_loss_func, .*from_native"):
        Trainer(model.native, arguments, **loss).evaluate(rows)


PROBLEMS: dict[str, Any] = {
    "regression": (1, lambda i: [float(i)]),
    "single_label_classification": (3, lambda i: i % 3),
    "multi_label_classification": (3, lambda i: [float(i >> bit & 1) for bit in range(3)]),
}


class Gradients(TrainerCallback):
    """Keeps the gradient of the score at each step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.found.append(getattr(model, "head", model).score.weight.grad.clone())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_classifiers_train_as_in_transformers(problem: str, tmp_path: Path) -> None:
    """Accumulated steps are those of one batch; on transformers' model Trainer adds the means."""
    count, label = PROBLEMS[problem]
    config = {"num_labels": count, "problem_type": problem, "pad_token_id": 2}
    hf_models.build("llama", zoo.Feature()).save_pretrained(tmp_path / "lm")
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", **config)
    made.save_pretrained(tmp_path / "hf")
    rows = [
        {"input_ids": row["input_ids"], "labels": label(i)}
        for i, row in enumerate(examples([0] * 8))
    ]

    def run(load: Any, size: int) -> tuple[list[float], list[Tensor], Any]:
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        options |= {"logging_steps": 1, "max_steps": 2, "optim": "sgd", "learning_rate": 1e-3}
        arguments = quiet(tmp_path, save_strategy="no", seed=1, **options)
        gradients = Gradients()
        trainer = Trainer(
            load(tmp_path / "hf"), arguments, train_dataset=rows, callbacks=[gradients]
        )
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return losses, gradients.found, trainer.predict(rows).predictions

    losses, gradients, logits = run(AutoModelForSequenceClassification.from_pretrained, 4)
    for load in (LigerForSequenceClassification.from_pretrained, LigerClassifier.from_hf):
        for size in (4, 2):
            found = run(load, size)
            assert found[0] == pytest.approx(losses, rel=1e-5)
            for mine, other in zip(found[1], gradients, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                torch.tensor(found[2]), torch.tensor(logits), rtol=1e-4, atol=1e-4
            )


def test_optimizer_states_of_transformers_model(tmp_path: Path) -> None:
    """They are resumed with split projections, in the order of HF's parameters."""
    # All biases and norms of this qwen2 have the same shape, so that only their order tells them.
    feature = zoo.Feature(config={"num_key_value_heads": 4, "head_dim": 12, "hidden_size": 48})
    hf_models.build("qwen2", feature).save_pretrained(tmp_path / "hf")
    rows = examples([12, 3, 7, 1, 9, 12, 2, 5])
    options: dict[str, Any] = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1}
    options |= {"max_steps": 4, "save_steps": 2, "logging_steps": 1}
    arguments = quiet(tmp_path / "run", **options)
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
