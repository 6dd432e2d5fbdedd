"""Adapters in PEFT's format are added to packed projections, whole or not at all."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from ligermodels.adapters.peft_format import add_lora
from ligermodels.errors import CheckpointError
from ligermodels.models.auto import AutoLiger
from tests.models import hf_models, zoo

PREFIX = "base_model.model.model"
IDS = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in ("llama", "qwen2", "gemma3_text"):
        made[family] = tmp_path_factory.mktemp(family)
        hf_models.build(family, zoo.Feature()).save_pretrained(made[family])
    return made


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def disturb(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    return model.eval()


def published(folder: Path, path: Path, **options: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return the tensors and config of an adapter that PEFT has written, and its logits."""
    model = disturb(
        peft.get_peft_model(theirs(folder), LoraConfig(task_type="CAUSAL_LM", **options))
    )
    model.save_pretrained(path)
    config = json.loads((path / "adapter_config.json").read_text())
    return load_file(path / "adapter_model.safetensors"), config, model(IDS).logits


def test_a_sum_that_overflows_is_refused(folders, tmp_path) -> None:
    weights, config, _ = published(folders["llama"], tmp_path, target_modules=["q_proj", "o_proj"])
    config["alpha_pattern"] = {"layers.1.self_attn.o_proj": 1e7}
    weights = {name: torch.ones_like(weight) for name, weight in weights.items()}
    model = AutoLiger.from_hf(folders["llama"], dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.o_proj.weight .*infinite"):
        add_lora(
            dict(model.named_parameters()), weights, config, model.weight_map(model.built_from)
        )


def test_a_whole_module_that_overflows_is_refused(folders, tmp_path) -> None:
    saved = {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}
    weights, *_ = published(folders["llama"], tmp_path, **saved)
    weights[f"{PREFIX}.layers.1.mlp.down_proj.weight"] *= 1e9
    save_file(weights, tmp_path / "adapter_model.safetensors")
    AutoLiger.from_hf(tmp_path, dtype=torch.float32)
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.down_proj.weight .*infinite .*float16"
    ):
        AutoLiger.from_hf(tmp_path, dtype=torch.float16)


def test_a_pickled_adapter_is_never_read(folders, tmp_path, monkeypatch) -> None:
    """The message has the command that converts it, and it does."""
    weights, _, logits = published(folders["llama"], tmp_path, target_modules=["q_proj"])
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(weights, tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin: .* never read") as error:
        AutoLiger.from_hf(tmp_path)
    _, _, code = shlex.split(str(error.value).partition("in its folder: ")[2])
    monkeypatch.chdir(tmp_path)
    exec(code)
    model = AutoLiger.from_hf(tmp_path)
    torch.testing.assert_close(model.head.logits(model(IDS)), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_the_folder_of_an_adapter_loads_with_its_model(family, folders, tmp_path) -> None:
    options = {
        "r": 3,
        "target_modules": "all-linear",
        "use_rslora": family == "qwen2",
        "rank_pattern": {"v_proj": 5},
        "alpha_pattern": {"layers.0.mlp.up_proj": 2},
    }
    _, _, logits = published(folders[family], tmp_path, **options)
    model = AutoLiger.from_hf(tmp_path)
    found = model.head.logits(model(IDS))
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert type(model) is type(AutoLiger.from_hf(folders[family]))
    assert model.source.folder is None  # whose weights are others


QV = ["q_proj", "v_proj"]
Q0 = f"{PREFIX}.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(folders: dict[str, Path], tmp_path: Path) -> tuple[Path, Any, dict[str, Any]]:
    """A folder with an adapter of two projections of Qwen 2, its tensors and its config."""
    weights, config, _ = published(folders["qwen2"], tmp_path, target_modules=QV)
    return tmp_path, weights, config


def refused(folder: Path, weights: Any, config: dict[str, Any], message: str) -> None:
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as error:
        AutoLiger.from_hf(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "also changed the model's weights"),
        ({"some_new_key": "x"}, "some_new_key='x' cannot be converted"),
        ({"rank_pattern": {"v_proj": 5}}, r"v_proj.lora_A.weight has the shape"),
        ({"target_modules": ["c_attn"]}, r"q_proj.lora_A.weight is not a tensor that"),
        ({"target_modules": "all-linear"}, "down_proj.lora_A.weight is missing"),
        ({"target_modules": [*QV, "embed_tokens"]}, "embed_tokens.lora_A.weight is missing"),
        ({"use_dora": True}, "q_proj.lora_magnitude_vector is missing"),
        ({"modules_to_save": ["lm_head"]}, "base_model.model.lm_head.weight is missing"),
        ({"bias": "all"}, "bias='all' cannot be converted"),
        ({"target_modules": None}, "target_modules is missing"),
    ],
    ids=str,
)
def test_a_config_that_its_tensors_contradict_is_refused(
    change: dict[str, Any], message: str, adapter: Any, folders: dict[str, Path]
) -> None:
    """Everything that the config names has its tensors, and the config names all of them."""
    folder, weights, config = adapter
    native = AutoLiger.from_hf(folders["qwen2"])
    weight_map, parameters = native.weight_map(native.config), dict(native.named_parameters())
    before = {name: weight.clone() for name, weight in parameters.items()}
    with pytest.raises(CheckpointError, match=message):
        add_lora(parameters, weights, config | change, weight_map)
    assert all(torch.equal(weight, parameters[name]) for name, weight in before.items())
    refused(folder, weights, config | change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', but must be a list"),
        (
            {"target_modules": "(q_proj"},
            r"adapter_config\.json: a value .* unterminated subpattern",
        ),
        ({"target_modules": 3}, r"adapter_config\.json: a value .* not iterable"),
        ({"lora_alpha": "16"}, r"adapter_config\.json: a value .* unsupported operand"),
        ({"rank_pattern": [4]}, r"adapter_config\.json: a value .* no attribute 'items'"),
    ],
    ids=str,
)
def test_a_malformed_config_is_refused_with_its_file(change, message, adapter) -> None:
    folder, weights, config = adapter
    refused(folder, weights, config | change, message)


def test_every_tensor_of_an_adapter_is_needed_and_checked(adapter: Any) -> None:
    folder, weights, config = adapter
    for name in weights:
        rest = {key: weight for key, weight in weights.items() if key != name}
        refused(folder, rest, config, f"{re.escape(name)} is missing")
    refused(folder, {}, config, "is missing, .*for 8 tensors")
    for change, message in (
        (lambda x: x[:, 1:].contiguous(), "has the shape"),
        (lambda x: x / 0, "holds NaN or infinite values"),
    ):
        name = f"{Q0}.lora_A.weight"
        refused(folder, weights | {name: change(weights[name])}, config, message)
    more = weights | {f"{Q0}.weight": torch.zeros(48, 48)}
    refused(folder, more, config, f"{Q0}.weight is the whole weight of a module that has a LoRA")
    for name in (
        "vision_tower.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.oft_R.weight",
    ):
        more = weights | {f"base_model.model.{name}": torch.zeros(2, 2)}
        refused(folder, more, config, re.escape(f"base_model.model.{name}"))


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"modules_to_save": ["mlp"]}, {"modules_to_save": ["norm"]}]
)
def test_dora_and_whole_modules_load_with_their_model(options, folders, tmp_path) -> None:
    *_, logits = published(folders["llama"], tmp_path, target_modules=["q_proj"], **options)
    model = AutoLiger.from_hf(tmp_path)
    torch.testing.assert_close(model.head.logits(model(IDS)), logits, rtol=1e-5, atol=1e-5)


def test_other_adapters_do_not_load_with_their_model(folders, tmp_path) -> None:
    for options in ({"bias": "lora_only"}, {"target_modules": ["embed_tokens"]}):
        published(folders["qwen2"], tmp_path, **({"target_modules": ["q_proj"]} | options))
        with pytest.raises(CheckpointError, match="merge the adapter with PEFT's merge_and"):
            AutoLiger.from_hf(tmp_path)


def test_the_model_of_an_adapter_is_found(adapter: Any, folders: dict[str, Path]) -> None:
    folder, weights, config = adapter
    for base, message in (
        (None, "base_model_name_or_path is None, but must name"),
        (str(folder), "which is an adapter, too"),
        (str(folder / "gone"), r"base_model_name_or_path: .*gone.*no such"),
    ):
        refused(folder, weights, config | {"base_model_name_or_path": base}, message)
    refused(folder, weights, config | {"revision": 3}, "revision: 3")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="cannot be added to weights that are read later"):
        AutoLiger.from_hf(folder, device="meta")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert AutoLiger.from_hf(folder).source.generation_config["eos_token_id"] == [7, 9]
    shutil.copytree(folders["qwen2"], folder, dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="adapter beside the model is not added"):
        AutoLiger.from_hf(folder)
    (folder / "config.json").unlink()
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        AutoLiger.from_hf(folder)
