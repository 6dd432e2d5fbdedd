"""The families of examples/families on a GPU: experts, partial and interleaved rope, sandwiches."""

from __future__ import annotations

import pytest
import torch

from ligermodels import LigerMixtral, MixtralConfig
from tests import outside
from tests.examples import family_table
from tests.gpu.synchronisation import no_synchronisation
from tests.models import parity
from tests.models.parity import RecordProperty

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("registry")]


@pytest.mark.parametrize("name", outside.NAMES)
def test_it_is_exact(name: str) -> None:
    report = family_table.check_family(outside.family(name), device="cuda", compile=False)
    assert report.ok, str(report)
    assert all(cell.error is not None for row in report.rows.values() for cell in row.values())


@pytest.mark.parametrize("name", outside.NAMES)
def test_bfloat16_errors_beside_transformers(name: str, record_property: RecordProperty) -> None:
    parity.hold_ratios(name, family_table.bfloat16_ratios(name, "cuda"), record_property)


def test_experts_do_not_wait_for_the_gpu() -> None:
    """The grouped product takes the numbers of tokens of the experts from the device."""
    torch.manual_seed(0)
    model = LigerMixtral(MixtralConfig.small(output_router_logits=True)).to("cuda", torch.bfloat16)
    model.router_losses = 0.1, 0.01
    ids = torch.randint(3, 131, (2, 64), device="cuda")
    model(ids, labels=ids, return_routing=True).loss.backward()
    with no_synchronisation():
        routing = model(ids, return_routing=True)[1]
        given = {"routed_experts": routing.experts, "expert_counts": routing.counts}
        out = model(ids, labels=ids, return_routing=True, **given)
        out.loss.backward()
    assert torch.equal(out.routing.experts, routing.experts)
