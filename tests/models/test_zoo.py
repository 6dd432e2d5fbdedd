"""Test that each field that only some families have is compared with transformers."""

from __future__ import annotations

import dataclasses

import pytest

from ligermodels.models.auto import families
from ligermodels.models.config import ModelConfig
from tests.families import DECODERS, FAMILIES
from tests.models import zoo

# 'local theta' sets this field under another name: theta of rope_parameters' sliding_attention.
SET_OTHERWISE = {"rope_local_base_freq"}


# A wrapper has the config class of its text model, which is one of these.
@pytest.mark.parametrize("family", DECODERS)
def test_every_field_of_a_family_is_compared(family: str) -> None:
    configs = [zoo.sizes(family), *(each.config for each in zoo.features(family).values())]
    default = families()[family].config_class()
    shared = {field.name for field in dataclasses.fields(ModelConfig)}
    own = {field.name for field in dataclasses.fields(default)} - shared - SET_OTHERWISE
    values = {name: getattr(default, name) for name in own}
    missing = [n for n, v in values.items() if all(config.get(n, v) == v for config in configs)]
    assert not missing, (
        f"{family}: no feature in tests/models/zoo.py sets {', '.join(missing)}; it is not "
        "compared with transformers"
    )


def test_every_family_has_an_entry() -> None:
    assert FAMILIES.keys() == families().keys()
