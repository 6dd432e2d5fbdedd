"""Every family beside transformers' own model of it, feature by feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import parity, zoo
from tests.models.pairs import relative

CASES = [(family, name) for family in zoo.FAMILIES for name in zoo.features(family)]
RecordProperty = Callable[[str, Any], None]


def cases_of(column: str) -> pytest.MarkDecorator:
    """The features that the column of the table is measured on."""
    chosen = [
        pytest.param(family, name, id=f"{family}-{name.replace(' ', '_')}")
        for family, name in CASES
        if parity.applies(column, zoo.features(family)[name])
    ]
    return pytest.mark.parametrize(("family", "name"), chosen)


def hold(family: str, name: str, errors: dict[str, float], record: RecordProperty) -> None:
    """Note the errors for the table, and hold each against its bound."""
    record("parity", [family, name, errors])
    for column, error in errors.items():
        assert error <= parity.BOUNDS[column], f"{column}: {error}"


@cases_of("logits")
def test_logits_loss_and_gradients(family: str, name: str, record_property: RecordProperty) -> None:
    case = parity.case(family, name)
    hold(family, name, parity.check_numbers(case), record_property)


@cases_of("generation")
def test_generation(family: str, name: str, record_property: RecordProperty) -> None:
    hold(family, name, parity.check_generation(parity.case(family, name)), record_property)


@cases_of("round trip")
def test_round_trip(family: str, name: str, record_property: RecordProperty) -> None:
    hold(family, name, parity.check_round_trip(parity.case(family, name)), record_property)


@cases_of("compile")
def test_compiled(family: str, name: str, record_property: RecordProperty) -> None:
    # The compiler that users have for one feature of each family; its front end for the rest.
    backend = "inductor" if name == "basic" else "aot_eager"
    case = parity.case(family, name)
    hold(family, name, parity.check_compiled(case, backend), record_property)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_maths_of_every_feature_differs(family: str) -> None:
    """A window that hides nothing, or a cap that bends nothing, would prove nothing.

    The nearest is GELU's tanh form to its erf form, ten bounds away.
    """
    found = zoo.features(family)
    ids = zoo.make_inputs("plain", zoo.TINY.vocab or 0).ids
    basic = zoo.build(family, found["basic"])
    shapes = {key: weight.shape for key, weight in basic.state_dict().items()}
    idle = []
    with torch.no_grad():
        expected = basic(ids).logits
        for name, feature in found.items():
            model = zoo.build(family, feature)
            same = {key: weight.shape for key, weight in model.state_dict().items()} == shapes
            computes = feature.kind in ("maths", "constants")
            if computes and same and name not in ("basic", "no padding token"):
                if (far := relative(model(ids).logits, expected)) < 5 * parity.BOUNDS["logits"]:
                    idle.append((name, far))
            if name == "no padding token":  # changes a gradient only
                assert basic.get_input_embeddings().padding_idx == zoo.PAD
                assert model.get_input_embeddings().padding_idx is None
    assert not idle
