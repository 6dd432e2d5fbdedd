"""What ranks do together, in a single process. Several are in tests/parallel."""

from __future__ import annotations

import pytest
import torch

from ligermodels.errors import CheckpointError, SaveError
from ligermodels.parallel import ranks


def test_a_single_process_is_rank_0_of_1() -> None:
    assert (ranks.rank(), ranks.num_ranks(), ranks.is_distributed()) == (0, 1, False)
    assert ranks.gathered("a") == ["a"]
    assert ranks.from_rank_0("a") == "a"


def test_an_error_keeps_its_kind_on_its_own_rank() -> None:
    with pytest.raises(KeyError), ranks.error_on_all_ranks(CheckpointError):
        raise KeyError("x")
    with ranks.error_on_all_ranks():
        pass


def test_the_leader_gathers() -> None:
    found: list[torch.Tensor] = []
    ranks.led_by_rank_0(lambda get: found.append(get("a")), lambda name: torch.ones(2), SaveError)
    assert found[0].tolist() == [1, 1]
