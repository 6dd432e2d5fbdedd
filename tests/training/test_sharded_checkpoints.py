"""Parts of tensors in torch.distributed.checkpoint's files. Several ranks: test_processes.py."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ligermodels.errors import CheckpointError, SaveError
from ligermodels.parallel.layout import TensorSlice
from ligermodels.training import sharded_checkpoints
from ligermodels.training.sharded_checkpoints import FACTS, Stored, facts_of, read, remove, write

WEIGHT = torch.arange(24.0).reshape(6, 4)
BIAS = torch.arange(3.0)


def stored(weight: Tensor, bias: Tensor) -> dict[str, Stored]:
    """Cut both tensors into parts: two runs of rows, and two halves of the rows between."""
    parts = [
        TensorSlice(weight[:2], 0),
        TensorSlice(weight[2:4, :1], 2, 0),
        TensorSlice(weight[2:4, 1:], 2, 1),
        TensorSlice(weight[4:], 4),
    ]
    return {
        "weight": Stored((6, 4), weight.dtype, parts),
        "bias": Stored((3,), bias.dtype, [TensorSlice(bias[:1], 0), TensorSlice(bias[1:], 1)]),
    }


def whole(weight: Tensor, bias: Tensor) -> dict[str, Stored]:
    return {
        "weight": Stored((6, 4), weight.dtype, [TensorSlice(weight, 0)]),
        "bias": Stored((3,), bias.dtype, [TensorSlice(bias, 0)]),
    }


def test_other_parts_read_what_parts_wrote(tmp_path: Path) -> None:
    write(tmp_path / "a", stored(WEIGHT.clone(), BIAS.clone()), {"step": 3})
    weight, bias = torch.zeros(6, 4), torch.zeros(3)
    read(tmp_path / "a", whole(weight, bias))
    assert weight.equal(WEIGHT) and bias.equal(BIAS)
    assert facts_of(tmp_path / "a")["step"] == 3
    # The other way, over a folder that is there.
    write(tmp_path / "a", whole(WEIGHT + 1, BIAS), {})
    read(tmp_path / "a", stored(weight, bias))
    assert weight.equal(WEIGHT + 1) and bias.equal(BIAS)
    remove(tmp_path / "a")
    assert not [*tmp_path.iterdir()]


def test_damage_and_other_tensors_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(folder, whole(WEIGHT, BIAS), {})
    weight, bias = torch.zeros(6, 4), torch.zeros(3)
    with pytest.raises(CheckpointError, match="'bias' is no tensor of this model"):
        read(folder, {"weight": whole(weight, bias)["weight"]})
    with pytest.raises(CheckpointError, match="another shape or dtype"):
        read(folder, whole(weight.double(), bias))
    data = next(file for file in folder.iterdir() if file.suffix == ".distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        read(folder, whole(weight, bias))
    (folder / FACTS).write_text("{}")
    with pytest.raises(CheckpointError, match="'files'"):
        read(folder, whole(weight, bias))
    assert not weight.any() and not bias.any()


def test_errors_of_torchs_checkpoints_are_ours_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault = OSError("no room\nat all")
    for number, error in ((0, fault), (1, CheckpointException("save", {1: (fault, None)}))):
        monkeypatch.setattr(sharded_checkpoints, "rank", lambda number=number: number)
        with pytest.raises(SaveError, match=r"^run/step-1: no room$") as raised:
            with sharded_checkpoints._quiet(SaveError, "run/step-1"):
                raise error
        assert raised.value.is_repeated == (number == 1)


def _with_metadata(folder: Path, text: bytes) -> None:
    """Put another pickle into a folder, with the checksum that belongs to it."""
    (folder / ".metadata").write_bytes(text)
    facts = facts_of(folder)
    facts["files"][".metadata"] = sharded_checkpoints.file_hash(folder / ".metadata")
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def test_a_pickle_runs_no_code_and_names_no_other_file(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    folder = tmp_path / "a"
    write(folder, whole(WEIGHT, BIAS), {})
    good = (folder / ".metadata").read_bytes()
    _with_metadata(folder, pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError, match=r"\.metadata: the file cannot be read: it .*mkdir"):
        read(folder, whole(WEIGHT, BIAS))
    assert not (tmp_path / "made").exists()
    _with_metadata(folder, good[:40])
    with pytest.raises(CheckpointError, match=r"\.metadata: the file cannot be read"):
        read(folder, whole(WEIGHT, BIAS))

    metadata = pickle.loads(good)
    for info in metadata.storage_data.values():
        info.relative_path = "../b"
    _with_metadata(folder, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"it names '\.\./b', which is no file of this"):
        read(folder, whole(WEIGHT, BIAS))
