"""Every family beside transformers' own model of it on a GPU, at its real vocabulary size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.models import parity, zoo
from tests.models.parity import RecordProperty, cases_of, hold

pytestmark = pytest.mark.gpu
# Those whose attention or head takes a path of its own: inductor needs a while for each.
COMPILED = ("basic", "packed", "left padding", "window", "window, packed", "tied", "untied")


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    parity.case.cache_clear()
    torch.cuda.empty_cache()


@cases_of("logits", zoo.REAL)
def test_logits_loss_and_gradients(family: str, name: str, record_property: RecordProperty) -> None:
    case = parity.case(family, name, zoo.REAL, "cuda")
    hold(case, parity.check_numbers(case), record_property)


@cases_of("generation", zoo.REAL)
def test_generation(family: str, name: str, record_property: RecordProperty) -> None:
    case = parity.case(family, name, zoo.REAL, "cuda")
    hold(case, parity.check_generation(case), record_property)


@cases_of("compile", zoo.REAL, COMPILED)
def test_compiled(family: str, name: str, record_property: RecordProperty) -> None:
    case = parity.case(family, name, zoo.REAL, "cuda")
    hold(case, parity.check_compiled(case, "inductor"), record_property)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_bfloat16_errors_beside_transformers(family: str, record_property: RecordProperty) -> None:
    ratios = parity.check_bfloat16(family, zoo.REAL, "cuda")
    parity.hold_ratios(family, ratios, record_property)
