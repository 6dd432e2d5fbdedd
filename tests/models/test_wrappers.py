"""Checkpoints that hold other towers: their adapters in PEFT, and models without the towers."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers

from ligermodels import AutoLiger
from ligermodels.adapters.adapted_model import add_adapters, export_adapter
from ligermodels.integrations.hf_model import LigerForCausalLM
from tests.models import hf_models, zoo
from tests.models.pairs import relative

IDS = torch.randint(3, 121, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["gemma4", "mistral3", "qwen3_5_moe"])
def wrapper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    hf_models.save(folder, request.param, zoo.Feature())
    return folder


def test_an_adapter_opens_in_peft(wrapper: Path, tmp_path: Path) -> None:
    """The towers have linears of the same names, and experts are parameters there."""
    model = AutoLiger.from_hf(wrapper)
    add_adapters(model, rank=2, alpha=4)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=draw)
        logits = model.head.logits(model(IDS))
    export_adapter(model, tmp_path, str(wrapper), None)
    base = hf_models.load(wrapper, json.loads((wrapper / "config.json").read_text())["model_type"])
    found = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    names = [name for name, _ in found.named_parameters() if "lora_" in name]
    assert names and all(".language_model." in name for name in names)
    with torch.no_grad():
        expected = found(IDS).logits
    assert relative(logits, expected) <= 1e-5
    again = AutoLiger.from_hf(tmp_path)
    assert relative(again.head.logits(again(IDS)), expected) <= 1e-5


def test_a_model_without_towers_is_saved_as_a_text_model(wrapper: Path, tmp_path: Path) -> None:
    model = AutoLiger.from_hf(wrapper)
    config = type(model.config).from_hf(wrapper)
    new = type(model)(config)
    new.save_hf(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == config.model_type and "vision_config" not in raw
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(theirs).__name__ == raw["architectures"][0] and not loading["missing_keys"]
    with torch.no_grad():
        assert relative(new.head.logits(new(IDS)), theirs(IDS).logits) <= 1e-5


def test_a_wrapper_of_transformers_reads_experts_one_by_one(tmp_path: Path) -> None:
    hf_models.save(tmp_path, "qwen3_5_moe_text", zoo.Feature())
    native = AutoLiger.from_hf(tmp_path)
    theirs = LigerForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, native.head.logits(native(IDS)))
