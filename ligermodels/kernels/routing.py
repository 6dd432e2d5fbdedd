"""Routing: which experts a token gets, and with which weights."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import (
    Routing,
    check_experts,
    check_floating,
    check_groups,
    check_routing,
)
from ligermodels.kernels.dispatch import apply, refuse_double_backward, select
from ligermodels.kernels.reference.routing import experts_of_groups, routing_weights

_OP = "routing"


class _Routing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        given: Tensor | None,
        top_k: int,
        options: Routing,
    ) -> tuple[Tensor, Tensor]:
        ctx.ops, ctx.options = select(_OP, logits), options
        if given is None:
            weights, experts = ctx.ops.routing_forward(logits, bias, top_k, options)
        else:
            weights, experts = routing_weights(logits, given, options), given
        ctx.save_for_backward(logits, experts)
        return weights, experts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(_OP)
        logits, experts = ctx.saved_tensors
        return ctx.ops.routing_backward(logits, experts, grad, ctx.options), *[None] * 4


def routing(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    normalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    experts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of the top_k experts of each token.

    Args:
        logits: (..., experts), the output of a router.
        top_k: how many experts a token gets. Of equal ones, those of smaller number.
        score: "softmax" or "sigmoid": what turns logits into scores, in float32.
        normalize: whether to divide the scores of the chosen experts by their sum. With "softmax",
            this is the softmax of the logits of the chosen experts alone.
        bias: (experts,) or None. It is added to the scores for the choice alone, and gets no
            gradient (arXiv:2408.15664).
        scale: a factor of the weights.
        n_group, topk_group: the experts are n_group groups of neighbours, and a token chooses among
            those of its best topk_group groups. The score of a group is the sum of its two best
            scores, bias included. With more than one group, PyTorch's own ops choose.
        experts: (..., top_k) integers, the experts of each token if they are not to be chosen;
            then the weights are theirs, and bias and groups do not count.
    Returns: the weights (..., top_k) in float32 (float64 for float64 logits), from the largest
        score (with its bias) to the smallest, and the experts (..., top_k) in int32.
    Raises: ValueError if the shapes, dtypes or options are wrong; IndexError if there is no expert
        of a number, on a CPU in eager mode.
    Source: arXiv:1701.06538 (softmax), arXiv:2412.19437 (sigmoid, groups).
    """
    check_floating(_OP, "logits", logits)
    if logits.dim() == 0:
        raise ValueError(f"{_OP}: logits are 0-dimensional; expected (..., experts)")
    *leading, count = logits.shape
    scale = check_routing(_OP, count, top_k, score, scale)
    if bias is not None and bias.shape != (count,):
        raise ValueError(
            f"{_OP}: bias {tuple(bias.shape)} does not fit logits {tuple(logits.shape)}; expected "
            f"({count},)"
        )
    # The sum of sigmoids can be 0; that of a softmax is at least top_k / experts.
    eps = 1e-20 if score == "sigmoid" else 0.0
    bias = None if bias is None else bias.detach()
    rows, options = logits.reshape(-1, count), Routing(score, normalize, scale, eps)
    check_groups(_OP, count, top_k, n_group, topk_group)
    given = None
    if experts is not None:
        integers = not experts.is_floating_point() and experts.dtype != torch.bool
        if experts.shape != (*leading, top_k) or not integers:
            raise ValueError(
                f"{_OP}: experts are {experts.dtype} {tuple(experts.shape)}; expected integers "
                f"{(*leading, top_k)}"
            )
        check_experts(_OP, experts, count)
        given = experts.reshape(-1, top_k).to(torch.int32).contiguous()
    elif n_group > 1:
        with torch.no_grad():
            given = experts_of_groups(rows, bias, top_k, options, n_group, topk_group)
    weights, experts = apply(_Routing, rows, bias, given, top_k, options)
    if len(leading) == 1:
        return weights, experts  # not views, of which FSDP2 warns
    return weights.view(*leading, top_k), experts.view(*leading, top_k)
