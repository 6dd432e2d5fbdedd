"""torch.compile(fullgraph=True) of single ops: values and gradients are the eager ones."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.kernels.checks import as_tuple, random
from tests.kernels.test_autocast import CASES

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1",
    reason="a launch in the interpreter cannot be traced",
)
NAMES = [name for name in CASES if "cross_entropy" not in name]


@pytest.mark.parametrize("name", NAMES)
def test_equals_eager(place, name) -> None:
    op, _, made = CASES[name]
    device, dtype = place

    def run(function: Any) -> list[torch.Tensor]:
        leaves = {
            k: v.to(device, torch.float32 if k in ("cos", "sin") else dtype, copy=True)
            if isinstance(v, torch.Tensor)
            else v
            for k, v in made.items()
        }
        wanted = [
            leaf.requires_grad_()
            for k, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor) and k not in ("cos", "sin")
        ]
        outputs = as_tuple(function(**leaves))
        upstreams = [random(*x.shape, seed=i).to(x) for i, x in enumerate(outputs)]
        return [*outputs, *torch.autograd.grad(outputs, wanted, upstreams)]

    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(lambda **kwargs: op(**kwargs), fullgraph=True, backend=backend)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, eager in zip(run(compiled), run(op)):
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)
