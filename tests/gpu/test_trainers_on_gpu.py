"""Wrappers and TRL's trainers on a GPU, beside transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ligermodels.integrations.hf_model import LigerForCausalLM
from tests.integrations.tiny_text import texts, tokenizer
from tests.models import hf_models, zoo

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    config = {"vocab_size": 128, "max_position_embeddings": 128, "eos_token_id": 1}
    hf_models.build("llama", zoo.Feature(config=config)).save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


def both(folder: Path) -> list[Any]:
    return [
        LigerForCausalLM.from_pretrained(folder, device_map="cuda"),
        transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cuda"),
    ]


def test_logits_losses_and_continuations(folder: Path) -> None:
    ours, theirs = both(folder)
    ids = torch.randint(3, 128, (2, 9), device="cuda")
    with torch.no_grad():
        mine, expected = ours(ids, labels=ids), theirs(ids, labels=ids)
    torch.testing.assert_close(mine.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.loss, expected.loss, rtol=1e-5, atol=0)
    kept = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 2}
    assert torch.equal(ours.generate(ids, **kept), theirs.generate(ids, **kept))


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_losses_of_trl(name: str, folder: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from ligermodels.integrations import trl_trainers

    data = {"text": texts(40)}
    if name == "DPO":
        data = {"prompt": texts(40, 1), "chosen": texts(40, 2), "rejected": texts(40, 3)}
    options = {"max_steps": 5, "logging_steps": 1, "report_to": [], "save_strategy": "no"}
    losses = []
    classes = getattr(trl_trainers, f"Liger{name}Trainer"), getattr(trl, f"{name}Trainer")
    for cls, model in zip(classes, both(folder)):
        more = {"bf16": False, "learning_rate": 1e-3, "seed": 1, "disable_tqdm": True}
        trainer = cls(
            model=model,
            args=getattr(trl, f"{name}Config")(str(tmp_path), **options, **more),
            train_dataset=datasets.Dataset.from_dict(data),
            processing_class=tokenizer(),
        )
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
