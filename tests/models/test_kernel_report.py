"""`model.kernels()` reports the ops' backends, the attention of each layer and replaced modules."""

import pytest
import torch

from ligermodels.layers import LayerNorm
from ligermodels.models import kernel_report
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from tests.models.pairs import tiny_model, tokens

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}


def make(family: str, **changes: object) -> DecoderModel:
    cls = families()[family]
    return cls(cls.config_class(**{**SIZES, **changes}))


def test_attention_on_a_cpu() -> None:
    report = make("mistral", sliding_window=7).kernels()
    dense = "scaled_dot_product_attention with a dense mask"
    assert report["attention, window 7"] == "; ".join(
        [
            dense,
            f"documents inferred from position_ids: {dense}",
            f"documents given by cu_seqlens and max_seqlen: {dense}",
            f"padding: {dense}",
        ]
    )
    report = make("llama").kernels()
    assert report["attention"].startswith("scaled_dot_product_attention; documents")


def test_each_kind_of_layer_is_listed() -> None:
    report = make("gemma2", sliding_window=9, attn_logit_softcapping=20.0).kernels()
    assert report["attention, window 9, soft cap 20"] == "the formula with a dense mask"
    assert report["attention, soft cap 20"] == "the formula with a dense mask"
    assert "qk_norm_rope" not in report
    report = make("gemma3_text", sliding_window=9, sliding_window_pattern=2).kernels()
    assert {"attention, window 9", "attention", "qk_norm_rope"} <= report.keys()


def test_swapped_norms_are_named() -> None:
    model = make("gemma3_text")
    model.layers[1].self_attn.q_norm = torch.nn.Identity()
    model.layers[0].pre_feedforward_layernorm.register_forward_hook(lambda *_: None)
    told = model.kernels()["norm + linear, linear + rope, glu + linear"]
    assert "layers.0.pre_feedforward_layernorm" in told
    assert "layers.1.self_attn.q_norm" in told
    model.layers[1].self_attn.k_norm = None
    told = model.kernels()["norm + linear, linear + rope, glu + linear"]
    assert "k_norm" not in told
    assert "qk_norm_rope" in model.kernels()
    model.layers[0].self_attn.q_norm = model.layers[2].self_attn.q_norm = None
    assert "qk_norm_rope" not in model.kernels()


def test_the_backend_of_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    report = model.kernels()
    assert report["rms_norm"] == "torch (cpu tensors use plain PyTorch)"
    assert report["linear_cross_entropy"].startswith("chunked torch")
    monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    assert model.kernels()["glu"] == "triton (LIGERMODELS_BACKEND=triton)"
    monkeypatch.setenv("LIGERMODELS_BACKEND", "torch")
    ids, _ = tokens()
    assert model.kernels()["rope"] == "torch (LIGERMODELS_BACKEND=torch)"
    model(ids)
    monkeypatch.setenv("LIGERMODELS_BACKEND", "cuda")
    with pytest.raises(ValueError, match="LIGERMODELS_BACKEND='cuda'"):
        model.kernels()
    with pytest.raises(ValueError, match="LIGERMODELS_BACKEND='cuda'"):
        model(ids)


def test_blocks_from_outside_are_unknown() -> None:
    """Their forward may do anything, whatever the names of their parts are."""

    class Odd(type(tiny_model().layers[0])):  # type: ignore[misc]
        pass

    model = tiny_model()
    fused = "norm + linear, linear + rope, glu + linear"
    assert model.kernels()[fused] == "fused" and "modules from outside" not in model.kernels()
    model.layers[1].__class__ = Odd
    report = model.kernels()
    assert report[fused] == "fused; unknown in Odd"
    assert report["modules from outside"] == "unknown (the code of Odd decides)"


def test_the_ops_are_those_of_the_layers() -> None:
    assert list(kernel_report._ops(torch.nn.Sequential(LayerNorm(8)))) == [
        *("layer_norm", "add_layer_norm", "cross_entropy")
    ]
    assert list(kernel_report._ops(torch.nn.Linear(2, 2))) == ["cross_entropy"]
