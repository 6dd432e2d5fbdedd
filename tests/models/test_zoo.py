"""Test that each field that only some families have is compared with transformers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from ligermodels.models.auto import families
from ligermodels.models.config import ModelConfig
from ligermodels.models.llama import LlamaConfig
from tests.families import DECODERS
from tests.models import zoo

# Fields that a feature sets under another name. The values say where.
SET_OTHERWISE = {
    "rope_local_base_freq": "theta of rope_parameters' sliding_attention, in 'local theta'",
}


def fields_not_compared(
    config_class: type[ModelConfig], configs: list[dict[str, Any]]
) -> list[str]:
    """Return the fields that ModelConfig lacks and that no config changes."""
    shared = {field.name for field in dataclasses.fields(ModelConfig)}
    default = config_class()
    own = {field.name for field in dataclasses.fields(config_class)} - shared
    values = {name: getattr(default, name) for name in sorted(own - SET_OTHERWISE.keys())}
    return [
        name
        for name, value in values.items()
        if all(config.get(name, value) == value for config in configs)
    ]


# A wrapper has the config class of its text model, which is one of these.
@pytest.mark.parametrize("family", DECODERS)
def test_every_field_of_a_family_is_compared(family: str) -> None:
    configs = [zoo.sizes(family), *(each.config for each in zoo.features(family).values())]
    missing = fields_not_compared(families()[family].config_class, configs)
    assert not missing, (
        f"{family}: no feature in tests/models/zoo.py sets {', '.join(missing)}; it is not "
        "compared with transformers"
    )


def test_a_field_that_no_feature_sets_is_named() -> None:
    @dataclass(kw_only=True)
    class GraniteConfig(LlamaConfig):
        residual_multiplier: float = 1.0

    configs = [zoo.sizes("llama"), *(each.config for each in zoo.features("llama").values())]
    idle = {"residual_multiplier": 1.0}  # The default value changes nothing.
    assert fields_not_compared(GraniteConfig, [*configs, idle]) == ["residual_multiplier"]
    assert not fields_not_compared(GraniteConfig, [*configs, {"residual_multiplier": 0.3}])


def test_fields_set_otherwise_exist() -> None:
    """A stale entry would hide a new field of that name."""
    known = {f.name for cls in families().values() for f in dataclasses.fields(cls.config_class)}
    assert SET_OTHERWISE.keys() <= known
