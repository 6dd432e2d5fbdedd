"""The recipes for clusters pass the checks of their own tools, and run on two nodes of pretence.

They are long tests, because the tools are not those of the library.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from tests.limits import SECONDS
from tests.training.tiny_run import make_checkpoint, make_text

ROOT = Path(__file__).parent.parent.parent
CLUSTERS = ROOT / "examples" / "clusters"
SLURM, JOBSET = CLUSTERS / "finetune.slurm", CLUSTERS / "finetune_jobset.yaml"
INSTALL = "docs/clusters.md says what to install for this check"
pytestmark = pytest.mark.long


def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    made: dict[str, Any] = yaml.safe_load(JOBSET.read_text(encoding="utf-8"))
    return made


def container(jobset: dict[str, Any]) -> dict[str, Any]:
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    found: dict[str, Any] = job["template"]["spec"]["containers"][0]
    return found


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


def test_the_slurm_script_trains_on_two_nodes(tmp_path: Path, arguments: list[str]) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    # What Slurm's programs do: name the nodes, and start the command on each.
    scripts = {
        "scontrol": "echo localhost; sleep 0.1; echo other",
        "srun": 'shift; "$@" & one=$!; "$@" & two=$!; wait $one && wait $two',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    job = free_port() + 20000  # the script's port is 20000 + job % 20000
    slurm = {"SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_JOB_NUM_NODES": "2", "GPUS": "1"}
    variables = environment(SLURM_JOB_ID=str(job), **slurm)
    variables["PATH"] = os.pathsep.join([str(tools), variables["PATH"]])
    subprocess.run([str(SLURM), *arguments], env=variables, check=True, timeout=SECONDS)
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_the_manifest_names_its_nodes_and_volumes() -> None:
    given = manifest()
    replicated = given["spec"]["replicatedJobs"][0]
    job, found = replicated["template"]["spec"], container(given)
    torchrun, *arguments = found["command"]
    command = get_args_parser().parse_args(arguments)
    assert torchrun == "torchrun" and command.module and command.training_script == "ligermodels"
    assert job["parallelism"] == job["completions"] == int(command.nnodes)
    assert found["resources"]["limits"]["nvidia.com/gpu"] == int(command.nproc_per_node)
    subdomain = given["spec"]["network"]["subdomain"]
    first = f"{given['metadata']['name']}-{replicated['name']}-0-0.{subdomain}"
    assert command.rdzv_endpoint.startswith(f"{first}:")
    volumes = {each["name"] for each in job["template"]["spec"]["volumes"]}
    assert volumes == {each["name"] for each in found["volumeMounts"]}


@pytest.fixture
def storage() -> Iterator[Any]:
    """Empty storage in memory, by its file system."""
    fs = pytest.importorskip("fsspec").filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def test_an_upload_that_is_cut_short_leaves_the_checkpoint_before_it(
    tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, url = storage, "memory://bucket/run"
    from examples.clusters.object_storage import fetch, restore, upload

    def write(step: int) -> None:
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for name in ("part.distcp", "sha256.json"):
            (folder / name).write_text(f"{name} of {step}")

    def names(folder: Path) -> list[str]:
        return sorted(path.name for path in (folder / "checkpoints").glob("*"))

    write(1)
    (tmp_path / "run" / "run.json").write_text("{}")
    upload(tmp_path / "run", url)
    write(2)
    whole = fs.put_file

    def cut(local: str, remote: str) -> None:
        if remote.endswith("00000002/sha256.json"):
            raise ConnectionError("the network is gone")
        whole(local, remote)

    with monkeypatch.context() as patched:
        patched.setattr(fs, "put_file", cut)
        with pytest.raises(ConnectionError):
            upload(tmp_path / "run", url)
    restore(url, tmp_path / "first")
    assert names(tmp_path / "first") == ["step-00000001"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
    upload(tmp_path / "run", url)
    restore(url, tmp_path / "second")
    assert names(tmp_path / "second") == ["step-00000002"]
    assert len(fs.find("bucket/run/checkpoints")) == 2
    assert (fetch(url, tmp_path / "copies") / "run.json").read_text() == "{}"


def test_a_run_in_storage_goes_on_on_another_machine(
    tmp_path: Path, storage: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.clusters.object_storage import main

    model, _, text, _, _, *options = arguments
    storage.put(model, "/bucket/model", recursive=True)
    storage.put_file(text, "/bucket/data.txt")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    files = ["--train-files", "memory://bucket/data.txt", "--output-dir", "memory://bucket/run"]
    local = tmp_path / "local"
    command = ["--local", str(local), "finetune", "memory://bucket/model", *files, *options]
    assert main(command) == 0
    weights = storage.cat("/bucket/run/model/model.safetensors")
    metrics = storage.cat("/bucket/run/metrics.jsonl")
    shutil.rmtree(local)  # The second machine has nothing, and finds a run that has ended.
    storage.rm("/bucket/run/model", recursive=True)
    assert main(command) == 0
    assert storage.cat("/bucket/run/model/model.safetensors") == weights
    assert storage.cat("/bucket/run/metrics.jsonl") == metrics


def test_the_flyte_workflow_compiles_and_trains_with_two_workers(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flytekit", reason=INSTALL)
    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    from examples.clusters import flyte_workflow

    image = ImageConfig(Image("default", "registry.example/ligermodels", "latest"))
    settings = SerializationSettings(image, project="p", domain="d", version="1")
    made: dict[Any, Any] = OrderedDict()
    compiled = get_serializable(made, settings, flyte_workflow.train)
    assert set(compiled.template.interface.inputs) == {"model", "data", "options"}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    model, _, text, _, _, *options = arguments
    out = flyte_workflow.train(model=model, data=text, options=options)
    assert (Path(str(out)) / "config.json").is_file()
