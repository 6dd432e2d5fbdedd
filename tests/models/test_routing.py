"""Losses of routers over a step, given routes, and the routes of a forward in numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ligermodels import LigerLlama, LlamaConfig, MemoryPlan
from ligermodels.errors import ConfigError
from ligermodels.layers import Experts, Router

SEQ, EXPERTS, TOP_K = 9, 5, 2


class Routed(LigerLlama):
    """Llama with experts in the second and the third layer."""

    router_losses = 0.5, 0.25

    def make_block(self, layer_index: int) -> nn.Module:
        block = super().make_block(layer_index)
        if layer_index:
            block.mlp = Experts(Router(20, EXPERTS, TOP_K, normalize=True), 20, 12)
        return block


def make() -> Routed:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=6,
        initializer_range=0.3,
    )
    return Routed(config)


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 67, (4, SEQ), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, 6:] = 0, 0
    return ids, ids.masked_fill(mask == 0, -100), mask


def grads(model: nn.Module) -> dict[str, Any]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("policy", ["all", "input"])
def test_a_batch_equals_its_micro_batches(policy: Any) -> None:
    model, (ids, labels, mask) = make().double(), data()
    model.set_memory_plan(MemoryPlan.uniform(3, policy))
    whole = model(ids, labels=labels, attention_mask=mask)
    whole.loss.backward()
    expected, micros = grads(model), torch.arange(4).split([1, 3])
    with torch.no_grad():
        counts = sum(
            model(ids[rows], attention_mask=mask[rows], return_routing=True)[1].counts
            for rows in micros
        )
    assert counts.sum() == mask.sum() * 2 * TOP_K
    loss = auxiliary = 0.0
    for rows in micros:
        out = model(
            ids[rows],
            labels=labels[rows],
            attention_mask=mask[rows],
            normalizer=whole.num_valid,
            expert_counts=counts,
        )
        out.loss.backward()
        loss, auxiliary = loss + out.loss.item(), auxiliary + out.auxiliary_loss.item()
    assert loss == pytest.approx(whole.loss.item(), rel=1e-6)
    assert auxiliary == pytest.approx(whole.auxiliary_loss.item(), rel=1e-6)
    found = grads(model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_given_routes_are_followed() -> None:
    """With its own routes a forward is what it was; with others, those experts get gradients."""
    model, (ids, labels, _) = make(), data()
    model.set_memory_plan(MemoryPlan.uniform(3, "input"))
    out = model(ids, labels=labels, return_routing=True)
    experts, counts, entropy = out.routing
    assert experts.shape == (4, SEQ, 2, TOP_K) and counts.shape == (2, EXPERTS)
    assert (entropy > 0).all() and (entropy < math.log(EXPERTS)).all()
    same = model(ids, labels=labels, routed_experts=experts)
    assert torch.equal(same.loss, out.loss)
    given = torch.zeros_like(experts)
    given[..., 0, 1], given[..., 1, 0] = 3, 2
    hidden, routing = model(ids, routed_experts=given, return_routing=True)
    assert torch.equal(routing.experts, given)
    hidden.square().sum().backward()
    for layer, used in ((1, {0, 3}), (2, {0, 2})):
        grad = model.layers[layer].mlp.down_proj.grad.unflatten(0, (EXPERTS, -1))
        assert {e for e in range(EXPERTS) if grad[e].any()} == used
    with pytest.raises(
        ValueError, match=r"routed_experts: \(4, 9, 1, 2\) for 2 layers with experts"
    ):
        model(ids, routed_experts=given[:, :, :1])
    with pytest.raises(ValueError, match=r"counts \(1, \d\): expected \(2, \d\)"):
        model(ids, labels=labels, expert_counts=torch.ones(1, EXPERTS))
    with pytest.raises(ValueError, match="return_routing: no layer of LigerLlama has experts"):
        LigerLlama(model.config)(ids, return_routing=True)


@pytest.mark.long
def test_a_compiled_model_takes_routes_and_counts() -> None:
    model, (ids, labels, mask) = make(), data()
    experts, counts, _ = model(ids, return_routing=True)[1]
    inputs: dict[str, Any] = {"routed_experts": experts, "expert_counts": counts}
    inputs |= {"labels": labels, "attention_mask": mask, "return_routing": True}
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, **inputs)
    expected = model(ids, **inputs)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.routing, expected.routing)


def test_router_losses_that_are_no_pair() -> None:
    model, (ids, labels, _) = make(), data()
    model.router_losses = 0.01  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"router_losses is 0.01; expected a pair"):
        model(ids, labels=labels)
