"""A folder with an auto_map opens as a wrapper in AutoModelForCausalLM, and saves as HF's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from trl import SFTTrainer
from trl.scripts import sft

from ligermodels.errors import CheckpointError, LigerError
from ligermodels.integrations.auto_map import write_auto_map
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.models.auto import AutoLiger
from tests.integrations.tiny import texts, tokenizer
from tests.models import hf_models, zoo


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "modules"  # where transformers copies the code of checkpoints
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(cache))
    hf_models.build("llama", zoo.Feature()).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_it_opens_as_a_wrapper_and_saves_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    """A cell of the matrix compares the logits."""
    before = config_of(folder)
    write_auto_map(folder)
    written = config_of(folder)
    assert {name: written[name] for name in before} == before | {
        "architectures": ["LigerLlamaForCausalLM"]
    }
    wrapper = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    config = AutoConfig.from_pretrained(folder)
    random = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert isinstance(wrapper, LigerForCausalLM) and isinstance(random, LigerForCausalLM)
    wrapper.save_pretrained(tmp_path / "saved")
    AutoLiger.from_hf(folder).save_hf(tmp_path / "native")
    assert not list((tmp_path / "saved").glob("*.py"))
    for saved in (tmp_path / "saved", tmp_path / "native"):
        assert "auto_map" not in config_of(saved)
        assert config_of(saved)["architectures"] == ["LlamaForCausalLM"]
    for path, trust in ((folder, False), (tmp_path / "saved", True)):
        theirs = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=trust)
        assert type(theirs) is LlamaForCausalLM


@pytest.mark.parametrize("split", [False, True])
def test_adapters_of_tools_that_know_only_peft(split: bool, folder: Path, tmp_path: Path) -> None:
    write_auto_map(folder, split_projections=split)
    models = [
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        for trust in (True, False)
    ]
    assert hasattr(models[0].model.layers[0].self_attn, "q_proj") == split
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    adapted = [peft.get_peft_model(model, config) for model in models]
    ids, losses = torch.tensor([[3, 4, 5, 6]]), []
    for model in adapted:
        torch.manual_seed(0)
        for name, weight in sorted(model.named_parameters()):
            if "lora" in name:
                torch.nn.init.normal_(weight, std=0.1)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    adapted[0].merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    loss = merged(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(losses[1], rel=1e-4)


def test_the_command_line_of_trl(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the script that `trl sft` starts with accelerate, with the same arguments, for LoRA."""
    tokenizer().save_pretrained(folder)
    (tmp_path / "data").mkdir()
    lines = (json.dumps({"text": text}) for text in texts(8))
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    write_auto_map(folder)
    losses, models, train = [], [], SFTTrainer.train

    def remember(trainer: SFTTrainer, **options: Any) -> None:
        models.append(trainer.model.get_base_model())
        train(trainer, **options)

    monkeypatch.setattr(SFTTrainer, "train", remember)
    for trust in (True, False):
        out = tmp_path / f"run-{trust}"
        arguments = f"--model_name_or_path {folder} --dataset_name {tmp_path / 'data'} "
        arguments += f"--output_dir {out} --max_steps 2 --learning_rate 0.01 --optim sgd "
        arguments += "--per_device_train_batch_size 2 --logging_steps 1 --save_steps 2 --seed 1 "
        arguments += "--dtype float32 --bf16 false --use_cpu --report_to none "
        arguments += "--use_peft --lora_r 4 --lora_target_modules all-linear "
        arguments += "--trust_remote_code " * trust
        sft.main(*sft.make_parser().parse_args_and_config(arguments.split()))
        state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
        losses.append([entry["loss"] for entry in state["log_history"] if "loss" in entry])
    assert [isinstance(model, LigerForCausalLM) for model in models] == [True, False]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing"):
        write_auto_map(tmp_path)
    for config, words in {
        "[]": "the JSON holds a list",
        '{"model_type": "other"}': "model_type 'other' is not supported",
        '{"model_type": "gemma3", "text_config": {}}': "a text model and other towers",
    }.items():
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(LigerError, match=words):
            write_auto_map(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
