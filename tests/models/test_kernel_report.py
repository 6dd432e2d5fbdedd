"""`model.kernels()` reports the ops' backends, the attention of each layer and replaced modules."""

import pytest
import torch

from ligermodels.layers import LayerNorm
from ligermodels.models import kernel_report
from tests.models.pairs import tiny_model, tokens
from tests.tiny_models import random_model

FUSED = "norm + linear, linear + rope, glu + linear"


def test_the_attention_of_each_kind_of_layer() -> None:
    report = random_model("mistral", sliding_window=7).kernels()
    dense = "scaled_dot_product_attention with a dense mask"
    assert report["attention, window 7"] == (
        f"{dense}; documents inferred from position_ids: {dense}; "
        f"documents given by cu_seqlens and max_seqlen: {dense}; padding: {dense}"
    )
    report = random_model("gemma2", sliding_window=9, attn_logit_softcapping=20.0).kernels()
    assert report["attention, window 9, soft cap 20"] == "the formula with a dense mask"
    assert report["attention, soft cap 20"] == "the formula with a dense mask"
    assert "qk_norm_rope" not in report
    report = random_model("gemma3_text").kernels()
    assert report["attention"].startswith("scaled_dot_product_attention; documents")
    assert {"attention, window 5", "qk_norm_rope"} <= report.keys()


def test_replaced_modules_are_named() -> None:
    model = random_model("gemma3_text", tie_word_embeddings=False)
    assert model.kernels()[FUSED] == "fused"
    model.layers[2].mlp.down_proj = torch.nn.Sequential(model.layers[2].mlp.down_proj)
    model.head.proj = torch.nn.Sequential(model.head.proj)
    assert "layers.2.mlp.down_proj" in model.kernels()[FUSED]
    assert "chunk by chunk" in model.kernels()["linear_cross_entropy"]
    model.layers[1].self_attn.q_norm = torch.nn.Identity()
    model.layers[0].pre_feedforward_layernorm.register_forward_hook(lambda *_: None)
    told = model.kernels()[FUSED]
    assert "layers.0.pre_feedforward_layernorm" in told and "layers.1.self_attn.q_norm" in told
    model.layers[1].self_attn.k_norm = None
    assert "k_norm" not in model.kernels()[FUSED] and "qk_norm_rope" in model.kernels()
    model.layers[0].self_attn.q_norm = model.layers[2].self_attn.q_norm = None
    assert "qk_norm_rope" not in model.kernels()


def test_the_backend_of_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = tiny_model(), tokens()
    report = model.kernels()
    assert report["rms_norm"] == "torch (cpu tensors use plain PyTorch)"
    assert report["linear_cross_entropy"].startswith("chunked torch")
    for backend in ("triton", "torch"):
        monkeypatch.setenv("LIGERMODELS_BACKEND", backend)
        assert model.kernels()["glu"] == f"{backend} (LIGERMODELS_BACKEND={backend})"
    monkeypatch.setenv("LIGERMODELS_BACKEND", "cuda")
    for call in (model.kernels, lambda: model(ids)):
        with pytest.raises(ValueError, match="LIGERMODELS_BACKEND='cuda'"):
            call()
    assert list(kernel_report._ops(torch.nn.Sequential(LayerNorm(8)))) == [
        *("layer_norm", "add_layer_norm", "cross_entropy")
    ]


def test_blocks_from_outside_are_unknown() -> None:
    """Their forward may do anything, whatever the names of their parts are."""
    model = tiny_model()
    assert model.kernels()[FUSED] == "fused" and "modules from outside" not in model.kernels()
    model.layers[1].__class__ = type("Odd", (type(model.layers[1]),), {})
    report = model.kernels()
    assert report[FUSED] == "fused; unknown in Odd"
    assert report["modules from outside"] == "unknown (the code of Odd decides)"


def test_printed_it_is_a_table_of_the_terminals_width():
    report = random_model("mistral", sliding_window=7).kernels()
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")] == list(report)
