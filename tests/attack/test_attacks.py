"""A fast sample of the attacks runs in the suite; the thousands behind a marker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests import sandbox
from tests.attack.__main__ import load_attacks
from tests.attack.harness import ATTACKS, Attack, run_one
from tests.training import tiny_run

load_attacks()

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="CUDA does not survive a fork; python -m tests.attack hides the GPUs",
)


def test_an_older_version_can_be_attacked() -> None:
    """It has other modules, so only public names are imported at the head of a file."""
    helpers = [Path(module.__file__) for module in (sandbox, tiny_run)]
    for file in [*Path(__file__).parent.glob("*.py"), *helpers]:
        assert not re.findall(
            r"^(?:from|import) ligermodels\.(?!cli import main).*", file.read_text(), re.M
        ), file


@pytest.mark.parametrize("one", ATTACKS, ids=lambda one: f"{one.group}{one.fault}-{one.name}")
def test_sample(one: Attack) -> None:
    assert run_one(one, seed=0).broken is None


@pytest.mark.long
@pytest.mark.parametrize("one", ATTACKS, ids=lambda one: f"{one.group}{one.fault}-{one.name}")
def test_many_seeds(one: Attack) -> None:
    outcomes = {seed: run_one(one, seed) for seed in range(1, 41)}
    assert not {seed: o.broken for seed, o in outcomes.items() if o.broken is not None}
