"""AutoLiger picks the class for a config.json, also one registered outside the package."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from ligermodels import (
    AutoLiger,
    CheckpointError,
    ConfigError,
    LigerGemma3,
    LigerLlama,
    LigerQwen2,
    LlamaConfig,
    Qwen2Config,
    load_pretrained,
    register,
)
from ligermodels.converters.inspect import describe
from ligermodels.converters.verify import verify
from ligermodels.models import auto
from ligermodels.models.auto import families, family_of
from tests.models.pairs import TINY


@dataclass(kw_only=True)
class OutsideConfig(LlamaConfig):
    model_type: ClassVar[str] = "outside"
    wrapper_type: ClassVar[str | None] = "outside_wrapper"
    architecture: ClassVar[str | None] = "OutSideForCausalLM"


class LigerOutside(LigerLlama):
    config_class = OutsideConfig


def test_family_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert family_of(tmp_path) is LigerLlama


def test_a_wrapper_and_its_text_model_are_one_family() -> None:
    assert families()["gemma3"] is families()["gemma3_text"] is LigerGemma3


def test_every_family_file_registers_itself() -> None:
    """The folder is the only list of the families."""
    script = "from ligermodels.models.auto import families; print(*families())"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == list(families()) == sorted(families())
    own = {cls.__module__ for cls in families().values()}
    folder = Path(auto.__file__).parent
    written = {p.stem for p in folder.glob("*.py") if "@register" in p.read_text()}
    assert own == {f"ligermodels.models.{name}" for name in written}


def test_an_unsupported_model_type_lists_the_supported(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for raw in ({}, {"model_type": "gpt2"}, {"model_type": ["llama"]}):
        with subtests.test(str(raw)):
            (tmp_path / "config.json").write_text(json.dumps(raw))
            with pytest.raises(
                ConfigError, match=r"config\.json: model_type .* supported: gemma, .*llama"
            ):
                AutoLiger.from_hf(tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        AutoLiger.from_hf(tmp_path / "absent")


def test_a_family_from_outside_is_like_the_others(registry: None, tmp_path: Path) -> None:
    assert register(LigerOutside) is LigerOutside
    assert families()["outside"] is families()["outside_wrapper"] is LigerOutside
    model = LigerOutside(OutsideConfig(**TINY))
    model.save_hf(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("outside", ["OutSideForCausalLM"])
    loaded = AutoLiger.from_hf(tmp_path)
    assert type(loaded) is LigerOutside
    ids = torch.arange(7)[None]
    assert torch.equal(loaded(ids), model(ids))
    report = load_pretrained(LigerLlama(LlamaConfig(**TINY)), tmp_path)
    assert len(report.loaded) == len(list(model.parameters()))
    assert describe(tmp_path, LigerOutside).family == "outside"
    assert verify(tmp_path, LigerOutside).ok


def test_a_class_may_be_registered_twice_and_defined_anew(registry: None) -> None:
    register(register(LigerOutside))
    again = type("LigerOutside", (LigerOutside,), {"__module__": __name__})
    register(again)
    assert families()["outside"] is again


@pytest.mark.parametrize("taken", ["model_type", "wrapper_type"])
def test_two_classes_of_one_model_type_are_refused(registry: None, taken: str) -> None:
    config_class = type("OtherConfig", (OutsideConfig,), {taken: "llama"})
    other = type("Other", (LigerOutside,), {"config_class": config_class})
    before = families()
    with pytest.raises(ConfigError, match=r"'llama' belongs to \S*\.LigerLlama; \S*\.Other"):
        register(other)
    assert families() == before


def test_a_clash_with_a_family_that_was_not_imported_yet_is_found() -> None:
    script = (
        "from ligermodels.models.base import DecoderModel\n"
        "from ligermodels.models.config import ModelConfig\n"
        "from ligermodels.models.auto import register\n"
        "Config = type('Config', (ModelConfig,), {'model_type': 'qwen2'})\n"
        "register(type('Mine', (DecoderModel,), {'config_class': Config}))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "'qwen2' belongs to ligermodels.models.qwen2.LigerQwen2" in found.stderr


def test_a_class_that_lacks_something_is_refused() -> None:
    class NoConfig(LigerLlama):
        config_class = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"NoConfig: config_class is None; set it to"):
        register(NoConfig)

    class Method(LigerLlama):
        def weight_map(self, config):  # type: ignore[override]
            raise AssertionError

    with pytest.raises(ConfigError, match=r"Method: weight_map is called with the config alone"):
        register(Method)


def test_a_checkpoint_that_becomes_one_of_another_family_is_loaded(tmp_path, monkeypatch):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    LigerLlama(LlamaConfig(**sizes)).save_hf(tmp_path)
    load = LigerLlama.from_hf

    def late(folder, **options):
        LigerQwen2(Qwen2Config(**sizes)).save_hf(tmp_path)
        return load(folder, **options)

    monkeypatch.setattr(LigerLlama, "from_hf", late)
    assert type(AutoLiger.from_hf(tmp_path)) is LigerQwen2
