"""Native models, without a wrapper, in the tools that take any module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ligermodels.errors import CheckpointError
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.models.auto import AutoLiger
from tests.integrations.test_hf_model import examples, train
from tests.integrations.tiny_text import tokenizer
from tests.models import hf_models, zoo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    hf_models.build("llama", zoo.Feature()).save_pretrained(made)
    return made


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}], ids=len)
def test_flattened_batches_equal_padded_ones(
    options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
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
        model = AutoLiger.from_hf(folder)
        losses = train(model, tmp_path, rows, collator)
        arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
        metrics = Trainer(model, arguments, collator, eval_dataset=rows).evaluate()
        found.append([*losses, metrics["eval_loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_documents_told_by_seq_idx_alone_are_refused(folder: Path) -> None:
    numbers = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    for model in (AutoLiger.from_hf(folder), LigerForCausalLM.from_pretrained(folder)):
        with pytest.raises(ValueError, match=r"seq_idx: .*position_ids or cu_seq_lens_q"):
            model(input_ids=torch.tensor([[5, 6, 7]]), seq_idx=numbers)


def test_it_resumes_and_evaluates(folder: Path, tmp_path: Path) -> None:
    rows = examples([12, 3, 7, 1, 9, 12, 2, 5])
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    whole = AutoLiger.from_hf(folder)
    losses = train(whole, tmp_path, rows, **options)
    again = AutoLiger.from_hf(folder)
    resumed = train(
        again, tmp_path, rows, resume_from_checkpoint=str(tmp_path / "checkpoint-2"), **options
    )
    assert resumed == losses
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    found = [
        Trainer(model, arguments, eval_dataset=rows, processing_class=tokenizer()).evaluate()
        for model in (AutoLiger.from_hf(folder), theirs(folder))
    ]
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-5)


def test_tensors_of_other_names_are_not_left_out(folder: Path, tmp_path: Path) -> None:
    """PEFT and Trainer load with strict=False, and would go on with the old weights."""
    config = LoraConfig(target_modules=["q_proj", "o_proj"])
    peft.get_peft_model(theirs(folder), config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"is a name of HF's model.*with .*pack_adapter"):
        peft.PeftModel.from_pretrained(AutoLiger.from_hf(folder), str(tmp_path))
    with pytest.raises(CheckpointError, match="load a checkpoint with from_hf"):
        AutoLiger.from_hf(folder).load_state_dict(theirs(folder).state_dict(), strict=False)


def test_labels_are_smoothed_by_the_head(folder: Path, tmp_path: Path) -> None:
    """Trainer's own smoothing needs logits; the head's gives the same numbers."""
    rows = examples([12, 3, 7, 1])
    smooth: dict[str, Any] = {"label_smoothing_factor": 0.1}
    with pytest.raises(ValueError, match=r"model\.head\.loss_options\['label_smoothing'\]"):
        train(AutoLiger.from_hf(folder), tmp_path, rows, **smooth)
    model = AutoLiger.from_hf(folder)
    model.head.loss_options["label_smoothing"] = 0.1
    ours = train(model, tmp_path, rows)
    assert ours == pytest.approx(train(theirs(folder), tmp_path, rows, **smooth), rel=1e-5)
