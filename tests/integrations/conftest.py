"""Checkpoints of transformers that the tests of this folder open, and do not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import hf_models, zoo


class Folders(dict[str, Path]):
    """A checkpoint of each family, made when it is first asked for."""

    def __init__(self, place: pytest.TempPathFactory) -> None:
        self.place = place

    def __missing__(self, family: str) -> Path:
        self[family] = self.place.mktemp(family)
        hf_models.build(family, zoo.Feature()).save_pretrained(self[family])
        return self[family]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)
