"""Run a command in several processes, one for each GPU: `ligermodels finetune ... --gpus N`.

The processes are those of `torchrun --standalone --nproc-per-node N -m ligermodels finetune ...`.
Each prints its error as one line, and an error that several have is printed by one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def is_worker() -> bool:
    """Return whether torchrun or this module has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank0() -> bool:
    """Return whether this process prints the result: the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def run(gpus: int, max_restarts: int, argv: Sequence[str]) -> None:
    """Run this command line in several processes.

    Raises:
        SystemExit: a process failed; the code is the largest of theirs.
    """
    import logging

    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # has reports of its own
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // gpus)))
    # In the store of the first start, a process that is started again finds the addresses of others
    # that have ended (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # An interrupted run writes a checkpoint before it ends.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    options = f"--standalone --nproc-per-node={gpus} --max-restarts={max_restarts} -m ligermodels"
    try:
        torchrun.run(torchrun.parse_args(["--monitor-interval=0.2", *options.split(), *argv]))
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None
    except ChildFailedError as error:
        raise SystemExit(_reported(error.failures)) from None


def _reported(failures: Mapping[int, Any]) -> int:
    """Print which processes were killed, as they could not, and return the exit code of all."""
    for rank, failure in sorted(failures.items()):
        # The launcher itself stops the others by SIGTERM.
        if failure.exitcode < 0 and failure.signal_name() != "SIGTERM":
            print(
                f"ligermodels: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr
            )
    return max(1, *(each.exitcode for each in failures.values()))
