"""Bradley-Terry's loss and the loss of process rewards: against TRL's own code and torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ligermodels.losses.reward import bradley_terry_loss, token_reward_loss
from tests.losses import trl_own
from tests.losses.batches import assert_metrics, assert_refused, assert_same, gradients


def test_bradley_terry_equals_trl() -> None:
    for pairs in (1, 5):
        rewards = torch.randn(2 * pairs, dtype=torch.float64, requires_grad=True)
        for margin in (None, torch.rand(pairs, dtype=torch.float64)):
            for coefficient in (None, 0.01):
                loss, metrics = bradley_terry_loss(
                    *rewards.chunk(2), margin=margin, center_rewards_coefficient=coefficient
                )
                expected, trl_metrics = trl_own.reward(rewards, margin, coefficient)
                assert_same(loss, expected, rewards)
                assert_metrics(metrics, trl_metrics)


def test_rewards_of_each_token() -> None:
    torch.manual_seed(0)
    chosen = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    rejected = torch.randn(3, 4, dtype=torch.float64)
    mask = torch.rand(3, 4) < 0.6
    loss = bradley_terry_loss(chosen, rejected, mask).loss
    torch.testing.assert_close(loss, -F.logsigmoid(chosen - rejected)[mask].mean())
    nothing = bradley_terry_loss(chosen, rejected, torch.zeros_like(mask)).loss
    assert nothing == 0 and gradients(nothing, chosen)[0].eq(0).all()
    margin = torch.rand(3, dtype=torch.float64)
    loss = bradley_terry_loss(chosen, rejected, mask, margin=margin).loss
    wanted = -F.logsigmoid(chosen - rejected - margin[:, None])[mask].mean()
    torch.testing.assert_close(loss, wanted)


def test_process_rewards() -> None:
    torch.manual_seed(0)
    rewards = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(-1, 2, (3, 5))
    labels[labels < 0] = -100
    valid = labels >= 0
    loss, metrics = token_reward_loss(rewards, labels)
    expected = F.binary_cross_entropy_with_logits(rewards[valid], labels[valid].double())
    assert_same(loss, expected, rewards)
    right = ((rewards > 0) == (labels > 0))[valid].double().mean()
    torch.testing.assert_close(metrics["accuracy"].value, right)
    assert token_reward_loss(rewards, torch.full_like(labels, -100)).loss == 0


def test_what_is_refused() -> None:
    one, tokens = torch.ones(3), torch.ones(1, 2)
    assert_refused(
        ("rejected: the shape", lambda: bradley_terry_loss(one, one[:2])),
        (r"margin: .* \(3, 1\)", lambda: bradley_terry_loss(one, one, margin=one[:, None])),
        ("labels: the shape", lambda: token_reward_loss(torch.ones(3, 2), one)),
        ("2.0; expected 0 to 1", lambda: token_reward_loss(tokens, 2 * tokens)),
        ("nan; expected 0 to 1", lambda: token_reward_loss(tokens, tokens * torch.nan)),
        ("-1.0; expected 0 to 1", lambda: token_reward_loss(tokens, -tokens)),
    )
