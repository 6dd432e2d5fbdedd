"""Rotary embedding, alone and after the norms of queries and keys: numbers of heads, and memory.

`test_grid.py` tests parts of a head, neighbouring pairs, layouts and outputs used alone.
"""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import qk_norm_rope, rope, split_qkv
from ligermodels.kernels.dispatch import select
from tests.kernels.checks import compare
from tests.kernels.ops_table import ANGLES, CASES, leaves
from tests.layers.saved import SavedBytes
from tests.pairwise import pairwise

# The leading dimensions, half of a head's size, and the numbers of heads.
SHAPES = [((1, 1), 1, 1, 1), ((3, 2), 3, 3, 3), ((1, 7), 32, 9, 3), ((2, 0), 2, 2, 1)]


@pairwise(name=["rope", "qk_norm_rope", "qk_norm_rope of Gemma"], shape=SHAPES)
def test_numbers_of_heads(float32_place, name, shape) -> None:
    case, (leading, half, heads, kv_heads) = CASES[name], shape
    made = case.inputs(leading, half, heads=heads, kv_heads=kv_heads)
    compare(case.function, case.formula, made, float32_place, constant=ANGLES)


def test_nothing_is_rotated() -> None:
    qkv, none = torch.randn(2, 5, 32), torch.empty(1, 5, 0)
    for ours, want in zip(rope(qkv, none, none, 2, 1), split_qkv(qkv, 2, 1)):
        assert torch.equal(ours, want) and ours.data_ptr() == want.data_ptr()


def test_in_place(place) -> None:
    """In place, the packed buffer is overwritten except v, and the result is the same."""
    made = CASES["rope"].inputs((2, 5), 4, heads=4)
    qkv = made["qkv"].to(place.dtype).to(place.device)
    angles = [made[k].float().to(place.device) for k in ANGLES]
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


def test_v_is_a_view_and_qkv_is_all_that_is_kept(float32_place) -> None:
    case = CASES["qk_norm_rope"]
    made = leaves(case, case.inputs((2, 3), 4), float32_place)
    with SavedBytes(*(made[name] for name in ("q_weight", "k_weight", *ANGLES))) as saved:
        q, _, v = qk_norm_rope(**made)
    assert v.untyped_storage().data_ptr() == made["qkv"].untyped_storage().data_ptr()
    assert q.untyped_storage().data_ptr() != made["qkv"].untyped_storage().data_ptr()
    assert saved.total <= made["qkv"].nbytes
