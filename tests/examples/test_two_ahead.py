"""Test that the composed decoder learns, is causal, and is the same after saving and loading."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model

from examples import two_ahead


@pytest.fixture(scope="module")
def data() -> torch.Tensor:
    return torch.tensor(list(two_ahead.TEXT.read_bytes()[:60_000]))


def small() -> two_ahead.TwoAhead:
    torch.manual_seed(0)
    return two_ahead.TwoAhead(hidden=48, layers=2, heads=4, kv_heads=2)


def test_the_loss_falls_and_the_model_can_be_saved_and_loaded(data, tmp_path):
    model = small()
    history = two_ahead.train(model, data, steps=60, batch=4, seq=96)
    assert history[0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.1)
    assert sum(history[-5:]) / 5 < 3.0
    save_model(model, str(tmp_path / "model.safetensors"))
    again = small()
    load_model(again, tmp_path / "model.safetensors")
    ids = data[None, :64]
    assert torch.equal(model(ids), again(ids))
    assert [loss.item() for loss in model.losses(ids)] == [x.item() for x in again.losses(ids)]


def test_both_losses_are_cross_entropy_of_the_right_tokens(data):
    model, ids = small(), data[:80].view(2, 40)
    one, two = model.losses(ids)
    hidden = model(ids)
    for loss, head, ahead in ((one, model.next, 1), (two, model.next_but_one, 2)):
        logits = head.logits(hidden[:, :-ahead])
        expected = F.cross_entropy(logits.flatten(0, 1), ids[:, ahead:].flatten())
        torch.testing.assert_close(loss, expected)


def test_every_parameter_gets_a_gradient_and_the_tied_one_from_both_sides(data):
    model, ids = small(), data[None, :40]
    sum(model.losses(ids)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    absent = next(i for i in range(256) if i not in set(ids.flatten().tolist()))
    assert model.embed.weight.grad[absent].abs().sum() > 0


def test_no_position_sees_a_later_one(data):
    model, ids = small(), data[None, :40].clone()
    before = model(ids)
    ids[0, 20] = (ids[0, 20] + 1) % 256
    after = model(ids)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])
