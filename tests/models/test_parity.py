"""Compare every family with transformers' own model of it, feature by feature."""

from __future__ import annotations

import pytest

from tests.models import parity, zoo
from tests.models.parity import RecordProperty, cases_of, hold

# A load of a wrapper's checkpoint warns that it takes the text model alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*loading the text model alone:UserWarning")

CHECKS = {
    "logits": parity.check_numbers,  # also the loss and the gradients
    "generation": parity.check_generation,
    "round trip": parity.check_round_trip,
}


@cases_of("logits")
def test_parity(
    family: str, name: str, record_property: RecordProperty, subtests: pytest.Subtests
) -> None:
    """Check logits, loss, gradients, generated tokens and the export."""
    case = parity.Case(family, name)
    for column, check in CHECKS.items():
        if parity.applies(column, case.feature):
            with subtests.test(column):
                hold(case, check(case), record_property)


@cases_of("compile")
def test_compiled(family: str, name: str, record_property: RecordProperty) -> None:
    """Compare what inductor's front end traces; inductor itself is slow."""
    case = parity.Case(family, name)
    hold(case, parity.check_compiled(case), record_property)


# Users have inductor: it compiles the plainest family and the one with most options.
@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_by_inductor(family: str, record_property: RecordProperty) -> None:
    case = parity.Case(family, "basic")
    hold(case, parity.check_compiled(case, "inductor"), record_property)


# One family of each kind of block: the others round at the same places.
ROUNDED = ("llama", "gemma2", "gemma4_text", "gpt_oss", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    "family",
    [x if x in ROUNDED else pytest.param(x, marks=pytest.mark.long) for x in zoo.FAMILIES],
)
def test_bfloat16_errors_beside_transformers(family: str, record_property: RecordProperty) -> None:
    parity.hold_ratios(family, parity.check_bfloat16(family), record_property)
