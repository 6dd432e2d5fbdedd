from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ligermodels.kernels import dispatch, reference
from ligermodels.kernels.dispatch import simulating
from ligermodels.kernels.launch import num_sms

CPU, GPU, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
SIMULATOR = SimpleNamespace(device=GPU, num_sms=7, autocast=None)


def test_launchers_of_the_simulated_gpu(monkeypatch) -> None:
    launchers = pytest.importorskip("ligermodels.kernels.triton")
    monkeypatch.delenv("LIGERMODELS_BACKEND", raising=False)
    x = torch.ones(1, device=META)
    assert dispatch.select("glu", x) is reference.glu
    with simulating(SIMULATOR):
        assert dispatch.select("glu", x) is launchers.glu
        assert num_sms(META) == 7
