"""Random token log-probabilities and masks for the losses' tests, hard cases among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.losses import Mean
from ligermodels.losses.policy import grpo_loss


class Tokens(NamedTuple):
    log_probs: Tensor  # (rows, seq), float64, a leaf
    ref: Tensor
    old: Tensor
    sampling: Tensor
    entropy: Tensor  # a leaf
    sum_sq: Tensor  # log sum_v p_v^2
    mask: Tensor  # (rows, seq) bool

    def to(self, dtype: torch.dtype) -> Tokens:
        cast = [x.detach().to(dtype) for x in self[:-1]]
        for leaf in (cast[0], cast[4]):
            leaf.requires_grad_()
        return Tokens(*cast, self.mask)

    def rows(self, index: list[int]) -> Tokens:
        """Return those rows; gradients reach the leaves of the whole batch."""
        return Tokens(*(x[index] for x in self))


def random_tokens(mask: Tensor, seed: int = 0) -> Tokens:
    """Return log-probabilities as the head makes them: 0 where the mask is false."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, width: float) -> Tensor:
        values = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
        return torch.where(mask, low + width * values, 0.0)

    log_probs = draw(-3.0, 2.9)
    near = [log_probs + 0.7 * torch.where(mask, draw(-0.5, 1.0), 0.0) for _ in range(3)]
    entropy, sum_sq = draw(0.1, 3.0), draw(-2.0, 1.9)
    tokens = Tokens(log_probs, *(x.clamp(max=0) for x in near), entropy, sum_sq, mask)
    return tokens.to(torch.float64)


def masks(rows: int, seq: int = 7) -> Iterator[tuple[str, Tensor]]:
    """Yield masks (rows, seq) of completions, named."""
    generator = torch.Generator().manual_seed(rows)
    yield "random", torch.rand(rows, seq, generator=generator) < 0.6
    position, length = torch.arange(seq), torch.arange(rows)[:, None] % seq + 1
    yield "uneven lengths", (position >= 1) & (position < 1 + length)
    empty = torch.rand(rows, seq, generator=generator) < 0.6
    empty[0] = empty[-1] = False
    yield "empty completions", empty
    yield "one pair", torch.rand(2, seq, generator=generator) < 0.8
    yield "all ignored", torch.zeros(rows, seq, dtype=torch.bool)


def policy_loss(tokens: Tokens, advantages: Tensor, **options: Any) -> Any:
    given = {
        "old_log_probs": tokens.old,
        "ref_log_probs": tokens.ref,
        "sampling_log_probs": tokens.sampling,
        "entropy": tokens.entropy,
        "max_completion_length": 11,  # as trl_own.py has it
    }
    return grpo_loss(tokens.log_probs, advantages, tokens.mask, **given | options)


def some_advantages(rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([1.0, -0.7, 0.0, 0.4, -1.5, 2.0], dtype=dtype)[:rows]


def gathered(mark: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Return the cases of `pairwise` with one parameter, `options`, which holds all of them."""
    names, cases = mark.args[0].split(","), mark.args[1]
    made = [pytest.param(dict(zip(names, case.values)), id=case.id) for case in cases]
    return pytest.mark.parametrize("options", made)


def assert_same(found: Tensor, expected: Tensor, *leaves: Tensor, **tolerance: float) -> None:
    """Compare two losses and their gradients."""
    torch.testing.assert_close(found, expected, **tolerance)
    theirs = gradients(expected, *leaves)
    torch.testing.assert_close(gradients(found, *leaves), theirs, **tolerance)


def assert_metrics(metrics: dict[str, Mean], expected: dict[str, float]) -> None:
    """Compare metrics with those of TRL, which has more."""
    found = {name: float(mean.value) for name, mean in metrics.items()}
    assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-6)


def assert_refused(*calls: tuple[str, Callable[[], object]]) -> None:
    """Assert that each call raises a ConfigError with these words."""
    for fault, call in calls:
        with pytest.raises(ConfigError, match=fault):
            call()


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Return the gradients; a leaf that the loss does not use has the gradient 0."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found)]
