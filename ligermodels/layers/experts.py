"""A mixture of experts: a router, and gated MLPs of which each token gets a few."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.kernels.checks import (
    ClampedSwiGLU,
    check_count,
    check_expert_activation,
    check_groups,
    check_routing,
    misfit,
)
from ligermodels.kernels.dispatch import Product, compute_dtype
from ligermodels.kernels.expert_mlp import adapted_expert_mlp
from ligermodels.kernels.frozen_experts import ExpertWeight
from ligermodels.layers.fusion import PreNormed
from ligermodels.layers.recompute import Planned

STACKS = ("gate_up_proj", "down_proj")  # the weights of `Experts`
_STD = 0.02  # of the first weights; a model draws them again with its own


class Routes(NamedTuple):
    """The decisions of a router: the last result of a layer of experts, and of its block.

    Attributes:
        logits: (tokens, experts), in the dtype of the product.
        experts: (tokens, top_k) int32, those of each token.
    """

    logits: Tensor
    experts: Tensor


class Routing(NamedTuple):
    """The routes of a forward in numbers, without gradients; all are tensors on the device.

    Attributes:
        experts: (batch, seq, layers, top_k) int32, the experts of each token, as the forward takes
            them in `routed_experts`. Layers without experts are left out.
        counts: (layers, experts) int64, how many tokens have chosen each expert, padding left out;
            under context parallelism, of the tokens of this rank, as the entropy is.
        entropy: (layers,) float32, the mean entropy over tokens of the softmax of the logits, in
            nats. It is log(experts) for a router that does not choose.
    """

    experts: Tensor
    counts: Tensor
    entropy: Tensor


class Router(nn.Module):
    """Choose the experts of each token, and their weights. `kernels.routing` has the formulas.

    Args:
        hidden_size: width of the input.
        num_experts: number of experts.
        top_k: how many experts a token gets.
        bias: whether the logits have a bias.
        score: "softmax" or "sigmoid".
        normalize: whether the scores of the chosen experts are divided by their sum.
        scale: a factor of the weights.
        n_group, topk_group: groups of neighbouring experts, and how many of them a token chooses
            from.
        correction_bias: whether the router has the parameter correction_bias (experts,), which is
            added to the scores for the choice alone, and gets no gradient (arXiv:2408.15664).
        float32: whether the logits are computed in float32 from inputs in 16 bit.

    Raises:
        ValueError: a number is not positive, top_k is more than num_experts or than the chosen
            groups have, or the score is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        score: str = "softmax",
        normalize: bool = False,
        scale: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
        correction_bias: bool = False,
        float32: bool = False,
    ) -> None:
        super().__init__()
        check_count("Router", "hidden_size", hidden_size, 1)
        check_count("Router", "num_experts", num_experts, 1)
        check_routing("Router", num_experts, top_k, score, scale)
        check_groups("Router", num_experts, top_k, n_group, topk_group)
        self.n_group, self.topk_group = n_group, topk_group
        self.num_experts, self.top_k = num_experts, top_k
        self.score, self.normalize, self.scale = score, normalize, scale
        self.float32 = float32
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
        self.correction_bias = None
        if correction_bias:
            self.correction_bias = nn.Parameter(torch.zeros(num_experts), requires_grad=False)
        nn.init.normal_(self.weight, std=_STD)

    def forward(self, x: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and the experts of each token, and the logits of all experts.

        Args: x (..., hidden); experts (..., top_k) integers, if they are not to be chosen.
        Returns: (..., top_k) in float32, (..., top_k) in int32, and (..., experts) in the dtype of
            the product.
        """
        logits = self._logits(x)
        weights, experts = kernels.routing(
            logits,
            self.top_k,
            score=self.score,
            normalize=self.normalize,
            scale=self.scale,
            n_group=self.n_group,
            topk_group=self.topk_group,
            experts=experts,
            bias=self.correction_bias,
        )
        return weights, experts, logits

    def _logits(self, x: Tensor) -> Tensor:
        if not self.float32:
            return F.linear(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logits = Product.apply(x.to(dtype), self.weight.to(dtype).t())
            return logits if self.bias is None else logits + self.bias.to(dtype)

    def extra_repr(self) -> str:
        """Return the sizes, for `print`."""
        return f"{self.weight.shape[1]}, {self.num_experts}, top_k={self.top_k}, {self.score}"


class Experts(Planned, nn.Module):
    """Each token's weighted sum of the gated MLPs of its experts. `kernels.expert_mlp` computes it.

    It stands in a block where a `GatedMLP` would. The rows of `gate_up_proj` (experts * 2 * inner,
    hidden) and `down_proj` (experts * hidden, inner) are those of the experts, one after the other.
    So are the numbers of `gate_up_bias` and `down_bias`.

    Args:
        router: chooses the experts of each token.
        hidden_size: width of input and output.
        intermediate_size: width of gate and up of one expert.
        activation: activation of the gate: "silu", "gelu_tanh" or "gelu"; or a `ClampedSwiGLU`.
        bias: whether the experts have biases.

    Attributes:
        num_experts: how many experts have their parameters here.
        exchange: how tokens get to the experts of other ranks, or None if all are here. With x
            (tokens, hidden), weights and experts (tokens, top_k), exchange(mlps, x, weights,
            experts) is mlps(x, weights, experts) of all experts, where mlps has those of this rank.

    Raises:
        ValueError: a size is not a positive integer, the router is none, or the activation is
            unknown.
    """

    def __init__(
        self,
        router: Router,
        hidden_size: int,
        intermediate_size: int,
        activation: str | ClampedSwiGLU = "silu",
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(router, Router):
            raise ValueError(f"Experts: router is a {type(router).__name__}; expected a Router")
        hidden = check_count("Experts", "hidden_size", hidden_size, 1)
        inner = check_count("Experts", "intermediate_size", intermediate_size, 1)
        check_expert_activation("Experts", activation)
        self.router, self.activation = router, activation
        self.hidden_size, self.intermediate_size = hidden, inner
        self.num_experts, self.exchange = router.num_experts, None
        self.gate_up_proj = nn.Parameter(torch.empty(router.num_experts * 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(router.num_experts * hidden, inner))
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = nn.Parameter(torch.zeros(router.num_experts * 2 * inner))
            self.down_bias = nn.Parameter(torch.zeros(router.num_experts * hidden))
        nn.init.normal_(self.gate_up_proj, std=_STD)
        nn.init.normal_(self.down_proj, std=_STD)

    exchange: Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor], Tensor] | None

    def forward(
        self, x: Tensor | PreNormed, experts: Tensor | None = None, routed_by: Tensor | None = None
    ) -> tuple[Tensor, Routes] | tuple[Tensor, Tensor, Routes]:
        """Apply the experts to x, or to norm(x + residual) if x comes from `pre_norm`.

        Args: x (..., hidden), or what `pre_norm` returns; experts (..., top_k) integers, the
            experts of each token if the router is not to choose them; routed_by (..., hidden), what
            the router gets in the place of x.
        Returns: the output (..., hidden) and the routes, from which `load_balancing_loss` is made;
            for an x from `pre_norm`, (the output, x + residual, the routes), which a block returns
            as it is.
        """
        rows, total = (x, None) if isinstance(x, Tensor) else x.apply()
        flat = rows.reshape(-1, rows.shape[-1])
        if experts is not None and experts.shape[:-1] != rows.shape[:-1]:
            raise misfit("Experts", "experts of each row", experts=experts, x=rows)
        given = None if experts is None else experts.reshape(len(flat), experts.shape[-1])
        seen = flat if routed_by is None else routed_by.reshape(-1, routed_by.shape[-1])
        weights, chosen, logits = self.router(seen, given)
        if self.exchange is None:
            out = self._mlps(flat, weights, chosen)
        else:
            out = self.exchange(self._mlps, flat, weights, chosen)
        # FSDP2 warns of outputs that are views.
        out = torch.ops.aten._unsafe_view(out, rows.shape)
        routes = Routes(logits, chosen)
        return (out, routes) if total is None else (out, total, routes)

    def _mlps(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the weighted sums of the MLPs of the experts that are here.

        A weight may have been replaced by a module, which makes the weights frozen ones.
        """
        count = self.num_experts
        biases = (
            None if bias is None else bias.unflatten(0, (count, -1))
            for bias in (self.gate_up_bias, self.down_bias)
        )
        options: Any = dict(zip(("gate_up_bias", "down_bias"), biases))
        routes = weights, experts
        options["keep_gate_up"] = self.policy != "no_gate_up"
        stacks = expert_weight(self.gate_up_proj), expert_weight(self.down_proj)
        if any(each.scales is not None or each.adapter is not None for each in stacks):
            return adapted_expert_mlp(x, *stacks, *routes, count, self.activation, **options)
        gate_up, down = (each.weight.unflatten(0, (count, -1)) for each in stacks)
        return kernels.expert_mlp(x, gate_up, down, *routes, self.activation, **options)

    def extra_repr(self) -> str:
        """Return the sizes, for `print`."""
        return f"{self.hidden_size}, {self.intermediate_size}, activation={self.activation}"


class SharedExperts(nn.Module):
    """experts(x) + sigmoid(gate(x)) * shared(x), in the place of an `Experts`.

    Source: arXiv:2401.06066, whose shared experts have no gate; arXiv:2407.10671.

    Args:
        experts: those that a router chooses from.
        shared: an MLP that every token gets, such as a `GatedMLP`.
        gate: a linear from the hidden size to 1. Without it, the factor is 1.
    """

    def __init__(self, experts: Experts, shared: nn.Module, gate: nn.Linear | None = None) -> None:
        super().__init__()
        self.experts, self.shared, self.gate = experts, shared, gate

    def forward(
        self, x: Tensor | PreNormed, experts: Tensor | None = None
    ) -> tuple[Tensor, Routes] | tuple[Tensor, Tensor, Routes]:
        """Return what `Experts.forward` does for the same arguments."""
        rows, total = (x, None) if isinstance(x, Tensor) else x.apply()
        out, routes = self.experts(rows, experts)
        shared = self.shared(rows)
        out = out + (shared if self.gate is None else self.gate(rows).sigmoid() * shared)
        return (out, routes) if total is None else (out, total, routes)


def expert_weight(weight: Any) -> ExpertWeight:
    """Return what a product of experts takes for a weight, or for the module in its place.

    A module is an `nn.Linear` of all rows, or has a method `expert_weight`, as `LoraLinear` and
    `QuantizedLinear` do.
    """
    if isinstance(weight, Tensor):
        return ExpertWeight(weight)
    if type(weight) is nn.Linear:
        return ExpertWeight(weight.weight)
    return weight.expert_weight()  # type: ignore[no-any-return]


def expert_counts(routes: list[Routes], attention_mask: Tensor | None = None) -> Tensor:
    """Return how many tokens have chosen each expert of each layer: (layers, experts) int64.

    Args: routes of each layer; attention_mask: (batch, seq) or None, which is 0 where a token does
        not count.
    Raises: ValueError if there are no routes, or the mask is not one of these tokens.
    """
    real, counts = _real_tokens(routes, attention_mask), []
    for logits, experts in routes:
        chosen = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        index = experts.long()
        counts.append(chosen.scatter_add_(1, index, real.int()[:, None].expand_as(index)).sum(0))
    return torch.stack(counts)


def load_balancing_loss(
    routes: list[Routes], attention_mask: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Return the loss of unbalanced experts over all layers: top_k where all get as many tokens.

    It is experts * sum over e of f_e P_e: the share of tokens that expert e gets, counted top_k
    times, and its mean probability. Both are means over the tokens of all layers, as in
    transformers. With the `counts` of a whole step, the losses of its micro-batches add up to the
    loss of all of them as one batch. In transformers each micro-batch has its own f, so that their
    mean is another loss.

    Args:
        routes: of each layer.
        attention_mask: (batch, seq) or None, which is 0 where a token does not count.
        counts: (layers, experts), the sum of `expert_counts` over all micro-batches of the step, of
            which these routes are one. Where gradients are averaged over ranks, it is the mean of
            the ranks' sums. By default, that of these routes.
    Returns: a scalar in float32; 0 if no token counts.
    Raises: ValueError if there are no routes, or the mask or the counts do not fit them.
    Source: arXiv:2101.03961, equations 4 to 6.
    """
    real = _real_tokens(routes, attention_mask)
    count, tokens = _step(routes, attention_mask, counts)
    scores = (logits.softmax(-1, compute_dtype(logits)) for logits, _ in routes)
    total = torch.stack([(x * real[:, None]).sum(0) for x in scores]).sum(0)
    return len(count) * (count / tokens * (total / tokens)).sum()


def router_z_loss(
    routes: list[Routes], attention_mask: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Return the mean of logsumexp(logits)^2 over all layers and tokens, a scalar in float32.

    Args and errors are those of `load_balancing_loss`.
    Source: arXiv:2202.08906, equation 5.
    """
    real = _real_tokens(routes, attention_mask)
    _, tokens = _step(routes, attention_mask, counts)
    scores = (logits.to(compute_dtype(logits)) for logits, _ in routes)
    squares = torch.stack([x.logsumexp(-1).square() * real for x in scores])
    return squares.sum() / tokens


@torch.no_grad()
def routing_of(routes: list[Routes], batch: int, attention_mask: Tensor | None = None) -> Routing:
    """Return the routes of a forward in numbers. The arguments are those of `expert_counts`."""
    real = _real_tokens(routes, attention_mask)
    scores = (logits.log_softmax(-1, torch.float32) for logits, _ in routes)
    entropy = torch.stack([-(x.exp() * x).sum(-1) * real for x in scores]).sum(-1)
    experts = torch.stack([experts.view(batch, -1, experts.shape[1]) for _, experts in routes], 2)
    counts = expert_counts(routes, attention_mask)
    return Routing(experts, counts, entropy / real.sum().clamp_min(1))


def _real_tokens(routes: list[Routes], attention_mask: Tensor | None) -> Tensor:
    """Return (tokens,) float32: 1 where a token counts, and 0 where it does not."""
    if not routes:
        raise ValueError("routes: the list is empty; pass those of one layer with experts or more")
    logits = routes[0].logits
    if attention_mask is None:
        return torch.ones(len(logits), device=logits.device)
    if attention_mask.numel() != len(logits):
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} has {attention_mask.numel()} tokens, but"
            f" the routes have {len(logits)}; pass the mask (batch, seq) of these tokens"
        )
    return (attention_mask.flatten() != 0).to(logits.device, torch.float32, non_blocking=True)


def _step(
    routes: list[Routes], attention_mask: Tensor | None, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return how many tokens of a step chose each expert in all layers, and their number.

    Args: counts: those of the step, or None for those of these routes.
    Returns: (experts,) and a scalar in float32; the number is 1 if there are no tokens.
    """
    if counts is None:
        counts = expert_counts(routes, attention_mask)
    expected = (len(routes), routes[0].logits.shape[-1])
    if counts.shape != expected:
        raise ValueError(
            f"counts {tuple(counts.shape)}: expected {expected}, (layers, experts) of these routes"
        )
    count = counts.detach().sum(0).float()
    tokens = count.sum() / routes[0].experts.shape[1]
    return count, tokens + (tokens == 0)
