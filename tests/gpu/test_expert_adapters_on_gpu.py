"""Adapters on experts on a GPU: their errors, plans, a compiled layer, and that nothing waits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ligermodels import LigerQwen3Moe, Qwen3MoeConfig
from ligermodels.adapters.adapted_model import add_adapters, quantize
from ligermodels.layers import Experts
from tests.gpu.synchronisation import no_synchronisation

pytestmark = pytest.mark.gpu


SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}  # the tests share what they compile


def adapted(bits: int | None, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    model = LigerQwen3Moe(Qwen3MoeConfig.small(**SIZES)).to("cuda", dtype)
    if bits is not None:
        quantize(model, bits, torch.device("cuda"))
    add_adapters(model, 16, 32.0)
    for name, weight in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(weight, std=0.02)
    return model


def eager(layer: Experts, x: Tensor) -> Tensor:
    """Return the output of experts and their adapters, one after the other, as PEFT computes it."""
    weights, experts, _ = layer.router(x)
    count, out = layer.router.num_experts, torch.zeros_like(x)
    inner, hidden = layer.intermediate_size, layer.hidden_size
    pieces = []
    for each, rows in ((layer.gate_up_proj, inner), (layer.down_proj, hidden)):
        dtype, base = x.dtype, each.base_layer.weight.to(x.dtype)
        a, b = each.lora_a.to(dtype).split(16), each.lora_b.to(dtype).split(rows)
        pieces += [*zip(base.split(rows), a, b)]

    def linear(y: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return y @ w.T + (y @ a.T) @ b.T * 2.0

    for e in range(count):
        gate, up, down = pieces[2 * e], pieces[2 * e + 1], pieces[2 * count + e]
        made = torch.nn.functional.silu(linear(x, *gate)) * linear(x, *up)
        weight = (weights * (experts == e)).sum(-1, keepdim=True)
        out = out + (weight * linear(made, *down)).to(x.dtype)
    return out


def test_bfloat16_errors_beside_eager(record_property) -> None:
    """The geometric means over 8 inputs of the outputs' and of all gradients' errors."""
    layer = adapted(None).layers[0].mlp
    exact = adapted(None, torch.float64).layers[0].mlp
    exact.load_state_dict(layer.state_dict())
    trained = [name for name, p in layer.named_parameters() if p.requires_grad]
    logs: list[list[float]] = []
    for seed in range(8):
        torch.manual_seed(seed)
        x, grad = torch.randn(2, 200, 256, device="cuda").bfloat16()
        found = []
        for of, call in ((layer, lambda x: layer(x)[0]), (layer, lambda x: eager(layer, x))):
            y = x.clone().requires_grad_()
            out = call(y)
            leaves = [y, *(of.get_parameter(name) for name in trained)]
            found.append([out, *torch.autograd.grad(out, leaves, grad)])
        # The router's choice is that of bfloat16, and so are its weights.
        y = x.double().requires_grad_()
        exact.router.forward = lambda _, layer=layer, x=x: tuple(
            each.double() if each.is_floating_point() else each for each in layer.router(x)
        )
        out = eager(exact, y)
        leaves = [*(exact.get_parameter(name) for name in trained)]
        right = [out, *torch.autograd.grad(out, leaves, grad.double())]
        for index in range(1 + len(trained)):
            place = index and index + 1  # the gradient of x also has what the router adds
            ours, theirs = ((f[place].double() - right[index]).norm() for f in found)
            logs += [[]] if seed == 0 else []
            logs[index].append(math.log(ours.item() / theirs.item()))
    for name, each in zip(["output", *trained], logs):
        ratio = math.exp(sum(each) / len(each))
        record_property(name, ratio)
        assert ratio <= 1.05, (name, ratio)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_plan_and_a_compiled_layer_give_the_same_gradients(bits) -> None:
    model = adapted(bits)
    ids = torch.randint(3, 131, (2, 128), device="cuda")
    with torch.no_grad():  # the rounding of a compiled layer could choose others
        routes = model(ids, return_routing=True)[1].experts

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, routed_experts=routes).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    for ours, theirs in zip(gradients(), expected):
        assert torch.equal(ours, theirs)
    with no_synchronisation():
        gradients()
    model.set_memory_plan(model.plan_memory(2, 128, "1GiB"))
    for ours, theirs in zip(gradients(), expected):
        assert torch.equal(ours, theirs)
    model.activation_checkpointing_enable()
    for ours, theirs in zip(gradients(), expected):
        assert torch.equal(ours, theirs)
    model.set_memory_plan(None)
    model.layers[0].compile()
    for ours, theirs in zip(gradients(), expected):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())
