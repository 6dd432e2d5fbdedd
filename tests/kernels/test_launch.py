from __future__ import annotations

import pytest

from ligermodels.kernels.launch import Launch, Launches, launch_for
from tests.kernels.launches import launch_configs

TABLE = ((100, Launch(0, 2)), (1000, Launch(64, 4, 3)), (None, Launch(128, 8)))


def test_the_first_fit_is_taken_and_block_0_means_the_whole_row() -> None:
    expected = {
        0: Launch(1, 2),
        1: Launch(1, 2),
        2: Launch(2, 2),
        65: Launch(128, 2),
        100: Launch(128, 2),
        101: Launch(64, 4, 3),
        10**9: Launch(128, 8),
    }
    assert {length: launch_for(TABLE, length) for length in expected} == expected


@pytest.mark.parametrize("vendor", Launches._fields)
def test_norms_hold_a_whole_row(vendor) -> None:
    pytest.importorskip("triton")
    configs = launch_configs()
    norms = [op for op in configs if op.startswith(("rms_norm.", "layer_norm."))]
    assert len(norms) >= 6
    for op in norms:
        for width in (1, 576, 4096, 4097, 16384, 65536):
            block = launch_for(getattr(configs[op], vendor), width).block
            assert block >= width and block & (block - 1) == 0
