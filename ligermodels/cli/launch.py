"""Run a command in several processes, one for each GPU: `ligermodels finetune ... --gpus N`.

The processes are those of `torchrun --standalone --nproc-per-node N -m ligermodels finetune ...`.
Of their errors only the first is printed, as one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

_LAUNCHED = "LIGERMODELS_LAUNCHED"  # set in the processes that this module starts
# torch asks the other processes to end, and kills those that still run 30 seconds later. It notes
# the time when all have ended, so that a long time after another's error means that it waited.
_PATIENCE = 10


def is_worker() -> bool:
    """Return whether torchrun or this module has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank0() -> bool:
    """Return whether this process prints the result: the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def report_error(line: str, *, is_repeated: bool = False) -> bool:
    """Leave an error for the process that has started this one to print; False if there is none.

    Args: is_repeated: whether another process has the same error, and tells more of it. That one is
        printed instead, unless it hangs and tells nothing.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _LAUNCHED not in os.environ or not file:
        return False
    with open(file, "w", encoding="utf-8") as out:
        told = {"message": line, "timestamp": int(time.time()), "is_repeated": is_repeated}
        json.dump(told, out)
    return True


def run(gpus: int, max_restarts: int, argv: Sequence[str]) -> None:
    """Run this command line in several processes, and print the first error that ends them.

    Raises:
        SystemExit: a process failed; the code is that of the process with the first error.
    """
    import logging

    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # has reports of its own
    os.environ[_LAUNCHED] = "1"
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
        line, code = _first(error.failures)
        print(f"ligermodels: {line}", file=sys.stderr)
        raise SystemExit(code) from None


def _first(failures: Mapping[int, Any]) -> tuple[str, int]:
    """Return the line and the exit code of the failure that caused the others."""
    by_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    told = [each for _, each in by_time if "is_repeated" in each.error_file_data]
    told.sort(key=lambda each: each.error_file_data["is_repeated"])
    killed = [x for x in by_time if x[1].exitcode < 0 and x[1].signal_name() != "SIGTERM"]
    if told and (not killed or killed[0][1].timestamp - told[0].timestamp >= _PATIENCE):
        # The launcher itself has stopped the others, or this one before its own exit.
        return told[0].message, max(1, *(each.exitcode for each in failures.values()))
    if killed:
        rank, failure = killed[0]
        return f"rank {rank} was killed by {failure.signal_name()}", 1
    rank, failure = by_time[0]
    return f"rank {rank} ended with exit code {failure.exitcode}; its error is above", 1
