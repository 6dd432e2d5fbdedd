"""Gemma 3 from 4B up has a vision tower; a load takes the text model alone."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ligermodels import AutoLiger, CheckpointError, ConfigError, LigerGemma3
from ligermodels.converters.hf_config import text_config, unknown_keys
from ligermodels.converters.inspect import describe
from ligermodels.converters.verify import verify
from ligermodels.models.gemma3 import Gemma3Config
from tests.models import hf_models, zoo

from . import conftest

PUBLISHED = {"vision_tower.": 32, "multi_modal_projector.": 2}
TRANSFORMERS_5 = {f"model.{tower}": count for tower, count in PUBLISHED.items()}
TOP = {"eos_token_id": [1, 106], "dtype": "bfloat16", "bos_token_id": 9}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def saved(request, tmp_path_factory) -> Path:
    """A wrapper's checkpoint that transformers wrote, with stop tokens at config.json's top."""
    folder = tmp_path_factory.mktemp("gemma3")
    feature = zoo.Feature(config={"tie_word_embeddings": request.param})
    hf_models.save(folder, "gemma3", feature)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"eos_token_id": [1, 106]}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def as_transformers_5_names(name: str) -> str:
    """Turn a published name into that of the module in transformers 5."""
    name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
    name = re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
    return re.sub(r"^(vision_tower|multi_modal_projector)\.", r"model.\1.", name)


@pytest.fixture(params=["published", "transformers 5"])
def checkpoint(request, saved: Path, tmp_path: Path) -> tuple[Path, dict[str, int]]:
    """A checkpoint in each spelling, and how many tensors of each tower a load leaves out."""
    if request.param == "published":
        return saved, PUBLISHED
    folder = tmp_path / "renamed"
    folder.mkdir()
    tensors = load_file(saved / "model.safetensors")
    names = {name: as_transformers_5_names(name) for name in tensors}
    assert all(name != now for name, now in names.items() if name != "lm_head.weight")
    save_file({names[n]: t for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    return folder, TRANSFORMERS_5


def load(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoLiger.from_hf(folder)


def test_the_text_model_is_loaded_and_the_rest_is_counted(checkpoint) -> None:
    folder, towers = checkpoint
    with pytest.warns(UserWarning, match="loading the text model alone") as caught:
        model = AutoLiger.from_hf(folder)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(folder) in message
    assert all(f"{count} of {tower}*" in message for tower, count in towers.items())
    assert type(model) is LigerGemma3 and model.config.eos_token_id == [1, 106]
    found = describe(folder, LigerGemma3)
    assert found.family == "gemma3_text" and found.left_out == towers
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert "vision_config" not in found.unknown_keys
    report = verify(folder, LigerGemma3)
    assert report.ok, str(report)


def test_transformers_reads_the_export_as_the_text_model(checkpoint, tmp_path: Path) -> None:
    folder, _ = checkpoint
    ids = torch.arange(3, 43).view(2, 20)
    wrapper = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    model = load(folder)
    model.save_hf(tmp_path / "export")
    text, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", output_loading_info=True
    )
    assert type(text) is transformers.Gemma3ForCausalLM
    assert not info["missing_keys"] and not info["unexpected_keys"]
    theirs = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in wrapper.state_dict().items()
        if not name.startswith(("model.vision_tower", "model.multi_modal_projector"))
    }
    assert theirs.keys() == text.state_dict().keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in text.state_dict().items())
    with torch.no_grad():
        expected = wrapper(ids).logits
        assert torch.equal(text.eval()(ids).logits, expected)
        logits = model.head.logits(model(ids))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text" and config["eos_token_id"] == [1, 106]
    assert not {"text_config", "vision_config", "image_token_index"} & config.keys()


NORM = "language_model.model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda norm: {NORM: norm[:3]}, rf"'{NORM}' has shape \[3\]"),
        (lambda norm: {NORM: norm * torch.nan}, f"'{NORM}' holds NaN"),
        (lambda norm: {"model.norm.weight": norm.clone()}, "two spellings of one tensor"),
    ],
)
def test_a_damaged_tensor_is_named_as_in_the_file(saved: Path, tmp_path: Path, damage, message):
    tensors = load_file(saved / "model.safetensors")
    save_file(tensors | damage(tensors[NORM]), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


parse = partial(conftest.parse, config_class=Gemma3Config)


def test_the_wrappers_keys_override_its_text_config() -> None:
    inner = {"tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 1}
    raw = {"model_type": "gemma3", "text_config": inner, "tie_word_embeddings": False, **TOP}
    config = parse(raw)
    assert not config.tie_word_embeddings and config.dtype == "bfloat16"
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (9, [1, 106], 0)
    assert parse({**raw, "pad_token_id": 3}).pad_token_id == 3
    # The text model's embedding uses the padding token of text_config, so its null wins.
    raw["text_config"] = {**inner, "pad_token_id": None}
    assert parse({**raw, "pad_token_id": 3}).pad_token_id is None
    assert parse({"model_type": "gemma3", "text_config": inner}).dtype == "float32"
    text = text_config(raw, Gemma3Config)
    assert "torch_dtype" not in text and raw["text_config"]["torch_dtype"] == "float32"
    assert unknown_keys({**raw, "text_config": {"mine": 1}}, Gemma3Config) == {"mine": 1}


def test_a_contradictory_wrapper_is_refused(subtests: pytest.Subtests) -> None:
    for keys, message in (
        ({"text_config": 5}, "'text_config' is 5, expected an object"),
        ({"text_config": {"model_type": "llama"}}, "'text_config.model_type' is 'llama'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised checkpoints \('awq'\)"),
        ({"text_config": {"quantization_config": {}}}, "quantised checkpoints"),
        ({"text_config": {"attention_dropout": 0.5}}, "'attention_dropout' is 0.5"),
        ({"text_config": {"sliding_window": "x"}}, "'sliding_window' is 'x'"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "softcapping' is 30.0, which a"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
    ):
        with subtests.test(str(keys)):
            with pytest.raises(ConfigError, match=message):
                parse({"model_type": "gemma3", **keys})
