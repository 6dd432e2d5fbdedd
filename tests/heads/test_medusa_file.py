"""Medusa's heads in a file: the names of Medusa's checkpoints, exact values, and clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels import LigerLlama
from ligermodels.errors import CheckpointError, SaveError
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.heads.medusa_file import HEADS_NAME, load_heads, save_heads
from tests.training.tiny_run import tiny_config


@pytest.mark.parametrize("tied", [False, True])
def test_heads_come_back_as_they_were(tied: bool, tmp_path: Path) -> None:
    model = LigerLlama(tiny_config())
    heads = MedusaHeads(model.head, 2, num_blocks=2, tied=tied)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    assert load_heads(model, tmp_path) is None
    save_heads(heads, tmp_path)
    names = {f"{i}.{j}.linear.{x}" for i in (0, 1) for j in (0, 1) for x in ("weight", "bias")}
    names |= set() if tied else {"0.2.weight", "1.2.weight"}
    assert load_file(tmp_path / HEADS_NAME).keys() == names
    again = load_heads(model, tmp_path)
    assert again is not None and again.tied == tied
    for one, other in zip(heads.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [*tmp_path.iterdir()] == [tmp_path / HEADS_NAME]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    model = LigerLlama(tiny_config())
    with pytest.raises(SaveError, match="cannot be written"):
        save_heads(MedusaHeads(model.head, 1), tmp_path / "missing")
    file = tmp_path / HEADS_NAME
    for content, message in (
        ({"x": torch.zeros(1)}, "are not those of Medusa's heads"),
        ({"0.0.linear.weight": torch.zeros(64, 64)}, "are not those of Medusa's heads"),
        ({"99999999.0.linear.bias": torch.zeros(1)}, "are not those of Medusa's heads"),
        ({f"0.0.linear.{x}": torch.zeros(3) for x in ("weight", "bias")}, r"shape \(3,\); these 1"),
    ):
        save_file(content, file)
        with pytest.raises(CheckpointError, match=message):
            load_heads(model, tmp_path)
    save_heads(MedusaHeads(model.head, 1), tmp_path)
    good = load_file(file)
    save_file({name: x * float("nan") for name, x in good.items()}, file)
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        load_heads(model, tmp_path)
    file.write_bytes(b"no file of tensors")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        load_heads(model, tmp_path)
    file.unlink()
    file.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=HEADS_NAME):
        load_heads(model, tmp_path)
