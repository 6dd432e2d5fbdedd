"""Experts of few tokens without gradients, as in decoding, beside the products of sorted rows."""

from __future__ import annotations

import pytest
import torch

from ligermodels import kernels
from ligermodels.kernels.dispatch import select
from tests.kernels.conftest import INTERPRETING
from tests.kernels.ops_table import CASES, leaves


@pytest.mark.parametrize("name", ["expert_mlp", "expert_mlp of gpt-oss"])
@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "experts", "top_k"),
    # One expert with more rows than a tile, all experts, and a single token with odd widths.
    [(19, 40, 24, 40, 3), (3, 33, 17, 6, 6), (1, 64, 130, 8, 1)],
)
def test_values(every_place, name, tokens, width, hidden, experts, top_k) -> None:
    sizes = {"width": width, "hidden": hidden, "experts": experts, "top_k": top_k}
    inputs = CASES[name].inputs((tokens,), **sizes)
    inputs["experts"][:, 0] = experts - 1
    made = leaves(CASES[name], inputs, every_place)
    expected = kernels.expert_mlp(**made)
    ops, pairs = select("expert_mlp", expected), tokens * top_k
    assert ops.are_few(pairs, experts) == (INTERPRETING or expected.is_cuda)
    with torch.no_grad():
        torch.testing.assert_close(kernels.expert_mlp(**made), expected)


def test_few_rows_are_those_of_sorted_ones(every_place) -> None:
    """The reference of the product of few rows takes each pair's own weight."""
    x, weight = torch.randn(2, 3, 8), torch.randn(4, 8, 5)
    experts = torch.tensor([[1, 3], [0, 1], [3, 2]], dtype=torch.int32)
    x, weight = (t.to(every_place.device, every_place.dtype) for t in (x[0], weight))
    experts = experts.to(x.device)
    made = select("expert_mlp", x).expert_linear_few(x, weight, experts)
    rows = x.repeat_interleave(2, 0)
    expected = torch.stack([row @ weight[e] for row, e in zip(rows, experts.flatten().tolist())])
    torch.testing.assert_close(made, expected)
