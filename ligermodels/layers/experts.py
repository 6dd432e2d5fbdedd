"""A mixture of experts: a router, and gated MLPs of which each token gets a few."""

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.kernels.checks import (
    ClampedSwiGLU,
    check_count,
    check_expert_activation,
    check_routing,
)
from ligermodels.layers.fusion import PreNormed

_STD = 0.02  # of the first weights; a model draws them again with its own


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

    Raises:
        ValueError: a number is not positive, top_k is more than num_experts, or the score is
            unknown.
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
    ) -> None:
        super().__init__()
        check_count("Router", "hidden_size", hidden_size, 1)
        check_count("Router", "num_experts", num_experts, 1)
        check_routing("Router", num_experts, top_k, score, scale)
        self.num_experts, self.top_k = num_experts, top_k
        self.score, self.normalize, self.scale = score, normalize, scale
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
        nn.init.normal_(self.weight, std=_STD)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and the experts of each token, and the logits of all experts.

        Args: x (..., hidden).
        Returns: (..., top_k) in float32, (..., top_k) in int32, and (..., experts) in the dtype of
            the product.
        """
        logits = F.linear(x, self.weight, self.bias)
        weights, experts = kernels.routing(
            logits, self.top_k, score=self.score, normalize=self.normalize, scale=self.scale
        )
        return weights, experts, logits

    def extra_repr(self) -> str:
        """Return the sizes, for `print`."""
        return f"{self.weight.shape[1]}, {self.num_experts}, top_k={self.top_k}, {self.score}"


class Experts(nn.Module):
    """Each token's weighted sum of the gated MLPs of its experts. `kernels.expert_mlp` computes it.

    It stands in a block where a `GatedMLP` would. The rows of `gate_up_proj` (experts * 2 * inner,
    hidden) and `down_proj` (experts * hidden, inner) are those of the experts, one after the other.

    Args:
        router: chooses the experts of each token.
        hidden_size: width of input and output.
        intermediate_size: width of gate and up of one expert.
        activation: activation of the gate: "silu", "gelu_tanh" or "gelu"; or a `ClampedSwiGLU`.
        bias: whether the experts have biases, `gate_up_bias` (experts, 2 * inner) and `down_bias`
            (experts, hidden).

    Raises:
        ValueError: a size is not a positive integer, or the activation is unknown.
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
        hidden = check_count("Experts", "hidden_size", hidden_size, 1)
        inner = check_count("Experts", "intermediate_size", intermediate_size, 1)
        check_expert_activation("Experts", activation)
        self.router, self.activation = router, activation
        self.gate_up_proj = nn.Parameter(torch.empty(router.num_experts * 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(router.num_experts * hidden, inner))
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = nn.Parameter(torch.zeros(router.num_experts, 2 * inner))
            self.down_bias = nn.Parameter(torch.zeros(router.num_experts, hidden))
        nn.init.normal_(self.gate_up_proj, std=_STD)
        nn.init.normal_(self.down_proj, std=_STD)

    @overload
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, x: PreNormed) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward(self, x: Tensor | PreNormed) -> tuple[Tensor, ...]:
        """Apply the experts to x, or to norm(x + residual) if x comes from `pre_norm`.

        Args: x (..., hidden), or what `pre_norm` returns.
        Returns: the output (..., hidden) and the router's logits (tokens, experts), from which
            `load_balancing_loss` is made; for an x from `pre_norm`, (the output, x + residual, the
            logits), which a block returns as it is.
        """
        rows, total = (x, None) if isinstance(x, Tensor) else x.apply()
        weights, experts, logits = self.router(rows)
        shape = (self.router.num_experts, -1)
        gate_up, down = self.gate_up_proj.unflatten(0, shape), self.down_proj.unflatten(0, shape)
        out = kernels.expert_mlp(
            rows,
            gate_up,
            down,
            weights,
            experts,
            self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )
        logits = logits.flatten(0, -2)
        return (out, logits) if total is None else (out, total, logits)

    def extra_repr(self) -> str:
        """Return the sizes, for `print`."""
        inner = self.down_proj.shape[1]
        return f"{self.gate_up_proj.shape[1]}, {inner}, activation={self.activation}"


def load_balancing_loss(
    logits: list[Tensor], top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Return the loss of unbalanced experts over all layers: top_k at best, experts at worst.

    It is experts * sum over e of f_e P_e: the share of tokens that expert e gets, counted top_k
    times, and its mean probability. Both are means over the tokens of all layers, as in
    transformers, so that it differs from the mean of the losses of micro-batches.

    Args: logits (tokens, experts) of each layer's router; attention_mask: (batch, seq) or None,
        which is 0 where a token does not count.
    Returns: a scalar in float32.
    Source: arXiv:2101.03961, equations 4 to 6.
    """
    scores = torch.stack(logits).softmax(-1, torch.float32)  # (layers, tokens, experts)
    count = scores.shape[-1]
    chosen = F.one_hot(scores.topk(top_k).indices, count).sum(-2)
    real = torch.ones_like(scores[0, :, 0])
    if attention_mask is not None:
        real = attention_mask.flatten().to(scores.dtype)
    real = real / real.sum() / len(logits)
    share, mean = (torch.einsum("t,lte->e", real, x.to(scores.dtype)) for x in (chosen, scores))
    return count * (share * mean).sum()


def router_z_loss(logits: list[Tensor]) -> Tensor:
    """Return the mean of logsumexp(logits)^2 over all layers and tokens, a scalar in float32.

    Args: logits (tokens, experts) of each layer's router.
    Source: arXiv:2202.08906, equation 5.
    """
    return torch.stack(logits).float().logsumexp(-1).square().mean()
