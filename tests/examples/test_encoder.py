"""The encoder learns, sees both sides of a token, and not what its mask and windows hide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from examples import encoder


@pytest.fixture(scope="module")
def data() -> Tensor:
    return torch.tensor(list(encoder.TEXT.read_bytes()[:60_000]))


def small(**options: int) -> encoder.Encoder:
    torch.manual_seed(0)
    return encoder.Encoder(hidden=48, layers=2, heads=4, **options)


def test_it_learns_to_fill_in_bytes(capsys):
    """Each byte is one more than the byte before it, so that both neighbours tell it."""
    model, counting = small(), torch.arange(600) % 10 + 48
    history = encoder.train(model, counting, steps=140, seq=32)
    assert history[0] == pytest.approx(torch.log(torch.tensor(258.0)).item(), abs=0.1)
    assert sum(history[-10:]) / 10 < 0.3
    assert encoder.fill_in(model, "345_78901_345") == "3456789012345"


def changed_by(model: encoder.Encoder, ids: Tensor, place: int) -> list[int]:
    """Return the places whose hidden state changes when the byte at `place` does."""
    other = ids.clone()
    other[0, place] = (other[0, place] + 1) % 256
    difference = (model(ids) - model(other))[0].abs().amax(-1)
    return (difference > 0).nonzero().flatten().tolist()


def test_each_token_sees_both_sides_as_far_as_its_window(data):
    ids = data[None, :40]
    assert changed_by(small(), ids, 20) == [*range(40)]
    near = small(window=4)
    near.layers = near.layers[:1]
    assert changed_by(near, ids, 20) == [*range(17, 24)]


def test_padding_changes_nothing(data):
    model, ids = small(), data[None, :30]
    padded = torch.nn.functional.pad(ids, (0, 10), value=encoder.PADDING)
    tokens = torch.arange(40)[None] < 30
    torch.testing.assert_close(model(padded, tokens)[:, :30], model(ids))


def test_every_parameter_gets_a_gradient(data):
    model = small()
    model(**encoder.batch_of(data, torch.Generator().manual_seed(0))).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
