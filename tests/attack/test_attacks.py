"""A fast sample of the attacks runs in the suite; the thousands behind a marker."""

from __future__ import annotations

import pytest
import torch

from tests.attack.__main__ import load_attacks
from tests.attack.harness import ATTACKS, Attack, run_one
from tests.training import tiny_run

load_attacks()

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="CUDA does not survive a fork; python -m tests.attack hides the GPUs",
)


@pytest.mark.parametrize("one", ATTACKS, ids=lambda one: f"{one.group}{one.fault}-{one.name}")
def test_sample(one: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    # The many seeds draw the losses of their runs.
    monkeypatch.setattr("ligermodels.training.run.plot_losses", tiny_run.draw_nothing)
    assert run_one(one, seed=0).broken is None


@pytest.mark.long
@pytest.mark.parametrize("one", ATTACKS, ids=lambda one: f"{one.group}{one.fault}-{one.name}")
def test_many_seeds(one: Attack) -> None:
    outcomes = {seed: run_one(one, seed) for seed in range(1, 41)}
    assert not {seed: o.broken for seed, o in outcomes.items() if o.broken is not None}
