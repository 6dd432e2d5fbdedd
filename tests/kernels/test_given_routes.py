"""Routes that are given: an expert that is named twice, and rows that a token does not have."""

from __future__ import annotations

import pytest
import torch

from ligermodels import kernels
from ligermodels.kernels.dispatch import select


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_an_expert_that_is_named_twice(float32_place, score, normalize) -> None:
    torch.manual_seed(0)
    # Their transpose is contiguous.
    experts = torch.tensor([[0, 1, 4], [0, 2, 4], [2, 3, 4]], device=float32_place.device).t()
    logits = torch.randn(3, 5, device=float32_place.device, requires_grad=True)
    exact = logits.detach().double().requires_grad_()
    scores = exact.softmax(-1) if score == "softmax" else exact.sigmoid()
    expected = scores.gather(-1, experts)
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    found, _ = kernels.routing(logits, 3, experts=experts, score=score, normalize=normalize)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    upstream = torch.randn(3, 3, device=float32_place.device)
    found.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    if float32_place.device == "cpu":
        with pytest.raises(IndexError, match="routing: expert 5 is none of 5 experts"):
            kernels.routing(logits, 2, experts=torch.tensor([[0, 5]] * 3))


def test_a_sum_leaves_out_the_rows_that_a_token_does_not_have(float32_place) -> None:
    rows = torch.randn(3, 40, device=float32_place.device)
    place = torch.tensor([[2, -1], [-1, -1], [0, 1]], device=float32_place.device).int()
    found = select("expert_mlp", rows).expert_sum(rows, place, None, None, None)
    expected = torch.stack([rows[2], torch.zeros_like(rows[0]), rows[0] + rows[1]])
    torch.testing.assert_close(found, expected)
