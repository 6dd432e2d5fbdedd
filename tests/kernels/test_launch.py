from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.launch import Launch, Launches, launch_for, num_programs
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


def test_programs_without_a_gpu() -> None:
    assert num_programs(Launch(1, 4), 10**9, torch.device("cpu")) > 1
    assert num_programs(Launch(1, 4, rows=4), 0, torch.device("cpu")) == 0


@pytest.mark.gpu
def test_programs_of_a_gpu() -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    setting, device = Launch(1, 4, rows=2, programs=3), torch.device("cuda", 0)
    assert num_programs(setting, 10**9, device) == 3 * multiprocessors
    assert num_programs(setting, 5, device) == 3
