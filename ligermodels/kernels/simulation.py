"""Meta tensors that stand for the tensors of a device, while `ligermodels.memory` runs a step.

The step makes the same allocations as on the device. It launches nothing and has no values.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Simulator(Protocol):
    """The device that meta tensors stand for, and the counters of a simulated step."""

    device: torch.device
    num_sms: int  # of the GPU
    autocast: torch.dtype | None  # to which autocast casts; None while it is disabled

    def without_autocast(self) -> AbstractContextManager[object]:
        """Return a context in which autocast is disabled."""

    @property
    def attend(self) -> Callable[..., Tensor]:
        """A function (backend, q, k, v, options of `attend`) with a backend's allocations."""

    def copied(self, to_host: bool, size: int) -> None:
        """Count `size` bytes that go to the host or come back from it."""


class _Running(threading.local):
    simulator: Simulator | None = None


_running = _Running()


def simulator_of(device: torch.device) -> Simulator | None:
    """Return the simulator that runs in this thread, if `device` is the meta device."""
    return _running.simulator if device.type == "meta" else None


def real_device(device: torch.device) -> torch.device:
    """Return the device that a simulated tensor on the meta device stands for, else `device`."""
    simulator = simulator_of(device)
    return device if simulator is None else simulator.device


@contextmanager
def simulating(simulator: Simulator) -> Iterator[None]:
    """Let meta tensors stand for the simulator's device in this thread."""
    before, _running.simulator = _running.simulator, simulator
    try:
        yield
    finally:
        _running.simulator = before
