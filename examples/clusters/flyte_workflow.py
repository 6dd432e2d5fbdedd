"""Fine-tune with Flyte: one task starts two workers, and returns the exported model.

pyflyte run examples/clusters/flyte_workflow.py train --model MODEL --data data.jsonl

This runs on this machine. With --remote it runs on a cluster, where Flyte carries files to and
from object storage. Give the task GPUs there: Resources(gpu="8", ...), and --gpus 8.
"""

import subprocess
import sys
from pathlib import Path

from flytekit import Resources, current_context, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile


@task(requests=Resources(cpu="2", mem="8Gi"), retries=2)
def finetune(model: FlyteDirectory, data: FlyteFile, options: list[str]) -> FlyteDirectory:
    """Run `ligermodels finetune` in two processes."""
    out = Path(current_context().working_directory) / "run"
    command = [sys.executable, "-m", "ligermodels", "finetune", model.download()]
    command += ["--train-files", data.download(), "--output-dir", str(out), "--gpus", "2"]
    subprocess.run([*command, *options], check=True)
    return FlyteDirectory(str(out / "model"))


@workflow
def train(model: FlyteDirectory, data: FlyteFile, options: list[str]) -> FlyteDirectory:
    """Fine-tune a model, and return the folder of the export."""
    return finetune(model=model, data=data, options=options)
