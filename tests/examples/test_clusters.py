"""The recipes for clusters pass the checks of their own tools, and run on two nodes of pretence."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny_run import make_checkpoint, make_text

ROOT = Path(__file__).parent.parent.parent
CLUSTERS = ROOT / "examples" / "clusters"
SLURM, JOBSET = CLUSTERS / "finetune.slurm", CLUSTERS / "finetune_jobset.yaml"
INSTALL = "docs/clusters.md says what to install for this check"


def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    made: dict[str, Any] = yaml.safe_load(JOBSET.read_text(encoding="utf-8"))
    return made


def container(jobset: dict[str, Any]) -> dict[str, Any]:
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    found: dict[str, Any] = job["template"]["spec"]["containers"][0]
    return found


def unknown(given: Any, read: Any, where: str = "") -> list[str]:
    """Return the places of a manifest that its schema does not have, or reads as another value."""
    if isinstance(given, dict) and isinstance(read, dict):
        pairs = [(f"{where}.{key}", given[key], read.get(key)) for key in given]
    elif isinstance(given, list) and isinstance(read, list):
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(given, read, strict=True))]
    else:
        return [] if given == read else [where]
    return [found for place, *pair in pairs for found in unknown(*pair, place)]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a node that has no GPU and its Python's tools on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    fixed = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return os.environ | fixed | more


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return the arguments of a run of two steps on the CPU."""
    model = make_checkpoint(tmp_path / "model")
    text = make_text(tmp_path / "data.txt", paragraphs=20)
    options = "--device cpu --seq-len 64 --max-steps 2 --batch-size 1 --eval-fraction 0 --quiet"
    files = ["--train-files", str(text), "--output-dir", str(tmp_path / "run")]
    return [str(model), *files, *options.split()]


def test_shellcheck_finds_nothing_in_the_slurm_script() -> None:
    program = shutil.which("shellcheck", path=environment()["PATH"])
    if program is None:
        pytest.skip(INSTALL)
    found = subprocess.run([program, str(SLURM)], capture_output=True, text=True, check=False)
    assert found.stdout + found.stderr == ""


@pytest.mark.long
def test_the_slurm_script_trains_on_two_nodes(tmp_path: Path, arguments: list[str]) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    # What Slurm's programs do: name the nodes, and start the command on each.
    scripts = {
        "scontrol": "echo localhost; echo other",
        "srun": 'shift; "$@" & one=$!; "$@" & two=$!; wait $one && wait $two',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    job = free_port() + 20000  # the script's port is 20000 + job % 20000
    variables = environment(
        SLURM_JOB_NODELIST="nodes[1-2]",
        SLURM_JOB_ID=str(job),
        SLURM_JOB_NUM_NODES="2",
        GPUS="1",
    )
    variables["PATH"] = os.pathsep.join([str(tools), variables["PATH"]])
    subprocess.run([str(SLURM), *arguments], env=variables, check=True, timeout=120)
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_the_schema_of_jobset_has_every_key_of_the_manifest() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=INSTALL)
    given = manifest()
    assert unknown(given, models.JobsetV1alpha2JobSet.from_dict(given).to_dict()) == []
    job = given["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["paralelism"] = job.pop("parallelism")
    read = models.JobsetV1alpha2JobSet.from_dict(given).to_dict()
    assert unknown(given, read) == [".spec.replicatedJobs[0].template.spec.paralelism"]


def test_the_manifest_names_its_nodes_and_volumes() -> None:
    given = manifest()
    replicated = given["spec"]["replicatedJobs"][0]
    job, found = replicated["template"]["spec"], container(given)
    command = shlex.join(found["command"])
    assert job["parallelism"] == job["completions"]
    assert f"--nnodes={job['completions']} " in command
    gpus = found["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus} " in command
    subdomain = given["spec"]["network"]["subdomain"]
    first = f"{given['metadata']['name']}-{replicated['name']}-0-0.{subdomain}"
    assert f"--rdzv-endpoint={first}:" in command
    volumes = {each["name"] for each in job["template"]["spec"]["volumes"]}
    assert volumes == {each["name"] for each in found["volumeMounts"]}


@pytest.mark.long
def test_the_command_of_the_manifest_trains_on_two_nodes(
    tmp_path: Path, arguments: list[str]
) -> None:
    command = container(manifest())["command"]
    command = command[: command.index("--resume") + 1]
    command = [
        "--nproc-per-node=1"
        if each.startswith("--nproc")
        else f"--rdzv-endpoint=localhost:{port}"
        if each.startswith("--rdzv-endpoint")
        else each
        for port in [free_port()]
        for each in command
    ]

    def node(_: int) -> int:
        return subprocess.run(
            [*command, *arguments], env=environment(), check=False, timeout=120
        ).returncode

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(node, range(2))) == [0, 0]
    assert (tmp_path / "run" / "model" / "config.json").is_file()
