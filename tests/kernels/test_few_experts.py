"""Experts of few tokens without gradients, as in decoding, beside the products of sorted rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.adapters import QuantizedLinear
from ligermodels.kernels.dispatch import select
from ligermodels.kernels.expert_mlp import adapted_expert_mlp
from ligermodels.kernels.frozen_experts import Adapter, ExpertWeight
from tests.kernels.checks import compare
from tests.kernels.conftest import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, places
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


def test_no_limit_turns_nan_into_a_number(float32_place) -> None:
    sizes = {"width": 8, "hidden": 4, "experts": 2, "top_k": 1}
    case = CASES["expert_mlp of gpt-oss"]
    made = leaves(case, case.inputs((2,), **sizes), float32_place)
    made["x"].data[1, 0] = math.nan
    for grad in (True, False):  # no gradients: few tokens
        with torch.set_grad_enabled(grad):
            out = kernels.expert_mlp(**made)
        assert out[1].isnan().all() and out[0].isfinite().all(), grad


class Stack(NamedTuple):
    """The weight of 4 experts with adapters of rank 3, and the same in float64."""

    weight: ExpertWeight
    exact: Tensor

    def formula(self, x: Tensor, expert: int) -> Tensor:
        """Return what PEFT computes, one product after the other, in the dtype of x."""
        _, _, _, a, b, adapter = self.weight
        y = x @ self.exact.to(x.dtype).chunk(4)[expert].T
        for i, (row, size) in enumerate(adapter.parts):
            down = a.to(x.dtype).view(4, -1, 3, len(x))[expert, i]
            first = sum(size for _, size in adapter.parts[:i])
            up = b.to(x.dtype).view(4, -1, 3)[expert, first : first + size]
            y[row : row + size] += (down @ x) @ up.T * adapter.scaling
        return y


@pytest.mark.parametrize("place", places(BFLOAT16, gpu=(FLOAT32, BFLOAT16)), indirect=True)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_few_tokens_with_adapters(place, bits, monkeypatch) -> None:
    """Also of few bits; those of gate and up are two, of which each has a part of the rows.

    In bfloat16, the mean errors of few tokens and of sorted rows are compared with PyTorch's.
    """
    options = {"device": place.device, "dtype": place.dtype}
    ops = select("expert_mlp", torch.empty(1, **options))
    monkeypatch.setattr(ops, "are_few", lambda pairs, experts: True)

    def stack(out: int, width: int, *parts: tuple[int, int]) -> Stack:
        linear = torch.nn.Linear(width, 4 * out, bias=False).to(**options)
        base, exact = ExpertWeight(linear.weight), linear.weight
        if bits is not None:
            few = QuantizedLinear(linear, bits)
            base, exact = few.expert_weight(), few.dequantized(FLOAT64)
        a = torch.randn(4 * len(parts) * 3, width, **options)
        b = torch.randn(4 * sum(size for _, size in parts), 3, **options)
        weight = base._replace(a=a, b=b, adapter=Adapter(parts, 0.5))
        return Stack(weight, exact.detach().double())

    def formula(x: Tensor, stacks: tuple[Stack, Stack], weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, FLOAT32))
        for token, own in enumerate(experts.tolist()):
            for weight, expert in zip(weights[token], own):
                gate, up = stacks[0].formula(x[token], expert).chunk(2)
                out[token] += weight * stacks[1].formula(F.silu(gate) * up, expert)
        return out.to(x.dtype)

    experts = torch.tensor([[3, 1], [0, 3], [3, 2]], device=place.device)
    logs = []
    for seed in range(16 if place.dtype == BFLOAT16 else 1):
        torch.manual_seed(seed)
        stacks = stack(24, 16, (0, 12), (12, 12)), stack(16, 12, (0, 16))
        x, weights = torch.randn(3, 16, **options), torch.rand(3, 2, device=place.device)
        args: Any = (*(each.weight for each in stacks), weights, experts, 4)
        in_order = adapted_expert_mlp(x, *args).detach()
        with torch.no_grad():
            few = adapted_expert_mlp(x, *args)
            eager = formula(x, stacks, weights)
            exact = formula(x.double(), stacks, weights.double())
        if place.dtype == FLOAT32:
            torch.testing.assert_close(few, in_order)
        errors = [float((each.double() - exact).norm()) for each in (few, in_order, eager)]
        logs.append([math.log(each / errors[-1]) for each in errors[:2]])
    if place.dtype == BFLOAT16:
        assert torch.tensor(logs).mean(0).max().exp() <= 1.3


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
