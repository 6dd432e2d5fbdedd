"""The layer of experts, alone and in a block, and the losses of its router."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ligermodels import kernels
from ligermodels.layers import (
    Attention,
    AttentionContext,
    ClampedSwiGLU,
    DecoderBlock,
    Experts,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    Router,
    load_balancing_loss,
    router_z_loss,
)
from ligermodels.layers.fusion import pre_norm

HIDDEN, INNER, COUNT = 16, 24, 6


def layer(top_k: int = 2, **options) -> Experts:
    torch.manual_seed(0)
    return Experts(Router(HIDDEN, COUNT, top_k, **options), HIDDEN, INNER).double()


@pytest.mark.parametrize("top_k", [1, 2, COUNT])
def test_each_token_gets_the_weighted_sum_of_dense_mlps(top_k) -> None:
    """A `GatedMLP` with the weights of one expert is that expert."""
    experts, x = layer(top_k, normalize=True), torch.randn(2, 5, HIDDEN).double()
    out, logits = experts(x)
    weights, chosen, _ = experts.router(x)
    assert weights.sum(-1).allclose(torch.ones(2, 5).double()) and logits.shape == (10, COUNT)
    each = []
    for expert in range(COUNT):
        mlp = GatedMLP(HIDDEN, INNER).double()
        with torch.no_grad():
            mlp.gate_up_proj.weight.copy_(experts.gate_up_proj.unflatten(0, (COUNT, -1))[expert])
            mlp.down_proj.weight.copy_(experts.down_proj.unflatten(0, (COUNT, -1))[expert])
        each.append(mlp(x))
    index = chosen.long()[..., None].expand(-1, -1, -1, HIDDEN)
    expected = (torch.stack(each, 2).gather(2, index) * weights[..., None]).sum(2)
    torch.testing.assert_close(out, expected)


def test_biases_and_the_activation_of_gpt_oss() -> None:
    """The weight of an expert also weights its bias."""
    torch.manual_seed(0)
    router, activation = Router(HIDDEN, COUNT, 2, normalize=True), ClampedSwiGLU(limit=0.3)
    experts = Experts(router, HIDDEN, INNER, activation, bias=True).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(5, HIDDEN).double()
    weights, chosen, _ = router(x)
    gate_up = (experts.gate_up_proj @ x.T).T.unflatten(1, (COUNT, -1)) + experts.gate_up_bias
    gate, up = gate_up.clamp(max=0.3).chunk(2, -1)
    made = (up.clamp(min=-0.3) + 1) * gate * torch.sigmoid(1.702 * gate)
    down = experts.down_proj.unflatten(0, (COUNT, -1))
    each = torch.einsum("tei,ehi->teh", made, down) + experts.down_bias
    expected = (
        each.gather(1, chosen.long()[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]
    ).sum(1)
    torch.testing.assert_close(experts(x)[0], expected)


def test_it_stands_where_an_mlp_would() -> None:
    """With a residual it returns the sum before the norm, and a block returns the logits."""
    experts, norm = layer(), RMSNorm(HIDDEN).double()
    x, residual = torch.randn(2, 2, 3, HIDDEN).double()
    out, total, logits = experts(pre_norm(norm, x, residual))
    assert torch.equal(total, x + residual)
    alone, same = experts(norm(x + residual))
    torch.testing.assert_close((out, logits), (alone, same))
    attention = Attention(HIDDEN, 2, 2, 8).double()
    context = AttentionContext(*RotaryEmbedding(8)(torch.arange(3)[None]))
    x, residual, logits = DecoderBlock(attention, experts, norm, norm)(x, residual, context)
    between = total + attention(norm(total), context)
    expected, same = experts(norm(between))
    torch.testing.assert_close((x + residual, logits), (between + expected, same))


def test_losses_of_the_router() -> None:
    logits = [torch.randn(4, COUNT) for _ in range(3)]
    joined = torch.cat(logits)
    share = F.one_hot(joined.topk(2).indices, COUNT).sum(1).float().mean(0)
    expected = COUNT * (share * joined.softmax(-1).mean(0)).sum()
    torch.testing.assert_close(load_balancing_loss(logits, 2), expected)
    torch.testing.assert_close(router_z_loss(logits), joined.logsumexp(-1).square().mean())
    even = [torch.zeros(4, COUNT)]
    assert math.isclose(load_balancing_loss(even, COUNT).item(), COUNT, rel_tol=1e-6)
    # A masked token does not count, whatever its logits are.
    mask, other = torch.tensor([[1, 1, 1, 0]]), [x.clone() for x in logits]
    for x in other:
        x[3] = torch.arange(COUNT)
    one, two = (load_balancing_loss(x, 2, mask) for x in (logits, other))
    torch.testing.assert_close(one, two)


def test_refusals() -> None:
    experts = layer()
    gate_up, down = (p.unflatten(0, (COUNT, -1)) for p in (experts.gate_up_proj, experts.down_proj))
    x, weights = torch.ones(2, HIDDEN).double(), torch.ones(2, 1).double()
    for wrong in (-1, COUNT, 2**32):
        with pytest.raises(IndexError, match=f"expert {wrong} is none of 6 experts"):
            kernels.expert_mlp(x, gate_up, down, weights, torch.tensor([[0], [wrong]]))
    with pytest.raises(ValueError, match="Router: score='relu'; expected 'softmax'"):
        Router(HIDDEN, COUNT, 1, score="relu")
    with pytest.raises(ValueError, match="Router: top_k=7 of 6 experts"):
        Router(HIDDEN, COUNT, 7)
    with pytest.raises(ValueError, match=r"Experts: activation\.alpha=0; expected a finite"):
        Experts(Router(HIDDEN, COUNT, 1), HIDDEN, INNER, ClampedSwiGLU(alpha=0))
    with pytest.raises(ValueError, match="Experts: activation='relu'; expected one of"):
        Experts(Router(HIDDEN, COUNT, 1), HIDDEN, INNER, "relu")
