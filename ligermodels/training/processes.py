"""The processes of a run on several GPUs, which torchrun has started, and signals that stop it.

Each process has a rank. Rank 0 alone writes to the folder of the run. Two backends carry what the
ranks say to each other: NCCL for tensors on GPUs, and gloo for everything on the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from typing_extensions import Self

from ligermodels.errors import ConfigError
from ligermodels.float8 import Float8Linear
from ligermodels.losses import Mean
from ligermodels.ranks import error_on_all_ranks, gathered, is_distributed, num_ranks, rank

Item = TypeVar("Item")

# A wrapper may pass on a Ctrl-C that the terminal has sent to the run, too.
_SAME_PRESS = 1.0  # seconds

_together: int = 1  # how many neighbouring ranks compute the same rows


def launch_id() -> str:
    """Return an id of this start of torchrun, which its restarts share, on rank 0's machine."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.getppid()}"


@contextlib.contextmanager
def process_group(device: torch.device, timeout: int, together: int = 1) -> Iterator[None]:
    """Join the processes that torchrun has started, if it has, for a `with` block.

    Args: timeout: seconds after which a rank that does not answer is an error; together: how many
        neighbouring ranks compute the same rows.
    Raises:
        ConfigError: the ranks cannot be divided into groups of so many.
    """
    global _together
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    starts = launched and not dist.is_initialized()
    if starts:
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    _together = together
    try:
        with error_on_all_ranks():
            if num_ranks() % together:
                raise ConfigError(
                    f"context_parallel: {together} processes for each row, but {num_ranks()} run; "
                    f"start a multiple of {together} (--gpus)"
                )
        yield
    finally:
        _together = 1
        if starts:
            dist.destroy_process_group()


def barrier(signum: int | None) -> int | None:
    """Wait until every rank is here. Return a signal that any rank has got, or None.

    Args: signum: the signal of this rank.
    """
    return max(each or 0 for each in gathered(signum)) or None


def num_row_ranks() -> int:
    """Return how many ranks, or groups of ranks, have their own rows."""
    return num_ranks() // _together


def partition(items: Sequence[Item]) -> list[tuple[Item, bool]]:
    """Return this rank's items, in turns with the other ranks, and whether each is an extra.

    All ranks get as many, because they run the model together: a rank that has one less gets the
    last item once more, as an extra.
    """
    ranks = num_row_ranks()
    turns = range(rank() // _together, -(-len(items) // ranks) * ranks, ranks)
    return [(items[min(i, len(items) - 1)], i >= len(items)) for i in turns]


def summed(counts: dict[str, int]) -> dict[str, int]:
    """Return counts summed over the ranks, all of which give the same names.

    Those of ranks with the same rows count once.
    """
    every = gathered(counts)[::_together]
    return {name: sum(each[name] for each in every) for name in counts}


def summed_output(loss: Tensor, metrics: dict[str, Mean]) -> tuple[Tensor, dict[str, Mean]]:
    """Return a loss and metrics summed over the ranks, without waiting for the device.

    Those of ranks with the same rows count once.
    """
    if not is_distributed():
        return loss, metrics
    parts = [x for mean in metrics.values() for x in (mean.total, mean.count)]
    total = torch.stack([x.to(loss.device, torch.float64) for x in (loss, *parts)])
    dist.all_reduce(total)
    total /= _together
    means = map(Mean, total[1::2], total[2::2])
    return total[0].to(loss), dict(zip(metrics, means))


def averaged(x: Tensor) -> Tensor:
    """Return the mean of a tensor over the ranks, in float32, without waiting for the device."""
    x = x.float() / num_ranks()
    if is_distributed():
        dist.all_reduce(x)
    return x


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Average the gradients of parameters that every rank has whole, in place."""
    if not is_distributed():
        return
    # All that are whole have one dtype, that of the trained weights.
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    every = parameters_to_vector(grads)
    dist.all_reduce(every)
    vector_to_parameters(every / num_ranks(), grads)


def share_scales(model: nn.Module) -> None:
    """Let all ranks make delayed scales of float8 from the largest values that any of them saw."""
    linears = [each for each in model.modules() if isinstance(each, Float8Linear)]
    seen = [each.delayed[:, 2] for each in linears if each.recipe.delayed]
    if seen and is_distributed():
        every = torch.stack(seen)  # the bits of numbers that are not negative have their order
        dist.all_reduce(every, dist.ReduceOp.MAX)
        torch._foreach_copy_(seen, [*every])


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM has stopped a run. The message says what is saved and how to go on.

    Attributes: signum is the signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


class Interrupts:
    """A context in which SIGINT and SIGTERM raise KeyboardInterrupt, but not within `held()`.

    Inside `held()` the exception waits for the next `check()` or the end of the block, because one
    that comes at any place may leave a lock locked or a step half done. A second Ctrl-C raises at
    once; a second SIGTERM does nothing. Signals that the caller handles or ignores are left alone,
    and so are all in a thread that is not the main thread.

    Attributes:
        signum: the first signal that came, or None.
        verbose: whether to say on stderr that the run will stop soon.
    """

    def __init__(self, verbose: bool = False) -> None:
        self.signum: int | None = None
        self.verbose = verbose
        self._since = 0.0
        self._holding = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum, default in (
                (signal.SIGINT, signal.default_int_handler),
                (signal.SIGTERM, signal.SIG_DFL),
            ):
                if signal.getsignal(signum) == default:
                    self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let a signal wait for `check()` or the end of the block."""
        self.check()
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come, even if its exception was swallowed."""
        if self.signum is not None:
            raise KeyboardInterrupt

    def _handle(self, signum: int, _: object) -> None:
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
            if not self._holding:
                raise KeyboardInterrupt
            if self.verbose:
                # print() may be what the signal has interrupted.
                os.write(2, b"\nligermodels: stopping soon; Ctrl-C stops at once\n")
        elif signum == signal.SIGINT and time.monotonic() - self._since > _SAME_PRESS:
            raise KeyboardInterrupt
