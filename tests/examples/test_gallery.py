"""The gallery: its committed numbers, a sample with tiny models, and every entry as it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.recipes import RECIPES, preset_of
from examples import (
    encoder_decoder,
    float8_error,
    gallery,
    gguf_names,
    instructions,
    look_and_tell,
    packing,
)
from ligermodels.training.config import FinetuneConfig, read_config
from tests import markdown
from tests.training.tiny_run import make_checkpoint

ENTRIES = {entry.name: entry for entry in gallery.ENTRIES}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("gallery") / "model"))


def test_every_entry_has_its_files_numbers_and_picture() -> None:
    """The captions can be written, and the recipes are options that a run takes."""
    measured = json.loads(gallery.RESULTS.read_text())["entries"]
    assert measured.keys() == ENTRIES.keys()
    for entry in gallery.ENTRIES:
        assert entry.says.format(**measured[entry.name]["numbers"])
        assert (gallery.PICTURES / f"{entry.name}.png").is_file()
        assert all((RECIPES / f"{name}.yaml").is_file() for name in entry.recipes)
        assert all((markdown.ROOT / "docs" / f"{page}.md").is_file() for page in entry.pages)


@pytest.mark.parametrize("file", sorted(RECIPES.rglob("*.yaml")), ids=lambda file: file.stem)
def test_recipe(file: Path, tmp_path: Path) -> None:
    options = read_config(file)
    if file.parent == RECIPES:
        assert preset_of(options["model"])[1].num_hidden_layers > 1
    missing = {"model": "smollm2", "train_files": ["data.jsonl"], "output_dir": str(tmp_path)}
    FinetuneConfig.from_options(**missing | options)


def test_instructions(checkpoint: str, tmp_path: Path) -> None:
    asked = instructions.questions(instructions.TRAIN, 300)
    assert len({question for question, _ in asked}) == 300
    question, answer = asked[0]
    assert all(name in question for name in answer.split(", "))
    found = instructions.main(
        checkpoint, tmp_path, examples=4, held_out=1, max_steps=1, batch_size=1, max_eval_rows=1
    )
    assert found["steps"] == 1 and (tmp_path / "picture.png").is_file()


def test_a_packed_row_has_the_loss_of_the_padded_batch(checkpoint: str, tmp_path: Path) -> None:
    found = packing.main(checkpoint, tmp_path, documents=4, longest=40)
    assert found["packed_loss"] == pytest.approx(found["padded_loss"], rel=1e-5)


def test_errors_in_float8(checkpoint: str, tmp_path: Path) -> None:
    found = float8_error.main(checkpoint, tmp_path, tokens=24, recipes="rowwise")
    assert found["bfloat16"] < found["rowwise"] < 1


def test_an_encoder_decoder_comes_back_from_disk(tmp_path: Path) -> None:
    found = encoder_decoder.main(tmp_path, max_steps=2)
    assert found["same"] == 1
    torch.manual_seed(0)
    source, target = encoder_decoder.examples(3, torch.Generator().manual_seed(0))
    assert torch.equal(source.sort(1).values, target[:, 1:])


def test_pictures_and_names(checkpoint: str, tmp_path: Path) -> None:
    assert look_and_tell.main(tmp_path / "look", max_steps=1)["steps"] == 1
    found = gguf_names.main(checkpoint, tmp_path / "gguf")
    assert found["named"] == found["tensors"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ENTRIES)
def test_entry(name: str, smollm2: Path, tmp_path: Path) -> None:
    """The command runs as it stands, with the real model, and finds what the caption names."""
    found = gallery.run(ENTRIES[name], str(smollm2), tmp_path / name)
    assert ENTRIES[name].says.format(**found["numbers"])
