"""Means that add up, sums over tokens, divisors, and checks."""

from __future__ import annotations

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.losses.terms import (
    Mean,
    check_shapes,
    divided,
    halves,
    mean_of,
    token_means,
    token_metrics,
    token_sums,
)


def test_means_add_up() -> None:
    values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    mask = torch.tensor([1, 0, 1])
    both = mean_of(values, mask) + mean_of(values)
    assert both.value == torch.tensor(16 / 5)
    assert not both.value.requires_grad
    assert float(mean_of(values, torch.zeros(3)).value) == 0
    assert float(Mean(torch.tensor(3.0), torch.tensor(2)).value) == 1.5


def test_masked_tokens_do_not_count_even_if_they_are_not_numbers() -> None:
    values = torch.tensor([[1.0, float("nan")], [2.0, 4.0], [float("inf"), 0.0]])
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]])
    assert token_sums(values, mask).tolist() == [1.0, 6.0, 0.0]
    assert token_means(values, mask).tolist() == [1.0, 3.0, 0.0]


def test_divisors() -> None:
    total = torch.tensor(6.0)
    for normalizer, expected in (
        (None, 2.0),
        (2, 3.0),
        (0, 6.0),
        (torch.tensor(4), 1.5),
        (torch.tensor(0), 6.0),
        (torch.tensor(4.0, dtype=torch.float64), 1.5),
    ):
        found = divided(total, normalizer, 3)
        assert found.item() == expected and found.dtype == torch.float32


def test_metrics_of_tokens() -> None:
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    values = torch.tensor([[1.0, 3.0], [5.0, 100.0]])
    metrics = token_metrics(mask, entropy=values, correct=values > 2, mean_logits=values)
    assert {k: float(v.value) for k, v in metrics.items()} == {
        "entropy": 3.0,
        "mean_token_accuracy": pytest.approx(2 / 3),
    }
    metrics = token_metrics(mask, correct=values > 2, mean_logits=values, paired=True)
    assert {k: float(v.value) for k, v in metrics.items()} == {
        "mean_token_accuracy": 0.5,
        "logits/chosen": 2.0,
        "logits/rejected": 5.0,
    }
    assert token_metrics(mask) == {}


def test_shapes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"log_probs: the shape is \(3,\); expected \(batch"):
        check_shapes(log_probs=torch.ones(3))
    with pytest.raises(ConfigError, match=r"mask: the shape is \(2, 1\), but that of log_probs"):
        check_shapes(log_probs=torch.ones(2, 3), ref=None, mask=torch.ones(2, 1))
    with pytest.raises(ConfigError, match="rows: 3 rows; expected the chosen"):
        halves(torch.ones(3), "rows")
