"""Two processes share a model (FSDP2) and the rows of each step, and learn what one would learn.

    python -m examples.two_processes build/smollm2 --output-dir runs/two_processes

The same command runs twice: in one process with four rows a step, and in two with two rows each.
`--device cpu` makes the processes share the CPU; without it, each has a GPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

from examples.command import TRAIN, call, draw_losses, report


def losses(
    model: str, folder: Path, processes: int, rows: int, steps: int, seq: int
) -> list[float]:
    """Run `ligermodels finetune` in so many processes, and return the loss of each step."""
    options = {
        "train-files": TRAIN,
        "eval-fraction": 0,
        "batch-size": rows // processes,
        "seq-len": seq,
        "max-steps": steps,
        "learning-rate": 1e-4,
        "save-steps": 0,
        "output-dir": folder,
    }
    command = [sys.executable, "-m", "ligermodels", "finetune", model, "--quiet"]
    command += ["--overwrite-output-dir"]
    command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    if processes > 1:
        command += ["--gpus", str(processes)]
    if not torch.cuda.is_available():
        command += ["--device", "cpu"]
    subprocess.run(command, check=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main(
    model: str, output_dir: Path, *, rows: int = 4, max_steps: int = 5, seq_len: int = 64
) -> dict[str, float]:
    """Compare the losses of one and of two processes."""
    curves = {
        f"{count} process{'es' * (count > 1)}": losses(
            model, output_dir / str(count), count, rows, max_steps, seq_len
        )
        for count in (1, 2)
    }
    one, two = curves.values()
    difference = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
    draw_losses(output_dir, "training loss of the same steps", curves, "loss (nats per token)")
    return report(output_dir, difference=difference, first=one[0], last=one[-1], steps=max_steps)


if __name__ == "__main__":
    call(main, __doc__)
