"""Run a command in several processes, one for each GPU: `ligermodels finetune ... --gpus N`.

The processes are those of `torchrun --nproc-per-node N -m ligermodels finetune ...`, started
through the library behind torchrun. Of their errors only the first is printed, as one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ligermodels.training.options import Options, option

_LAUNCHED = "LIGERMODELS_LAUNCHED"  # set in the processes that this module starts
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch: where a process leaves its error
# torch asks the other processes to end, and kills those that still run 30 seconds later. It notes
# the time when all have ended, so that a long time after another's error means that it waited.
_PATIENCE = 10


@dataclass(kw_only=True)
class LaunchOptions(Options):
    """How many processes run: options of the command that no run keeps."""

    gpus: int | None = option(
        None,
        "run on N GPUs of this machine, each with its own rows (with --device cpu, in N "
        "processes); the model is spread over them (FSDP2)",
        at_least=1,
        at_most=1024,
    )
    max_restarts: int = option(
        0,
        "with --gpus, how often the run goes on from its last checkpoint by itself after a process "
        "was killed",
        at_least=0,
    )


def is_worker() -> bool:
    """Return whether torchrun or this module has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank0() -> bool:
    """Return whether this process prints the result: the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def report_error(line: str) -> bool:
    """Leave an error for the process that has started this one to print; False if there is none."""
    file = os.environ.get(_ERROR_FILE)
    if _LAUNCHED not in os.environ or not file:
        return False
    with open(file, "w", encoding="utf-8") as out:
        json.dump({"message": line, "timestamp": int(time.time())}, out)
    return True


def run(gpus: int, max_restarts: int, argv: Sequence[str]) -> None:
    """Run this command line in several processes, and print the first error that ends them.

    Raises:
        SystemExit: a process failed; the code is that of the process with the first error.
    """
    import logging
    import uuid

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torch would log each failure with its own report.
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[_LAUNCHED] = "1"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // gpus)))
    # An interrupted run writes a checkpoint before it ends.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=gpus,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.2,
    )
    arguments = ["-m", "ligermodels", *argv]
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None
    except ChildFailedError as error:
        line, code = _first(error.failures)
        print(f"ligermodels: {line}", file=sys.stderr)
        raise SystemExit(code) from None


def _first(failures: dict[int, Any]) -> tuple[str, int]:
    """Return the line and the exit code of the failure that caused the others."""
    in_order = sorted(failures.items(), key=lambda item: item[1].timestamp)
    told = [each for _, each in in_order if each.error_file_data["message"]]  # by `report_error`
    killed = [x for x in in_order if x[1].exitcode < 0 and x[1].signal_name() != "SIGTERM"]
    if told and (not killed or killed[0][1].timestamp - told[0].timestamp >= _PATIENCE):
        return told[0].message, told[0].exitcode  # the launcher itself has killed the others
    if killed:
        rank, failure = killed[0]
        return f"rank {rank} was killed by {failure.signal_name()}", 1
    rank, failure = next(iter(failures.items()))
    return f"rank {rank} ended with exit code {failure.exitcode}; its error is above", 1
