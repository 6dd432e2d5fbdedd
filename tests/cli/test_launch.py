"""`ligermodels finetune --gpus N` in real processes on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ligermodels.cli import launch
from tests.limits import SECONDS, wait_until
from tests.training.tiny_run import make_checkpoint, make_text

ROOT = Path(__file__).parent.parent.parent


def start(folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    arguments = f"--train-files {folder / 'text.txt'} --output-dir {folder / 'run'} --device cpu"
    sizes = "--seq-len 32 --batch-size 1 --save-steps 1 --max-eval-rows 2 --eval-steps 1000"
    command = [sys.executable, "-m", "ligermodels", "finetune", str(folder / "base")]
    return subprocess.Popen(
        [*command, *arguments.split(), *sizes.split(), "--gpus", "2", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(process: subprocess.Popen[str]) -> list[int]:
    command = ["pgrep", "-P", str(process.pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 2, found
    return [*map(int, found)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model and a text."""
    make_checkpoint(tmp_path / "base")
    make_text(tmp_path / "text.txt")
    return tmp_path


def test_an_error_of_the_processes_is_one_line(tmp_path: Path) -> None:
    make_text(tmp_path / "text.txt")
    process = start(tmp_path, "--max-steps", "2")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("ligermodels: ") and "base" in err, err
    assert not out


@pytest.mark.long
def test_a_killed_process_is_started_again(folder: Path) -> None:
    """The run goes on from its last checkpoint, and ends as if nothing had happened."""
    process = start(folder, "--max-steps", "60", "--max-restarts", "1")
    checkpoints = folder / "run/checkpoints"
    wait_until(lambda: any(checkpoints.glob("step-0000000[5-9]")))
    os.kill(workers(process)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert out.count("finished") == 1 and "\nexport " in out, out
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    steps = [entry["step"] for entry in map(json.loads, lines) if "loss" in entry]
    assert steps == [*range(1, 61)]


# Python imports it at its start. It counts what a rank does with the files of the checkpoint of
# step 3, writes the count into a file, and kills the process before a call of that number.
KILLER = """
import os, signal, sys
count = 0
def hook(event, arguments):
    global count
    if event.startswith(("open", "os.", "shutil.")) and "step-00000003" in str(arguments):
        number, folder = os.environ.get("RANK"), os.environ["KILL_FOLDER"]
        if f"{number}:{count}" == os.environ["KILL_AT"]:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        with open(os.path.join(folder, f"calls{number}"), "w") as file:
            file.write(str(count))
sys.addaudithook(hook)
"""


@pytest.mark.long
def test_a_kill_at_any_point_of_a_save_leaves_the_checkpoint_before_it(
    folder: Path, subtests: pytest.Subtests
) -> None:
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(KILLER)
    path = os.pathsep.join([str(folder / "site"), str(ROOT)])
    run = folder / "run"

    def killed_at(place: str) -> tuple[int, str]:
        places = {"PYTHONPATH": path, "KILL_FOLDER": str(folder), "KILL_AT": place}
        sizes = ("--max-steps", "4", "--save-total-limit", "9", "--quiet")
        process = start(folder, *sizes, "--rank-timeout", "20", **places)
        _, err = process.communicate(timeout=SECONDS)
        return process.returncode, err

    def resumed() -> bytes:
        shutil.rmtree(run / "checkpoints/step-00000004", ignore_errors=True)
        shutil.rmtree(run / "model", ignore_errors=True)
        process = start(folder, "--max-steps", "4", "--save-total-limit", "9", "--resume")
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        return (run / "model/model.safetensors").read_bytes()

    code, err = killed_at("never")
    assert code == 0, err
    expected = (run / "model/model.safetensors").read_bytes()
    calls = [int((folder / f"calls{number}").read_text()) for number in (0, 1)]
    assert min(calls) > 3, calls
    places = [f"1:{calls[1] // 2}", *(f"0:{number}" for number in range(0, calls[0], 4))]
    for place in places:
        with subtests.test(place):
            shutil.rmtree(run)
            code, err = killed_at(place)
            assert code > 0 and "SIGKILL" in err, err
            whole = [p.name for p in (run / "checkpoints").iterdir() if (p / "facts.json").exists()]
            assert {"step-00000001", "step-00000002"} <= {*whole}, whole
            assert resumed() == expected


def test_a_process_alone_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not launch.is_worker() and launch.is_rank0()


def test_killed_processes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher stops the other processes with SIGTERM after the first failure."""
    stopped, killed, failed = (ProcessFailure(0, 0, code, "") for code in (-15, -9, 2))
    assert launch._reported({0: stopped, 1: failed}) == 2
    assert capsys.readouterr().err == ""
    assert launch._reported({0: stopped, 1: killed}) == 1
    assert capsys.readouterr().err == "ligermodels: rank 1 was killed by SIGKILL\n"


def test_a_signal_to_the_launcher_is_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Mock(side_effect=SignalException("stopped", signal.Signals.SIGTERM))
    monkeypatch.setattr(torch.distributed.run, "elastic_launch", lambda **_: started)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(SystemExit) as stop:
        launch.run(2, 0, ["finetune", "m"])
    assert stop.value.code == 128 + signal.SIGTERM
    started.assert_called_once_with("-u", "-m", "ligermodels", "finetune", "m")
