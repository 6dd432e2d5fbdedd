"""Experts of few tokens without gradients, as in decoding, beside the products of sorted rows."""

from __future__ import annotations

import pytest
import torch

from ligermodels import kernels
from ligermodels.adapters import QuantizedLinear
from ligermodels.kernels.dispatch import select
from ligermodels.kernels.expert_mlp import adapted_expert_mlp
from ligermodels.kernels.frozen_experts import Adapter, ExpertWeight
from tests.kernels.checks import compare
from tests.kernels.conftest import BFLOAT16, FLOAT16, FLOAT32, places
from tests.kernels.ops_table import CASES, leaves


@pytest.mark.parametrize("place", places(gpu=(FLOAT32, BFLOAT16, FLOAT16)), indirect=True)
@pytest.mark.parametrize(
    ("name", "tokens", "width", "hidden", "experts", "top_k"),
    [
        ("expert_mlp", 17, 40, 24, 8, 1),  # one expert has more rows than a tile
        ("expert_mlp of gpt-oss", 3, 33, 17, 6, 6),
        ("expert_mlp", 1, 64, 130, 8, 1),
    ],
)
def test_few_tokens(place, name, tokens, width, hidden, experts, top_k) -> None:
    sizes = {"width": width, "hidden": hidden, "experts": experts, "top_k": top_k}
    inputs = CASES[name].inputs((tokens,), **sizes)
    inputs["experts"][:, 0] = experts - 1
    made = leaves(CASES[name], inputs, place)
    expected = kernels.expert_mlp(**made)
    assert select("expert_mlp", expected).are_few(tokens * top_k, experts)
    with torch.no_grad():
        torch.testing.assert_close(kernels.expert_mlp(**made), expected)


@pytest.mark.parametrize("place", places(gpu=(FLOAT32, BFLOAT16)), indirect=True)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_few_tokens_with_adapters(place, bits) -> None:
    """Also of few bits; those of gate and up are two, of which each has a part of the rows."""
    torch.manual_seed(0)
    options = {"device": place.device, "dtype": place.dtype}

    def weight(out: int, width: int, *parts: tuple[int, int]) -> ExpertWeight:
        linear = torch.nn.Linear(width, 4 * out, bias=False).to(**options)
        base = ExpertWeight(linear.weight)
        if bits is not None:
            base = QuantizedLinear(linear, bits).expert_weight()
        a = torch.randn(4 * len(parts) * 3, width, **options)
        b = torch.randn(4 * sum(size for _, size in parts), 3, **options)
        return base._replace(a=a, b=b, adapter=Adapter(parts, 0.5))

    stacks = weight(24, 16, (0, 12), (12, 12)), weight(16, 12, (0, 16))
    x, weights = torch.randn(3, 16, **options), torch.rand(3, 2, device=place.device)
    experts = torch.tensor([[3, 1], [0, 3], [3, 2]], device=place.device)
    expected = adapted_expert_mlp(x, *stacks, weights, experts, 4)
    with torch.no_grad():
        found = adapted_expert_mlp(x, *stacks, weights, experts, 4)
    torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("top_k", [1, 5])
def test_one_expert_of_each_token_and_all(every_place, top_k) -> None:
    case = CASES["expert_mlp of gpt-oss" if top_k == 1 else "expert_mlp"]
    inputs = case.inputs((3,), 33, top_k=top_k)
    compare(case.function, case.formula, inputs, every_place, constant=case.constant)


def test_the_reference_takes_the_weight_of_each_pair() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8, 5)
    experts = torch.tensor([[1, 3], [0, 1], [3, 2]], dtype=torch.int32)
    made = select("expert_mlp", x).expert_linear_few(x, weight, experts)
    expected = [x[pair // 2] @ weight[e] for pair, e in enumerate(experts.flatten().tolist())]
    torch.testing.assert_close(made, torch.stack(expected))
