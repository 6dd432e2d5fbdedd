"""LoRA against its formula, on whole and packed linears."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ligermodels.adapters import LoraLinear
from ligermodels.adapters.lora import RowRange


def adapted(parts=None, **options) -> LoraLinear:
    torch.manual_seed(0)
    base = nn.Linear(8, 12).double().requires_grad_(False)
    made = LoraLinear(base, parts, rank=3, **options).double()
    nn.init.normal_(made.lora_b)
    return made


def by_formula(layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
    update = torch.zeros(12, 8, dtype=torch.float64)
    for rows, a, b in layer.factors():
        update = torch.cat([update[: rows.start], b @ a, update[rows.start + rows.size :]])
    base = layer.base_layer
    return x @ (base.weight + layer.scaling * update).T + base.bias


@pytest.mark.parametrize("parts", [None, [RowRange(0, 4), RowRange(8, 4)]])
def test_outputs_and_gradients(parts) -> None:
    layer = adapted(parts, alpha=5.0)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    leaves = x, layer.lora_a, layer.lora_b
    out, expected = layer(x), by_formula(layer, x)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    ):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(RuntimeError, match="LoraLinear: second derivatives"):
        torch.autograd.grad(layer(x), leaves, grad, create_graph=True)


def test_it_changes_nothing_at_first_or_switched_off() -> None:
    layer, x = adapted(), torch.randn(3, 8, dtype=torch.float64)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer.enable_adapters(True)
    assert not torch.equal(layer(x), layer.base_layer(x))
    layer.reset_parameters()
    assert torch.equal(layer(x), layer.base_layer(x))
    assert layer.lora_a.abs().max() <= 8**-0.5


def test_dropout_drops_inputs_of_the_adapter_alone() -> None:
    layer = adapted(dropout=0.5)
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.manual_seed(1)
    out = layer(x)
    torch.manual_seed(1)
    dropped = nn.functional.dropout(x, 0.5)
    update = by_formula(layer, dropped) - layer.base_layer(dropped)
    torch.testing.assert_close(out - layer.base_layer(x), update)
    torch.testing.assert_close(layer.eval()(x), by_formula(layer, x))


def test_factors_are_cast_to_the_outputs() -> None:
    """Factors in float32 on a frozen linear in bfloat16: their gradients are float32."""
    base = nn.Linear(8, 4, dtype=torch.bfloat16).requires_grad_(False)
    layer = LoraLinear(base, rank=2)
    out = layer(torch.randn(3, 8, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.lora_b.grad.dtype == torch.float32 and base.weight.grad is None


@pytest.mark.parametrize("parts", [None, [RowRange(0, 4), RowRange(8, 4)]])
def test_dora_stretches_the_rows_of_the_sum(parts) -> None:
    """The bias and what dropout keeps from the adapter stay; the lengths count as constants."""
    layer = adapted(parts, dropout=0.5, dora=True, rslora=True, alpha=5.0)
    assert layer.scaling == pytest.approx(5 / 3**0.5)
    nn.init.uniform_(layer.lora_magnitude, 0.5, 2.0)
    x = torch.randn(6, 8, dtype=torch.float64)
    torch.manual_seed(1)
    out = layer(x)
    torch.manual_seed(1)
    dropped = nn.functional.dropout(x, 0.5)
    base = layer.base_layer
    expected = base(x).clone()
    for (rows, a, b), length in zip(layer.factors(), layer.by_part(layer.lora_magnitude)):
        whole = base.weight[rows.slice] + layer.scaling * b @ a
        stretched = (length / whole.detach().norm(dim=1))[:, None] * whole
        expected[:, rows.slice] += dropped @ (stretched - base.weight[rows.slice]).T
    torch.testing.assert_close(out, expected)
    leaves = layer.lora_a, layer.lora_b, layer.lora_magnitude
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    ):
        torch.testing.assert_close(ours, theirs)
