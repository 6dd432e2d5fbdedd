"""AutoLiger picks the class that config.json names."""

import json
from pathlib import Path

import pytest

from ligermodels import AutoLiger, CheckpointError, ConfigError, LigerLlama
from ligermodels.converters.weight_map import TABLES
from ligermodels.models.auto import FAMILIES, family_of


def test_every_family_has_a_table() -> None:
    assert {cls.config_class.model_type for cls in FAMILIES.values()} == TABLES.keys()


def test_family_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert family_of(tmp_path) is LigerLlama


@pytest.mark.parametrize("raw", [{}, {"model_type": "gpt2"}, {"model_type": ["llama"]}])
def test_an_unsupported_model_type_lists_the_supported(tmp_path: Path, raw: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config\.json: model_type .* supported: gemma, .*llama"):
        AutoLiger.from_hf(tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        AutoLiger.from_hf(tmp_path / "absent")
