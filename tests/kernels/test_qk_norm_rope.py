from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import qk_norm_rope, rms_norm, rope
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import COMPILED_PLACES
from tests.pairwise import pairwise

# Each shape is (batch, seq, heads, kv heads, head_dim).
SHAPES = [
    (2, 5, 4, 2, 8),
    (1, 1, 1, 1, 2),
    (3, 2, 3, 3, 6),
    (1, 7, 9, 3, 64),
    (2, 3, 4, 1, 20),
    (0, 4, 2, 1, 4),
    (2, 0, 2, 1, 4),
]
VARIANTS = [("llama", 0.0), ("gemma", 1.0)]
CONSTANT = ("cos", "sin")


def inputs(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, rows: int = 1) -> dict:
    angles = random(rows, seq, head_dim // 2, seed=5, scale=3.0)
    return {
        "qkv": random(batch, seq, (heads + 2 * kv_heads) * head_dim, seed=4, scale=3.0),
        "q_weight": random(head_dim, seed=2),
        "k_weight": random(head_dim, seed=3),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }


@pairwise(
    indirect=["compiled_place"], compiled_place=COMPILED_PLACES, shape=SHAPES, variant=VARIANTS
)
def test_qk_norm_rope(compiled_place, shape, variant) -> None:
    casting_mode, offset = variant
    made = inputs(*shape) | {"casting_mode": casting_mode, "offset": offset, "eps": 1e-5}
    compare(qk_norm_rope, formulas.qk_norm_rope, made, compiled_place, constant=CONSTANT)


@pytest.mark.parametrize("used", range(3))
def test_one_output_used(float32_place, used) -> None:
    compare(
        lambda **kwargs: qk_norm_rope(**kwargs)[used],
        lambda **kwargs: formulas.qk_norm_rope(**kwargs)[used],
        inputs(2, 3, 2, 1, 8),
        float32_place,
        frozen=(("k_weight",), ("q_weight",), ("q_weight", "k_weight"))[used],
        constant=CONSTANT,
    )


def test_gradients_in_the_layout_of_attention(place) -> None:
    """Upstream gradients have the layout of SDPA's, heads before tokens, or are expanded."""
    made = inputs(2, 3, 2, 1, 4)

    def run(op, **kwargs) -> torch.Tensor:
        q, k, v = op(**kwargs)
        weights = torch.arange(q.numel(), device=q.device).view(q.transpose(1, 2).shape)
        total = (q.transpose(1, 2).contiguous() * weights.to(q.dtype)).sum()
        (total + k.sum() + 2 * v.sum()).backward()
        return kwargs["qkv"].grad.double().cpu()

    low = {
        k: v.to(torch.float32 if k in CONSTANT else place.dtype).to(place.device)
        if isinstance(v, torch.Tensor)
        else v
        for k, v in made.items()
    }
    exact = {k: v.double().cpu() if isinstance(v, torch.Tensor) else v for k, v in low.items()}
    low["qkv"].requires_grad_()
    exact["qkv"].requires_grad_()
    expected = run(formulas.qk_norm_rope, **exact)
    error = (run(qk_norm_rope, **low) - expected).norm() / expected.norm()
    assert error < (1e-2 if place.dtype == torch.bfloat16 else 1e-5)


def test_is_the_norm_then_the_rotation(float32_place) -> None:
    """The two separate ops round once more; in float32 they agree closely."""
    made = inputs(2, 3, 4, 2, 8)
    low = {
        k: v.float().to(float32_place.device) if isinstance(v, torch.Tensor) else v
        for k, v in made.items()
    }
    parts = low["qkv"].unflatten(-1, (8, 8))
    q = rms_norm(parts[:, :, :4], low["q_weight"])
    k = rms_norm(parts[:, :, 4:6], low["k_weight"])
    packed = torch.cat((q, k, parts[:, :, 6:]), -2).flatten(-2)
    expected = rope(packed, low["cos"], low["sin"], 4, 2)
    for ours, want in zip(qk_norm_rope(**low), expected):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


def test_v_is_a_view_and_qkv_is_all_that_is_kept(float32_place) -> None:
    place = float32_place
    made = inputs(2, 3, 4, 2, 8)
    qkv = made.pop("qkv").to(place.dtype).to(place.device).requires_grad_()
    low = {
        k: v.to(place.dtype).to(place.device) if isinstance(v, torch.Tensor) else v
        for k, v in made.items()
    }
    kept = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        q, _, v = qk_norm_rope(qkv, **low)
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert q.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
    small = sum(low[name].nbytes for name in ("q_weight", "k_weight", "cos", "sin"))
    assert sum(kept.values()) <= qkv.nbytes + small


def test_refusals() -> None:
    cos, weight = torch.ones(1, 3, 4), torch.ones(8)
    qkv = torch.ones(2, 3, 32)
    with pytest.raises(ValueError, match="packed rows have"):
        qk_norm_rope(torch.ones(2, 3, 33), weight, weight, cos, cos, 2, 1)
    with pytest.raises(ValueError, match=r"qk_norm_rope: k_weight \(4,\) does not fit k .*\(8,\)"):
        qk_norm_rope(qkv, weight, torch.ones(4), cos, cos, 2, 1)
    with pytest.raises(ValueError, match=r"qk_norm_rope: q_weight is torch\.int64"):
        qk_norm_rope(qkv, weight.long(), weight, cos, cos, 2, 1)
    with pytest.raises(ValueError, match=r"qk_norm_rope: qkv is torch\.int64"):
        qk_norm_rope(qkv.long(), weight, weight, cos, cos, 2, 1)
    with pytest.raises(ValueError, match=r"qk_norm_rope: sin is torch\.complex64"):
        qk_norm_rope(qkv, weight, weight, cos, cos.to(torch.complex64), 2, 1)
    with pytest.raises(ValueError, match="casting_mode='hf'"):
        qk_norm_rope(qkv, weight, weight, cos, cos, 2, 1, casting_mode="hf")
