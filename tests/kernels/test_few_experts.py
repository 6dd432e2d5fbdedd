"""Experts of few tokens without gradients, as in decoding, beside the products of sorted rows."""

from __future__ import annotations

import pytest
import torch

from ligermodels import kernels
from ligermodels.kernels.dispatch import select
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
