"""What is renamed to its final name is on the disk before, and the rename is on the disk after."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from ligermodels import LigerLlama
from ligermodels.converters import save_dir
from ligermodels.heads.medusa_file import write_heads
from ligermodels.training.preferences import stored_log_probs
from ligermodels.training.run_dir import atomic_write
from tests.training.tiny_run import make_checkpoint, make_text, run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="only POSIX has fsync of a folder")


def identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class Disk:
    """A record of what was flushed, and of every rename of what was not.

    Attributes: flushed: the time of the last change that a flush of each file or folder covers;
        faults: what was renamed without a flush; moved: the folders whose entries a rename changed.
    """

    def __init__(self, monkeypatch) -> None:
        self.flushed: dict[tuple[int, int], int] = {}
        self.faults: list[str] = []
        self.renamed: list[str] = []
        self.moved: dict[tuple[int, int], str] = {}
        fsync, exchange = os.fsync, save_dir._exchange_names
        monkeypatch.setattr(os, "fsync", lambda file: self.flush(fsync, file))
        for name in ("rename", "replace"):
            move = getattr(os, name)
            monkeypatch.setattr(os, name, lambda a, b, move=move: self.rename(move, a, b))
        monkeypatch.setattr(save_dir, "_exchange_names", lambda a, b: self.rename(exchange, a, b))

    def flush(self, fsync, file) -> None:
        status = os.fstat(file)
        fsync(file)
        self.flushed[identity(status)] = status.st_mtime_ns
        self.moved.pop(identity(status), None)

    def rename(self, move, source, target):
        source, target = Path(source), Path(target)
        # A folder that is not done yet: torch renames within one, and a save makes one.
        if source.parent.suffix == ".part" or ".saving-" in target.name:
            return move(source, target)
        for path in (source, *(source.rglob("*") if source.is_dir() else ())):
            status = path.lstat()
            is_kept = stat.S_ISREG(status.st_mode) or path.is_dir()
            if is_kept and self.flushed.get(identity(status), -1) < status.st_mtime_ns:
                self.faults.append(f"{path} -> {target}")
        done = move(source, target)
        if done is not False:  # the system can exchange two folders
            self.renamed.append(target.name)
            self.moved[identity(target.parent.stat())] = str(target)
        return done


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def export(folder: Path) -> None:
    model = make_checkpoint(folder / "first")
    model = LigerLlama.from_hf(model)
    for _ in range(2):
        model.save_hf(folder / "out", max_shard_size=60_000)


def heads(folder: Path) -> None:
    write_heads({"0.0.weight": torch.ones(4, 4)}, folder)


def run_state(folder: Path) -> None:
    text = make_text(folder / "a.txt")
    run(make_checkpoint(folder / "model"), text, folder / "run", max_steps=2, save_steps=1)


def reference(folder: Path) -> None:
    stored_log_probs(folder / "reference" / "a", 3, lambda: torch.ones(3))


def small_file(folder: Path) -> None:
    atomic_write(folder / "facts.json", lambda part: part.write_text(json.dumps({"a": 1})))


@pytest.mark.parametrize("write", [export, heads, run_state, reference, small_file])
def test_every_file_is_flushed_before_its_rename_and_the_folder_after(write, disk, tmp_path):
    write(tmp_path)
    assert disk.renamed
    assert not disk.faults
    assert not disk.moved
