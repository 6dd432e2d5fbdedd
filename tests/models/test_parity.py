"""Every family beside transformers' own model of it, feature by feature."""

from __future__ import annotations

import pytest
import torch

from tests.models import hf_models, parity, parity_table, zoo
from tests.models.pairs import relative
from tests.models.parity import RecordProperty, cases_of, hold

# Of a wrapper the text model alone is loaded, which it says.
pytestmark = pytest.mark.filterwarnings("ignore:.*loading the text model alone:UserWarning")


@cases_of("logits")
def test_logits_loss_and_gradients(family: str, name: str, record_property: RecordProperty) -> None:
    case = parity.case(family, name)
    hold(case, parity.check_numbers(case), record_property)


@cases_of("generation")
def test_generation(family: str, name: str, record_property: RecordProperty) -> None:
    case = parity.case(family, name)
    hold(case, parity.check_generation(case), record_property)


@cases_of("round trip")
def test_round_trip(family: str, name: str, record_property: RecordProperty) -> None:
    case = parity.case(family, name)
    hold(case, parity.check_round_trip(case), record_property)


@cases_of("compile")
def test_compiled(family: str, name: str, record_property: RecordProperty) -> None:
    # The compiler that users have for one feature of each family; its front end for the rest.
    backend = "inductor" if name == "basic" else "aot_eager"
    case = parity.case(family, name)
    hold(case, parity.check_compiled(case, backend), record_property)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_bfloat16_errors_beside_transformers(family: str, record_property: RecordProperty) -> None:
    parity.hold_ratios(family, parity.check_bfloat16(family), record_property)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_maths_of_every_feature_differs(family: str) -> None:
    """A window that hides nothing, or a cap that bends nothing, would prove nothing.

    The nearest is GELU's tanh form to its erf form, ten bounds away.
    """
    found = zoo.features(family)
    ids = zoo.make_inputs("plain", zoo.TINY.vocab or 0).ids
    basic = hf_models.build(family, found["basic"])
    shapes = {key: weight.shape for key, weight in basic.state_dict().items()}
    idle = []
    with torch.no_grad():
        expected = basic(ids).logits
        for name, feature in found.items():
            model = hf_models.build(family, feature)
            same = {key: weight.shape for key, weight in model.state_dict().items()} == shapes
            computes = feature.kind in ("maths", "numbers")
            if computes and same and name not in ("basic", "no padding token"):
                if (far := relative(model(ids).logits, expected)) < 5 * parity.BOUNDS["logits"]:
                    idle.append((name, far))
            if name == "no padding token":  # changes a gradient only
                assert basic.get_input_embeddings().padding_idx == zoo.PAD
                assert model.get_input_embeddings().padding_idx is None
    assert not idle


def test_the_published_table_is_of_this_zoo() -> None:
    """docs/parity.md lists these families and features: else `make parity` writes it anew."""
    assert parity_table.rows(parity_table.PAGE.read_text()) == [
        (family, name) for family in zoo.FAMILIES for name in zoo.features(family)
    ]
