"""AutoLiger picks the class for a config.json, also one registered outside the package."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ligermodels import (
    AutoLiger,
    CheckpointError,
    ConfigError,
    DecoderModel,
    Entry,
    LigerGemma3,
    LigerLlama,
    LigerQwen2,
    LlamaConfig,
    Qwen2Config,
    WeightMap,
    load_pretrained,
    register,
)
from ligermodels.converters.inspect import describe
from ligermodels.converters.verify import verify
from ligermodels.layers import RMSNorm
from ligermodels.models import auto
from ligermodels.models.auto import families, family_of, tokenizer_folder
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


def test_what_is_no_class_of_models_is_not_registered() -> None:
    for wrong in (None, "olmo2", torch.nn.Linear, object()):
        with pytest.raises(ConfigError, match=r"register: .* is no model class; pass a class"):
            register(wrong)  # type: ignore[type-var]


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

    class NoType(LlamaConfig):
        model_type = None  # type: ignore[assignment]

    class Untyped(LigerLlama):
        config_class = NoType

    with pytest.raises(ConfigError, match=r"Untyped: NoType has no model_type; set it to"):
        register(Untyped)

    class Method(LigerLlama):
        def weight_map(self, config):  # type: ignore[override]
            raise AssertionError

    with pytest.raises(ConfigError, match=r"Method: weight_map is called with the config alone"):
        register(Method)

    class Listed(LigerOutside):
        weight_map = staticmethod(lambda config: [])  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"Listed: weight_map returns list; return a WeightMap"):
        register(Listed)


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


def outside_map(change: Any) -> type[LigerLlama]:
    """Return a family whose map's entries are those that `change` returns."""

    def weight_map(config: OutsideConfig) -> WeightMap:
        return WeightMap(tuple(change(list(LigerLlama.weight_map(config)))))

    fields = {"config_class": OutsideConfig, "weight_map": staticmethod(weight_map)}
    return type("LigerOutside", (LigerLlama,), {**fields, "__module__": __name__})


def overlapping(entries: list[Entry]) -> list[Entry]:
    first, *rest = entries[1].spans
    return [*entries[:1], replace(entries[1], spans=(first, replace(first, row=1), *rest))]


@pytest.mark.usefixtures("registry")
def test_a_wrong_weight_map_is_refused_when_it_is_registered(subtests: pytest.Subtests) -> None:
    for change, complaint in (
        (lambda e: [*e, e[0]], "'embed_tokens.weight' occurs twice"),
        (lambda e: [replace(e[0], name="embed.weight"), *e[1:]], "'embed.weight': .* no parameter"),
        (lambda e: e[:-1], "entry 'head.proj.weight' is missing"),
        (overlapping, "its spans must fill each row once"),
    ):
        with subtests.test(complaint):
            with pytest.raises(ConfigError, match=f"LigerOutside, small config: .*{complaint}"):
                register(outside_map(change))
    assert "outside" not in families()


@pytest.mark.usefixtures("registry")
def test_a_map_that_is_wrong_for_one_config_is_found(tmp_path: Path) -> None:
    """Registration checks the booleans; a load checks the checkpoint's own sizes."""
    biased = outside_map(lambda e: [entry for entry in e if not entry.name.endswith(".bias")])
    with pytest.raises(ConfigError, match=r"attention_bias=True: .*'layers.0.self_attn.qkv_proj"):
        register(biased)
    deep = outside_map(lambda e: [x for x in e if "layers.2" not in x.name])
    register(deep)
    LigerOutside(OutsideConfig(**TINY)).save_hf(tmp_path)
    for load in (deep.from_hf, lambda path: load_pretrained(LigerLlama(LlamaConfig(**TINY)), path)):
        with pytest.raises(ConfigError, match=r"entry 'layers.2.*is missing"):
            load(tmp_path)


@pytest.mark.usefixtures("registry")
def test_a_class_that_cannot_be_built_yet_is_refused() -> None:
    class Early(LigerOutside):
        def make_block(self, layer_index: int) -> Any:
            return DefinedLater(layer_index)  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match=r"Early, small config: .*NameError: .*DefinedLater"):
        register(Early)

    class NoBlock(DecoderModel):
        config_class = OutsideConfig
        weight_map = staticmethod(LigerLlama.weight_map)

        def __init__(self, config: OutsideConfig) -> None:
            super().__init__(config)
            self.build(norm=RMSNorm(config.hidden_size))

    with pytest.raises(ConfigError, match="NoBlock does not define make_block"):
        register(NoBlock)


def test_installed_packages_bring_their_families(
    monkeypatch: pytest.MonkeyPatch, registry: None
) -> None:
    points = [
        EntryPoint("outside", f"{__name__}:LigerOutside", auto.ENTRY_POINTS),
        EntryPoint("broken", "no_such_module", auto.ENTRY_POINTS),
        EntryPoint("registers itself", __name__, auto.ENTRY_POINTS),
    ]
    monkeypatch.setattr(auto, "_imported", False)
    monkeypatch.setattr(auto.metadata, "entry_points", lambda group: points)
    with pytest.warns(UserWarning, match="'broken' = 'no_such_module' .* cannot be loaded"):
        found = families()
    assert found["outside"] is LigerOutside and "llama" in found


@pytest.mark.parametrize("family", sorted({cls.__name__ for cls in families().values()}))
def test_the_weight_maps_of_this_package_pass_the_check(family: str) -> None:
    (cls,) = {each for each in families().values() if each.__name__ == family}
    auto.check_weight_map(cls)


@pytest.mark.usefixtures("registry")
def test_a_small_config_that_the_family_refuses_names_the_way_out() -> None:
    class PlainHeads(OutsideConfig):
        model_type = "plain_heads"

        def validate(self) -> None:
            super().validate()
            if self.num_key_value_heads != self.num_attention_heads:
                raise ConfigError("config: heads are not grouped")

    plain = type("Plain", (LigerLlama,), {"config_class": PlainHeads})
    with pytest.raises(ConfigError, match="not grouped; set small_fields of PlainHeads"):
        register(plain)


def test_an_unknown_model_type_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ConfigError, match=r"'unheard_of' is not supported.*import the file"):
        family_of(tmp_path)


def test_the_tokenizer_of_an_adapter_without_one_is_that_of_its_base(tmp_path: Path) -> None:
    """PEFT writes no tokenizer beside an adapter."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert tokenizer_folder(adapter) == base and tokenizer_folder(base) == base
    (adapter / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(adapter) == adapter
    (adapter / "tokenizer.json").unlink()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="base_model_name_or_path is None"):
        tokenizer_folder(adapter)
