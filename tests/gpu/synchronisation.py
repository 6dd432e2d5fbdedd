"""Check that the host does not wait for the GPU, and capture what it starts in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Made = TypeVar("Made")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise an error if the host waits for the GPU within the block."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(
    step: Callable[[], Made], before: Callable[[], object] = lambda: None
) -> tuple[torch.cuda.CUDAGraph, Made]:
    """Capture a step, after three that warm up; return the graph and what the step returned.

    Args: before: called before each step, but not captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            before()
            step()
    torch.cuda.current_stream().wait_stream(side)
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made
