"""Gemma 4: keys of earlier layers and embeddings of each layer, and the towers of its files."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ligermodels import AutoLiger, ConfigError, Gemma4Config, LigerClassifier, LigerGemma4
from ligermodels.adapters import add_adapters, export_adapter
from ligermodels.converters.inspect import describe
from ligermodels.converters.verify import verify
from ligermodels.heads.classifier import classifier_class
from tests.models import hf_models, zoo
from tests.models.pairs import gradients, relative

SMALL = zoo.features("gemma4_text")["small models"].config
EXPERTS = zoo.features("gemma4_text")["experts"].config


def small_model(**changes: Any) -> LigerGemma4:
    torch.manual_seed(0)
    sizes = zoo.sizes("gemma4_text") | SMALL | {"initializer_range": 0.3}
    return LigerGemma4(Gemma4Config(**sizes | changes))


def step(model: Any, ids: Tensor, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **options).loss.backward()
    return gradients(model)


IDS = torch.randint(3, 131, (2, 24), generator=torch.Generator().manual_seed(0))


def test_embeddings_of_each_layer_need_the_tokens() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="inputs_embeds: the layers have embeddings of their own"):
        model(inputs_embeds=model.embed_tokens(IDS))


def test_many_prompts_of_the_smallest_models() -> None:
    model = small_model().eval()
    prompts = [row[: 3 + 9 * i].tolist() for i, row in enumerate(IDS)]
    many = [*model.generate_many(prompts, max_new_tokens=7, max_batch=2)]
    for prompt, new in zip(prompts, many):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=7)[0, len(prompt) :]
        assert alone.tolist()[: len(new)] == [*new]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with towers, experts and shared keys, and with keys that no layer uses."""
    folder = tmp_path_factory.mktemp("gemma4")
    hf_models.save(folder, "gemma4", zoo.Feature(config=SMALL | EXPERTS, dtype=torch.bfloat16))
    tensors = load_file(folder / "model.safetensors")
    for layer in (3, 4, 5):
        name = f"model.language_model.layers.{layer}.self_attn"
        tensors |= {f"{name}.{x}.weight": torch.ones(2, 3).bfloat16() for x in ("k_proj", "v_proj")}
    save_file(tensors, folder / "model.safetensors")
    (folder / "processor_config.json").write_text("{}")
    return folder


def test_towers_pass_through(published: Path, tmp_path: Path) -> None:
    """Also in a save to the folder itself, after a copy and a pickle, and in other dtypes."""
    before = load_file(published / "model.safetensors")
    found = describe(published, LigerGemma4)
    assert set(found.kept) >= {"model.vision_tower.", "model.audio_tower."} and not found.left_out
    report = verify(published, LigerGemma4)
    assert report.ok and report.tensors == len(before)

    model = AutoLiger.from_hf(published)
    assert isinstance(model, LigerGemma4)
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    model.save_hf(tmp_path)
    AutoLiger.from_hf(tmp_path).save_hf(tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    names = "config.json", "processor_config.json"
    raw, other = (
        [json.loads((folder / name).read_text()) for name in names]
        for folder in (published, tmp_path)
    )
    assert raw == other

    wide = AutoLiger.from_hf(published, dtype="float32")
    wide.config.eos_token_id = [1, 106]
    wide.save_hf(tmp_path)
    changed = json.loads((tmp_path / "config.json").read_text())
    assert changed["dtype"] == "float32" and changed["text_config"]["eos_token_id"] == [1, 106]
    assert changed["vision_config"] == raw[0]["vision_config"]
    after = load_file(tmp_path / "model.safetensors")
    towers = [name for name in before if "language_model" not in name]
    assert all(torch.equal(after[name], before[name]) for name in towers)
    ends = "norm.weight", "layers.0.layer_scalar"  # the second is a buffer in transformers
    assert {after[f"model.language_model.{end}"].dtype for end in ends} == {torch.float32}


def test_a_source_that_changed_is_named(published: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((published / name).read_bytes())
    model = AutoLiger.from_hf(tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"model\.safetensors: .* the file was changed after"):
        model.save_hf(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_has_the_names_of_the_wrapper(published: Path, tmp_path: Path) -> None:
    """PEFT finds a place for each tensor: of attention, experts, the MLP beside them, others."""
    model = AutoLiger.from_hf(published, dtype="float32")
    add_adapters(model, rank=2, alpha=4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        logits = model.head.logits(model(IDS))
    export_adapter(model, tmp_path, str(published), None)
    base = hf_models.load(published, "gemma4")
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, tmp_path).eval()(IDS).logits
    assert relative(logits, expected) <= 1e-5
    again = AutoLiger.from_hf(tmp_path, dtype="float32")
    assert relative(again.head.logits(again(IDS)), expected) <= 1e-5


def test_a_classifier_is_saved_without_towers(published: Path, tmp_path: Path) -> None:
    model = AutoLiger.from_hf(published, dtype="float32")
    classifier_class(type(model)).from_model(model, 2).save_hf(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not any("language_model" in name or "tower" in name for name in names)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma4_text"
    assert isinstance(LigerClassifier.from_hf(tmp_path), LigerGemma4)


def test_more_of_a_layer_than_its_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"per_layer_config has .* for layer 1"):
        Gemma4Config(per_layer_config={"1": {"intermediate_size": 7}})
