"""The layer of experts, alone and in a block, and the losses of its router."""

from __future__ import annotations

import importlib
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
    RMSNorm,
    RotaryEmbedding,
    Router,
    Routes,
    expert_counts,
    load_balancing_loss,
    router_z_loss,
)
from ligermodels.layers.fusion import pre_norm

HIDDEN, INNER, COUNT = 16, 24, 6


def layer(top_k: int = 2, **options) -> Experts:
    torch.manual_seed(0)
    return Experts(Router(HIDDEN, COUNT, top_k, **options), HIDDEN, INNER).double()


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


def test_gate_and_up_are_computed_again_under_the_policy_that_drops_them() -> None:
    experts, x = layer(), torch.randn(2, 5, HIDDEN).double().requires_grad_()
    inputs = [x, *experts.parameters()]
    found, sizes = [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[-1].append(tensor.shape)
        return tensor

    for experts.policy in ("all", "no_gate_up"):
        sizes.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = experts(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(map(torch.equal, *found))
    assert [(20, 2 * INNER) in each for each in sizes] == [True, False]


def routes(logits: torch.Tensor, top_k: int = 2) -> Routes:
    return Routes(logits, kernels.routing(logits, top_k)[1])


def test_losses_of_the_router() -> None:
    torch.manual_seed(0)
    found = [routes(torch.randn(4, COUNT)) for _ in range(3)]
    joined = torch.cat([each.logits for each in found])
    share = F.one_hot(joined.topk(2).indices, COUNT).sum(1).float().mean(0)
    expected = COUNT * (share * joined.softmax(-1).mean(0)).sum()
    torch.testing.assert_close(load_balancing_loss(found), expected)
    torch.testing.assert_close(router_z_loss(found), joined.logsumexp(-1).square().mean())
    even = [routes(torch.zeros(4, COUNT), COUNT)]
    assert math.isclose(load_balancing_loss(even).item(), COUNT, rel_tol=1e-6)
    # A masked token does not count, whatever its logits are.
    mask, other = torch.tensor([[1, 1, 1, 0]]), [Routes(*map(torch.clone, x)) for x in found]
    for x in other:
        x.logits[3], x.experts[3] = torch.arange(COUNT), 0
    for loss in (load_balancing_loss, router_z_loss):
        torch.testing.assert_close(loss(found, mask), loss(other, mask))
        assert loss(found, 0 * mask) == 0


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss])
def test_losses_of_micro_batches_add_up_to_that_of_the_batch(loss) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 12, COUNT, requires_grad=True)
    mask = torch.tensor([1] * 9 + [0] * 3)
    whole = loss([*map(routes, logits)], mask)
    parts = [([*map(routes, x)], m) for x, m in zip(logits.split([5, 7], 1), mask.split([5, 7]))]
    counts = sum(expert_counts(*part) for part in parts)
    total = sum(loss(*part, counts) for part in parts)
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)
    grads = [torch.autograd.grad(x, logits)[0] for x in (total, whole)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-8)


def test_given_experts_are_taken() -> None:
    """Their weights are those of the router, and so are their gradients."""
    experts, x = layer(normalize=True), torch.randn(2, 5, HIDDEN).double().requires_grad_()
    given = torch.tensor([4, 1]).expand(2, 5, 2)
    out, found = experts(x, given)
    assert torch.equal(found.experts.long(), given.flatten(0, 1))
    weights = F.linear(x, experts.router.weight).softmax(-1)[..., [4, 1]]
    weights = weights / weights.sum(-1, keepdim=True)
    gate_up, down = (p.unflatten(0, (COUNT, -1)) for p in (experts.gate_up_proj, experts.down_proj))
    expected = kernels.expert_mlp(x, gate_up, down, weights, given)
    torch.testing.assert_close(out, expected)
    inputs = [x, *experts.parameters()]
    ours, theirs = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, expected))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match=r"experts are torch.int64 \(10, 1\); expected integers"):
        experts(x, given[..., :1])
    assert torch.equal(experts(x, given.byte())[0], out)
    for wrong in (given.flatten(0, 1), given.transpose(0, 1)):
        with pytest.raises(ValueError, match=r"Experts: experts .*, x \(2, 5, "):
            experts(x, wrong)
    for number in (COUNT, -1, 2**32):
        with pytest.raises(IndexError, match=f"routing: expert {number} is none of 6 experts"):
            experts(x, torch.full_like(given, number))
    empty = experts(x[:, :0], given[:, :0])[0]
    assert empty.shape == (2, 0, HIDDEN)


def test_groups_are_those_of_deepseek_v3() -> None:
    transformers = pytest.importorskip("transformers")
    modeling = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN, n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2
    )
    torch.manual_seed(0)
    theirs = modeling.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.e_score_correction_bias)
    logits, weights, chosen = theirs(x := torch.randn(7, HIDDEN))
    options = {"score": "sigmoid", "normalize": True, "scale": config.routed_scaling_factor}
    bias = theirs.e_score_correction_bias
    found = kernels.routing(logits, 4, bias=bias, n_group=4, topk_group=2, **options)
    order = chosen.sort(-1)
    torch.testing.assert_close(found[1].long().sort(-1).values, order.values)
    torch.testing.assert_close(
        found[0].gather(1, found[1].argsort(-1)), weights.gather(1, order.indices)
    )
    router = Router(HIDDEN, 12, 4, n_group=4, topk_group=2, **options)
    groups = router(x)[1] // 3
    assert all(len(set(row.tolist())) <= 2 for row in groups)
    with pytest.raises(ValueError, match="top_k=4; expected at most the 3 experts"):
        Router(HIDDEN, 12, 4, n_group=4)
    with pytest.raises(ValueError, match="n_group=5, topk_group=2; expected groups of equal"):
        Router(HIDDEN, 12, 4, n_group=5, topk_group=2)


def test_refusals() -> None:
    experts = layer()
    gate_up, down = (p.unflatten(0, (COUNT, -1)) for p in (experts.gate_up_proj, experts.down_proj))
    x, weights = torch.ones(2, HIDDEN).double(), torch.ones(2, 1).double()
    for wrong in (-1, COUNT, 2**32):
        with pytest.raises(IndexError, match=f"expert {wrong} is none of 6 experts"):
            kernels.expert_mlp(x, gate_up, down, weights, torch.tensor([[0], [wrong]]))
    with pytest.raises(ValueError, match="Router: score='relu'; expected 'softmax'"):
        Router(HIDDEN, COUNT, 1, score="relu")
    with pytest.raises(ValueError, match="Router: top_k=7; expected at most the 6 experts"):
        Router(HIDDEN, COUNT, 7)
    with pytest.raises(ValueError, match=r"Experts: activation\.alpha=0; expected a finite"):
        Experts(Router(HIDDEN, COUNT, 1), HIDDEN, INNER, ClampedSwiGLU(alpha=0))
    with pytest.raises(ValueError, match="Experts: router is a Linear; expected a Router"):
        Experts(torch.nn.Linear(HIDDEN, COUNT), HIDDEN, INNER)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="routes: the list is empty"):
        load_balancing_loss([])
    with pytest.raises(ValueError, match=r"attention_mask \(1, 3\) has 3 tokens, but the routes"):
        load_balancing_loss([routes(torch.randn(4, COUNT))], torch.ones(1, 3))
    assert experts(x[0])[0].shape == (HIDDEN,)
    with pytest.raises(ValueError, match="Experts: activation='relu'; expected one of"):
        Experts(Router(HIDDEN, COUNT, 1), HIDDEN, INNER, "relu")
