"""Kill a fine-tuning run again and again; test_finetune runs this in a separate process.

    OMP_NUM_THREADS=2 python tests/kill_driver.py MODEL TEXT FOLDER CHAIN ...

Each life of the run is a fork of this process, which itself never trains: a life costs a fraction
of a second, without an import of torch, and can start threads. Lives end by SIGKILL.
They count moments: the n-th write, flush, rename or step, with files half written. Chain 4 follows
FATES, and the number of another chain is the seed of its moments.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

# Optimizers import it on first use; this way each fork has it already.
import torch._dynamo  # noqa: F401

from ligermodels.training import checkpoints
from ligermodels.training import trainer as training
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.finetune import finetune
from ligermodels.training.run_dir import RunDir


class Countdown:
    """Kill this process at the n-th moment of one kind, or of any kind."""

    def __init__(self, moments: int, kind: str | None = None):
        self.left = moments
        self.kind = kind

    def tick(self, kind: str) -> None:
        if self.kind in (None, kind):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, holder, name):
        original = getattr(holder, name)

        def watched(*args, **kwargs):
            self.tick(name)
            result = original(*args, **kwargs)
            self.tick(name)
            return result

        setattr(holder, name, watched)

    def install(self) -> None:
        for holder, name in (
            (os, "replace"),
            (os, "rename"),
            (os, "fsync"),
            (os, "unlink"),
            (training.Trainer, "step"),
            (training.Trainer, "evaluate"),
        ):
            self.around(holder, name)
        save, log = checkpoints.dcp.save, RunDir.log

        def half_a_file(tensors, storage_writer, **options):
            save(tensors, storage_writer=storage_writer, **options)
            file = Path(storage_writer.path) / "__0_0.distcp"
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            self.tick("half a file")
            file.write_bytes(whole)

        def half_a_line(folder, entry):
            file = folder.metrics.path
            file.touch()
            size = file.stat().st_size
            log(folder, entry)
            whole = file.read_bytes()
            file.write_bytes(whole[: (size + len(whole)) // 2])
            self.tick("half a line")
            file.write_bytes(whole)

        checkpoints.dcp.save, RunDir.log = half_a_file, half_a_line


def live(settings: dict, moments: int | None = None, kind: str | None = None) -> str:
    """Live one life of the run; return "finished", "killed" or "failed"."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if moments is not None:
                Countdown(moments, kind).install()
            finetune(FinetuneConfig.from_options(**settings), progress=False)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    return "finished" if os.WEXITSTATUS(status) == 0 else "failed"


# Each life ends at the n-th moment of a kind. The order lets the run make progress.
FATES = [
    ("half a file", 1),
    ("half a line", 3),
    ("replace", 2),
    ("half a file", 2),
    ("fsync", 3),
    ("evaluate", 1),
    ("step", 4),
    ("unlink", 1),
]


def main() -> None:
    model, text, folder, *chains = sys.argv[1:]
    settings = {
        "model": model,
        "train_files": [text],
        "separator": "",
        "seq_len": 64,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "save_steps": 3,
        "eval_steps": 5,
        "learning_rate": 1e-3,
        "device": "cpu",
    }
    straight = {**settings, "output_dir": f"{folder}/straight"}
    if live(straight) != "finished":
        sys.exit("the run that nobody kills does not finish")
    for chain in map(int, chains):
        draw = random.Random(chain)
        again = {**settings, "output_dir": f"{folder}/killed-{chain}", "resume": True}
        lives = kills = 0
        fate = ""
        while fate != "finished":
            lives += 1
            # Later lives last longer, because each must be able to reach the next checkpoint.
            if chain == 4:
                kind, moments = FATES[lives - 1] if lives <= len(FATES) else (None, 10**9)
                fate = live(again, moments=moments, kind=kind)
            else:
                fate = live(again, moments=draw.randint(1, 8 + 6 * lives))
            kills += fate == "killed"
            if fate == "failed" or lives > 60:
                sys.exit(f"chain {chain}: {fate} in life {lives}")
        print(f"chain {chain}: killed {kills} times")


if __name__ == "__main__":
    main()
