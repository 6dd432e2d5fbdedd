"""Plain PyTorch: the experts of each token, their weights, and the order of the rows by expert."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import Routing
from ligermodels.kernels.dispatch import cast, compute_dtype


def routing_forward(
    logits: Tensor, bias: Tensor | None, top_k: int, options: Routing
) -> tuple[Tensor, Tensor]:
    """Return the weights (tokens, top_k) of the chosen experts, float32, and the experts, int32.

    Args: logits (tokens, experts); bias: (experts,) or None, added for the choice alone.
    """
    scores = _scores(cast(logits, compute_dtype(logits)), options)
    chosen = scores if bias is None else scores + bias
    # The sort is stable, so that the first of equal experts is chosen; topk promises nothing.
    experts = chosen.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return _weights(scores, experts, options), experts.to(torch.int32)


def routing_weights(logits: Tensor, experts: Tensor, options: Routing) -> Tensor:
    """Return the weights (tokens, top_k) of given experts, float32."""
    scores = _scores(cast(logits, compute_dtype(logits)), options)
    return _weights(scores, experts.long(), options)


def experts_of_groups(
    logits: Tensor, bias: Tensor | None, top_k: int, options: Routing, n_group: int, topk_group: int
) -> Tensor:
    """Return the top_k experts (tokens, top_k) int32 of the best topk_group of n_group groups.

    The score of a group is the sum of its two best scores, bias included.
    """
    scores = _scores(cast(logits, compute_dtype(logits)), options)
    chosen = (scores if bias is None else scores + bias).unflatten(-1, (n_group, -1))
    best = chosen.topk(min(2, chosen.shape[-1])).values.sum(-1)
    groups = best.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
    outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
    chosen = chosen.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    experts = chosen.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return experts.to(torch.int32)


def routing_backward(
    logits: Tensor, experts: Tensor, grad_weights: Tensor, options: Routing
) -> Tensor:
    """Return the gradient of the logits, in their dtype."""
    scores = _scores(cast(logits, compute_dtype(logits)), options)
    grad = grad_weights * options.scale
    index = experts.long()
    if options.normalize:
        chosen = scores.gather(-1, index)
        total = chosen.sum(-1, keepdim=True) + options.eps
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    grad = torch.zeros_like(scores).scatter_add(-1, index, grad)  # one may be named twice
    if options.score == "sigmoid":
        grad = grad * scores * (1 - scores)
    else:
        grad = scores * (grad - (grad * scores).sum(-1, keepdim=True))
    return cast(grad, logits.dtype)


def _scores(logits: Tensor, options: Routing) -> Tensor:
    return logits.sigmoid() if options.score == "sigmoid" else logits.softmax(-1)


def _weights(scores: Tensor, experts: Tensor, options: Routing) -> Tensor:
    weights = scores.gather(-1, experts)
    if options.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + options.eps)
    return weights * options.scale


def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the pairs of a token and one of its experts by expert; the sort is stable.

    Args: experts (tokens, top_k) int32; count: the number of experts.
    Returns: order (tokens * top_k,), the pair in each row; place (tokens, top_k), the row of each
        pair; starts (count + 1,), the first row of each expert and the number of rows. All int32.
    """
    pairs = experts.flatten()
    order = pairs.argsort(stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    each = torch.arange(count + 1, dtype=pairs.dtype, device=pairs.device)
    starts = torch.searchsorted(pairs[order], each)
    return tuple(x.to(torch.int32) for x in (order, place.view_as(experts), starts))  # type: ignore[return-value]
