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
    LigerLlama,
    LlamaConfig,
    WeightMap,
    load_pretrained,
    register,
)
from ligermodels.converters.inspect import describe
from ligermodels.converters.verify import verify
from ligermodels.models import auto
from ligermodels.models.auto import families, tokenizer_folder
from tests.families import FAMILIES
from tests.models.pairs import TINY


@dataclass(kw_only=True)
class OutsideConfig(LlamaConfig):
    model_type: ClassVar[str] = "outside"
    wrapper_type: ClassVar[str | None] = "outside_wrapper"
    architecture: ClassVar[str | None] = "OutSideForCausalLM"


class LigerOutside(LigerLlama):
    config_class = OutsideConfig


def test_every_family_file_registers_itself() -> None:
    """The folder is the only list of the families."""
    script = "from ligermodels.models.auto import families; print(*families())"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == list(families()) == sorted(FAMILIES)
    own = {cls.__module__ for cls in families().values()}
    folder = Path(auto.__file__).parent
    written = {p.stem for p in folder.glob("*.py") if "@register" in p.read_text()}
    assert own == {f"ligermodels.models.{name}" for name in written}


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


def test_an_unsupported_model_type_lists_the_supported(tmp_path: Path) -> None:
    for raw in ({}, {"model_type": "gpt2"}, {"model_type": ["llama"]}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        complaint = r"config\.json: model_type .* supported: gemma, .*llama.*import the file"
        with pytest.raises(ConfigError, match=complaint):
            AutoLiger.from_hf(tmp_path)


@pytest.mark.usefixtures("registry")
def test_a_class_may_be_registered_twice_and_defined_anew() -> None:
    register(register(LigerOutside))
    again = type("LigerOutside", (LigerOutside,), {"__module__": __name__})
    register(again)
    assert families()["outside"] is again


def outside_map(change: Any) -> dict[str, Any]:
    """Return the fields of a family whose map's entries are those that `change` returns."""

    def weight_map(config: OutsideConfig) -> Any:
        return WeightMap(tuple(change(list(LigerLlama.weight_map(config)))))

    return {"weight_map": staticmethod(weight_map)}


def overlapping(entries: list[Entry]) -> list[Entry]:
    first, *rest = entries[1].spans
    return [*entries[:1], replace(entries[1], spans=(first, replace(first, row=1), *rest))]


def without(part: str) -> dict[str, Any]:
    return outside_map(lambda entries: [entry for entry in entries if part not in entry.name])


def build_too_early(model: Any, layer_index: int) -> Any:
    return DefinedLater(layer_index)  # type: ignore[name-defined]  # noqa: F821


class PlainHeads(OutsideConfig):
    def validate(self) -> None:
        super().validate()
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError("config: heads are not grouped")


def outside(**attributes: Any) -> Any:
    return type("OutsideConfig", (OutsideConfig,), attributes)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"config_class": None}, "Mine: config_class is None; set it to"),
        ({"config_class": outside(model_type=None)}, "OutsideConfig has no model_type; set it to"),
        ({"config_class": outside(model_type="llama")}, r"'llama' belongs to \S*Llama; \S*\.Mine"),
        ({"config_class": outside(wrapper_type="llama")}, r"'llama' belongs to \S*\.LigerLlama"),
        (
            {"config_class": PlainHeads},
            r"small config \(with PlainHeads\.small_f.*not grouped",
        ),
        ({"weight_map": staticmethod(lambda config: [])}, "'list' object has no attribute"),
        (outside_map(lambda e: [*e, e[0]]), "'embed_tokens.weight' occurs twice"),
        (
            outside_map(lambda e: [replace(e[0], name="embed.weight"), *e[1:]]),
            "'embed.weight': .* no parameter",
        ),
        (without("head.proj"), "small config .*: .*entry 'head.proj.weight' is missing"),
        (without(".bias"), r"attention_bias=True .*: .*'layers.0.self_attn.qkv_proj"),
        (outside_map(overlapping), "its spans must fill each row once"),
        ({"make_block": build_too_early}, r"small config .*: NameError: .*DefinedLater"),
        ({"make_block": DecoderModel.make_block}, "Mine does not define make_block"),
        ({"make_block": lambda model, index: None}, "make_block returned None; return a layer"),
    ],
)
def test_a_class_that_is_no_family_is_not_registered(
    fields: dict[str, Any], complaint: str
) -> None:
    before = families()
    cls = type("Mine", (LigerOutside,), {"__module__": __name__, **fields})
    with pytest.raises(ConfigError, match=complaint):
        register(cls)
    with pytest.raises(ConfigError, match=r"register: .* is no model class; pass a class"):
        register("olmo2")  # type: ignore[type-var]
    assert families() == before


@pytest.mark.usefixtures("registry")
def test_a_map_that_is_wrong_for_the_sizes_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    """Registration checks the booleans of a small config; a load checks the checkpoint's sizes."""
    deep = register(type("LigerOutside", (LigerOutside,), without("layers.2")))
    LigerOutside(OutsideConfig(**TINY)).save_hf(tmp_path)
    for load in (deep.from_hf, lambda path: load_pretrained(LigerLlama(LlamaConfig(**TINY)), path)):
        with pytest.raises(ConfigError, match=r"entry 'layers.2.*is missing"):
            load(tmp_path)


@pytest.mark.parametrize("cls", sorted(set(families().values()), key=lambda cls: cls.__name__))
def test_the_weight_maps_of_this_package_pass_the_check(cls: Any) -> None:
    auto.check_weight_map(cls)
