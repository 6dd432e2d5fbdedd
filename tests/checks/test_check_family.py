"""check_family finds what is wrong in a family, and says which check it fails."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels import DecoderModel, LigerLlama, LlamaConfig, Phi3Config
from ligermodels.checks import check_family as module
from ligermodels.checks.check_family import CHECKS, check_family, shrunk
from ligermodels.layers import RMSNorm
from ligermodels.models.gemma3 import Gemma3Config


@pytest.fixture(autouse=True)
def without_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one config, because the variants of its boolean fields take most of the time."""
    monkeypatch.setattr(module, "small_variants", lambda config: {"small config": config})


def failed(cls: Any, config: Any = None) -> dict[str, str]:
    """Return the failed checks of the first config, and why."""
    row = check_family(cls, config, compile=False).rows["small config"]
    return {check: cell.note for check, cell in row.items() if not cell.ok}


def family(**members: Any) -> Any:
    return type("LigerWrong", (LigerLlama,), {"__module__": __name__, **members})


def test_a_right_family_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    report = check_family(LigerLlama, compile=False)
    assert report.ok and set(report.rows["small config"]) == CHECKS.keys() - {"compile"}
    assert list(report.rows) == [
        "small config",
        *("tie_word_embeddings=True", "attention_bias=True", "mlp_bias=True"),
    ]
    assert "FAILED" not in str(report) and max(map(len, str(report).splitlines())) <= 80


def test_other_numbers_are_found() -> None:
    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        out = LigerLlama.forward(self, *inputs, **options)
        return 1.001 * out if isinstance(out, Tensor) else out

    assert failed(family(forward=forward)).keys() == {"logits", "padding"}

    def make_block(self: Any, layer_index: int) -> Any:
        block = LigerLlama.make_block(self, layer_index)
        block.self_attn.scale *= 1.01
        return block

    wrong = failed(family(make_block=make_block))
    assert {"logits", "gradients"} <= wrong.keys() and "export" not in wrong


def test_the_parameter_with_a_wrong_gradient_is_named() -> None:
    """Here transformers does not train the embedding of the padding token, and the family does."""

    def __init__(self: Any, config: Any) -> None:
        DecoderModel.__init__(self, config)
        self.build(norm=RMSNorm(config.hidden_size), trains_padding=True)

    wrong = family(__init__=__init__)
    assert failed(wrong) == {"gradients": "the worst is embed_tokens.weight"}
    report = str(check_family(wrong, compile=False))
    assert "small config, gradients: the worst is embed_tokens.weight" in report


def test_a_factor_between_outputs_is_named() -> None:
    def __init__(self: Any, config: Any) -> None:
        DecoderModel.__init__(self, config)
        self.build(norm=RMSNorm(config.hidden_size), embedding_scale=0.5)

    note = failed(family(__init__=__init__))["logits"]
    assert note.endswith("embed_tokens: transformers' output is 2 times it")


def test_a_gradient_that_is_not_a_number_fails() -> None:
    one, nan = torch.ones(2), torch.full((2,), torch.nan)
    assert module._worst({"a": one, "b": nan}, {"a": one, "b": one}) == (math.inf, "b")


def test_an_exception_is_the_reason() -> None:
    def generate(self: Any, *inputs: Any, **options: Any) -> Any:
        raise RuntimeError("no cache here\nand more")

    report = check_family(family(generate=generate), compile=False)
    assert not report.ok and report.worst()["generation"].note == "RuntimeError: no cache here"
    assert "small config, generation: RuntimeError: no cache here" in str(report)


def test_a_wrong_name_of_the_architecture_is_found() -> None:
    config_class = type("Wrong", (LlamaConfig,), {"architecture": "LlamaForEverything"})
    notes = failed(family(config_class=config_class))
    assert notes.keys() == {"export"} and "set architecture" in notes["export"]


def test_a_model_that_transformers_does_not_know() -> None:
    config_class = type("OwnConfig", (LlamaConfig,), {"model_type": "nobody_has_this"})
    report = check_family(family(config_class=config_class), compile=False)
    row = report.rows["small config"]
    assert report.ok
    assert {c for c, cell in row.items() if cell.error is None} == {
        *("logits", "loss", "gradients", "padding")
    }
    assert "left out: transformers does not know 'nobody_has_this'" in str(report)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "ligermodels.integrations.hf_reference", raising=False)
    row = check_family(LigerLlama, compile=False).rows["small config"]
    assert row["logits"].note.startswith("left out: transformers is not installed")
    assert row["generation"].error == row["export"].error == 0


def test_what_transformers_refuses_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_hf(config: Any) -> dict[str, Any]:
        return {**real(config), "hidden_size": 41}

    real = module.hf_config.to_hf
    monkeypatch.setattr(module.hf_config, "to_hf", to_hf)
    notes = failed(LigerLlama)
    assert notes and all(note.startswith("transformers: ") for note in notes.values())


@pytest.mark.usefixtures("registry")
def test_the_config_of_a_checkpoint_gets_small_sizes() -> None:
    llama = LlamaConfig.preset("llama-3.1-8b", attention_bias=True, extra={"mine": [1] * 32})
    small = shrunk(llama)
    expected = LlamaConfig.small()
    assert (small.hidden_size, small.num_hidden_layers) == (expected.hidden_size, 2)
    assert small.attention_bias and small.rope_theta == llama.rope_theta
    assert small.extra == {"mine": [1, 1]}
    assert small.rope_scaling == {**llama.rope_scaling, "original_max_position_embeddings": 16}
    assert failed(LigerLlama, dataclasses.replace(llama, extra={})) == {}

    layers = ["sliding_attention"] * 5 + ["full_attention"]
    gemma = shrunk(Gemma3Config.preset("gemma-3-4b", num_hidden_layers=12, layer_types=layers * 2))
    assert gemma.layer_types == layers and gemma.sliding_window == 7

    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    published = Phi3Config(
        num_attention_heads=24,
        partial_rotary_factor=0.75,
        rope_scaling={"rope_type": "longrope", **factors},
    )
    small = shrunk(published)
    assert small.partial_rotary_factor == 0.75 and len(small.rope_scaling["long_factor"]) == 6
    assert small.sliding_window is None
