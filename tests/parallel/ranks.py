"""Run the cases of a test file in several gloo processes: starting them costs more than a case.

A case returns errors by name, which must be within 1e-6, and those of gradients within 1e-5. It
takes a folder of its own, which all ranks share.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ligermodels.parallel import shard as parallel_shard
from tests.limits import SECONDS

Case = Callable[[int, Path], dict[str, float]]
Report = dict[str, "dict[str, float] | str"]


def run_ranks(module: str, ranks: int, folder: Path, *options: Any) -> Report:
    """Run the cases of a module of tests in so many processes; return the results of all ranks.

    The processes are forks, which have imported everything already. CUDA does not survive a fork.

    Args: options, further arguments of the function `cases` of the module.
    """
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    workers = [
        context.Process(target=_rank, args=(module, rank, ranks, folder, *options))
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(SECONDS)
        codes = [worker.exitcode for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * ranks, codes
    return torch.load(folder / "results.pt")


def check(report: Report, subtests: Any) -> None:
    """Assert that every case compared something, and that it agrees."""
    assert report
    for name, outcome in report.items():
        with subtests.test(name):
            assert isinstance(outcome, dict), outcome
            assert outcome, "the case compared nothing"
            for what, error in outcome.items():
                limit = 1e-5 if "gradient" in what else 1e-6
                assert error <= limit, f"{what} differs by {error}"


def _rank(module: str, rank: int, ranks: int, folder: Path, *options: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a collection would copy the pages of all objects that the parent has made
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    # Each mesh has process groups of its own, of three threads each, which stay until the end.
    parallel_shard.fsdp_mesh = functools.cache(parallel_shard.fsdp_mesh)
    cases: dict[str, Case] = import_module(module).cases(ranks, *options)
    report: Report = {}
    for number, (name, case) in enumerate(cases.items()):
        place = folder / f"case{number}"
        place.mkdir(exist_ok=True)
        try:
            report[name] = case(rank, place)
        except Exception:
            # All ranks run the same code and fail at the same place, so the next case finds
            # them in step.
            report[name] = traceback.format_exc()
    reports: list[Report] = [{}] * ranks
    dist.all_gather_object(reports, report)
    if rank == 0:
        named = {f"{case}, rank {i}": r[case] for i, r in enumerate(reports) for case in r}
        torch.save(named, folder / "results.pt")
    dist.barrier()  # no process may end while another still sends to it
    dist.destroy_process_group()
    # On a busy machine the interpreter's shutdown can end in std::terminate while gloo's threads
    # stop. The results are written by now.
    sys.stdout.flush()
    os._exit(0)
