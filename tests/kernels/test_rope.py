from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import qk_norm_rope, rope, split_qkv
from ligermodels.kernels.dispatch import select
from tests.kernels import formulas
from tests.kernels.checks import compare, random

# Each shape is (batch, seq, heads, kv heads, head_dim).
SHAPES = [(2, 5, 4, 2, 8), (1, 1, 1, 1, 2), (3, 2, 3, 3, 6), (1, 7, 9, 3, 16), (0, 4, 2, 1, 4)]


def inputs(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, rows: int = 1) -> dict:
    angles = random(rows, seq, head_dim // 2, seed=5, scale=3.0)
    return {
        "qkv": random(batch, seq, (heads + 2 * kv_heads) * head_dim, seed=4),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }


CONSTANT = ("cos", "sin")
# The part of a head that is rotated, and whether its pairs are neighbours.
PARTS = [(4, False), (4, True), (6, True), (8, True)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope(float32_place, shape) -> None:
    compare(rope, formulas.rope, inputs(*shape), float32_place, constant=CONSTANT)


@pytest.mark.parametrize(("rotated", "interleaved"), PARTS, ids=str)
def test_a_part_of_each_head_and_neighbouring_pairs(float32_place, rotated, interleaved) -> None:
    made = inputs(2, 5, 4, 2, 8) | {"interleaved": interleaved}
    made |= {name: made[name][..., : rotated // 2] for name in CONSTANT}
    compare(rope, formulas.rope, made, float32_place, constant=CONSTANT, layout="sliced")


def test_nothing_is_rotated() -> None:
    qkv, none = torch.randn(2, 5, 32), torch.empty(1, 5, 0)
    for ours, want in zip(rope(qkv, none, none, 2, 1), split_qkv(qkv, 2, 1)):
        assert torch.equal(ours, want) and ours.data_ptr() == want.data_ptr()


def test_gradients_in_the_layout_of_attention(place) -> None:
    """Upstream gradients have the layout of SDPA's, heads before tokens, or are expanded."""
    made = inputs(2, 3, 2, 1, 4)
    qkv = made["qkv"].to(place.dtype).to(place.device).requires_grad_()
    angles = [made[k].float().to(place.device) for k in CONSTANT]
    q, k, v = rope(qkv, *angles, 2, 1)
    (q.transpose(1, 2).contiguous().sum() + k.sum() + 2 * v.sum()).backward()
    exact = made["qkv"].requires_grad_()
    q, k, v = formulas.rope(exact, made["cos"], made["sin"], 2, 1)
    (q.sum() + k.sum() + 2 * v.sum()).backward()
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(qkv.grad.double().cpu(), exact.grad, rtol=tolerance, atol=tolerance)


def test_in_place(place) -> None:
    """In place, the packed buffer is overwritten except v, and the result is the same."""
    made = inputs(2, 5, 4, 2, 8)
    qkv = made["qkv"].to(place.dtype).to(place.device)
    angles = [made[k].float().to(place.device) for k in CONSTANT]
    ops = select("rope", qkv)
    for half, interleaved in ((4, False), (3, False), (4, True), (3, True)):
        some = [x[..., :half] for x in angles]
        expected = ops.rope_forward(qkv, *some, 4, 2, False, interleaved)
        buffer = qkv.clone()
        result = ops.rope_forward(buffer, *some, 4, 2, True, interleaved)
        assert result.data_ptr() == buffer.data_ptr()
        assert torch.equal(result, expected)
        assert torch.equal(split_qkv(buffer, 4, 2)[2], split_qkv(qkv, 4, 2)[2])


def test_the_launcher_does_not_rotate_a_strided_buffer_in_place() -> None:
    """It would have to copy the buffer, and the caller's buffer would keep its old values."""
    launchers = pytest.importorskip("ligermodels.kernels.triton").rope
    qkv, cos = torch.ones(2, 32, 5).transpose(1, 2), torch.ones(1, 5, 4)
    with pytest.raises(AssertionError):
        launchers.rope_forward(qkv, cos, cos, 2, 1, True)


def test_minus_sin_undoes_the_rotation(compiled_place) -> None:
    place = compiled_place
    made = inputs(1, 6, 3, 1, 8)
    qkv = made["qkv"].to(place.dtype).to(place.device)
    cos, sin = (made[k].float().to(place.device) for k in CONSTANT)
    packed = torch.cat([x.flatten(-2) for x in rope(qkv, cos, sin, 3, 1)], -1)
    back = torch.cat([x.flatten(-2) for x in rope(packed, cos, -sin, 3, 1)], -1)
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(back, qkv, rtol=tolerance, atol=tolerance)


def test_refusals() -> None:
    cos = torch.ones(1, 3, 4)
    with pytest.raises(ValueError, match="packed rows have"):
        rope(torch.ones(2, 3, 33), cos, cos, 2, 1)
    with pytest.raises(ValueError, match="2 rows of 5 tokens"):
        rope(torch.ones(2, 5, 32), cos, cos, 2, 1)
    with pytest.raises(ValueError, match="4 rows of 3 tokens"):
        rope(torch.ones(4, 3, 32), cos.expand(2, 3, 4), cos.expand(2, 3, 4), 2, 1)


def test_integers_are_refused() -> None:
    made = inputs(2, 5, 4, 2, 8)
    made["qkv"] = made["qkv"].long()
    with pytest.raises(ValueError, match=r"rope: qkv is torch\.int64; expected a floating point"):
        rope(**made)
    weight = torch.ones(8)
    with pytest.raises(ValueError, match=r"is torch\.int64; expected a floating point"):
        qk_norm_rope(**made, q_weight=weight, k_weight=weight)


@pytest.mark.parametrize("op", [rope, qk_norm_rope])
def test_head_counts_are_refused(op) -> None:
    """They are refused even if they add up to the columns; a kernel would write out of bounds."""
    made = inputs(2, 5, 2, 1, 8)
    weights = {} if op is rope else {"q_weight": torch.ones(8), "k_weight": torch.ones(8)}
    for heads, kv_heads, option in (
        (6, -1, "num_kv_heads=-1"),
        (-2, 3, "num_heads=-2"),
        (2.0, 1, "num_heads=2.0"),
    ):
        complaint = rf"rope: {option}; expected an integer of [01] or more"
        with pytest.raises(ValueError, match=complaint):
            op(**made | weights | {"num_heads": heads, "num_kv_heads": kv_heads})


def test_numpys_integers_are_head_counts(float32_place) -> None:
    place = float32_place
    numpy = pytest.importorskip("numpy")
    made = inputs(2, 5, 2, 1, 8)
    qkv, cos, sin = (made[k].to(place.device, place.dtype) for k in ("qkv", "cos", "sin"))
    expected = rope(qkv, cos, sin, 2, 1)
    for ours, want in zip(rope(qkv, cos, sin, numpy.int64(2), numpy.int32(1)), expected):
        assert torch.equal(ours, want)


def test_angles_that_do_not_fit_are_refused() -> None:
    """With a sine shorter than the cosine, a kernel would read out of bounds."""
    made = inputs(2, 5, 4, 2, 8)
    for sin in (made["sin"][:, :1], made["sin"][..., :2], made["sin"].expand(2, -1, -1)):
        with pytest.raises(ValueError, match="differ in shape"):
            rope(**made | {"sin": sin})
    with pytest.raises(ValueError, match="expected"):
        rope(**made | {"qkv": made["qkv"][0]})
    with pytest.raises(ValueError, match="have 0 columns"):
        rope(torch.ones(2, 5, 0), *[made["cos"][..., :0]] * 2, 2, 1)
