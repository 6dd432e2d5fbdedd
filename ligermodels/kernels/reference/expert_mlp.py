"""Plain PyTorch: linears and gated MLPs of each row's expert, and the sum over a token's rows.

The rows are pairs of a token and an expert, sorted by expert: see `routing.sort_by_expert`.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.kernels.dispatch import cast, compute_dtype
from ligermodels.kernels.reference.glu import glu_backward, glu_forward


def expert_linear(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Return x W of each row's expert: x (rows, in), weight (experts, in, out), any strides."""
    dtype = compute_dtype(x)
    if _has_no_values(starts):
        own = _own(starts, len(x)).to(dtype)
        every = torch.einsum("ri,eio->reo", x.to(dtype), weight.to(dtype))
        return cast((every * own[..., None]).sum(1), x.dtype)
    out = x.new_empty(len(x), weight.shape[2])
    for expert, (first, end) in enumerate(pairwise(_bounds(starts, len(x)))):
        if first < end:  # most experts have no row of few
            _product(cast(x[first:end], dtype), cast(weight[expert], dtype), out[first:end])
    return out


def expert_gate_up(
    x: Tensor, rows: Any, weight: Tensor, starts: Tensor, bias: tuple[Any, Any], activation: Any
) -> tuple[Tensor, Tensor]:
    """Return gate and up (rows, 2 * inner) of each pair, and their activations (rows, inner).

    Args: x (tokens, in); rows: order and place of `routing.sort_by_expert`; weight (experts, in,
        2 * inner), any strides; bias: bias and owner of `expert_glu_forward`.
    """
    gate_up = expert_linear(expert_rows(x, rows[1]), weight, starts)
    return gate_up, expert_glu_forward(gate_up, *bias, activation)


def are_few(pairs: int, experts: int) -> bool:
    """Return False: `expert_linear` reads no more weights than `expert_linear_few`."""
    return False


def expert_linear_few(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Return x W of each pair of a row and an expert: (pairs, out), in the order of experts.

    Args: x (rows, in); weight (experts, in, out), any strides; experts (rows, top_k).
    """
    dtype, chosen = compute_dtype(x), weight[experts.clamp(0, len(weight) - 1).flatten().long()]
    rows = cast(x, dtype).repeat_interleave(experts.numel() // len(x), 0)
    return cast(torch.einsum("pi,pio->po", rows, cast(chosen, dtype)), x.dtype)


def expert_rows(x: Tensor, place: Tensor) -> Tensor:
    """Return each token's row of x in the rows of its pairs, place (tokens, top_k)."""
    rows = x.repeat_interleave(place.shape[1], 0)
    return torch.empty_like(rows).index_copy_(0, place.flatten().long(), rows)


def expert_linear_weight_gradient(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """Return left^T right of each expert's rows: (experts, left's columns, right's columns)."""
    dtype = compute_dtype(left)
    if _has_no_values(starts):
        own = _own(starts, len(left)).to(dtype)
        return cast(torch.einsum("re,rl,ri->eli", own, left.to(dtype), right.to(dtype)), left.dtype)
    out = left.new_empty(len(starts) - 1, left.shape[1], right.shape[1])
    for expert, (first, end) in enumerate(pairwise(_bounds(starts, len(left)))):
        _product(cast(left[first:end], dtype).mT, cast(right[first:end], dtype), out[expert])
    return out


def expert_sum(
    y: Tensor,
    place: Tensor | None,
    weights: Tensor | None,
    bias: Tensor | None,
    experts: Tensor | None,
) -> Tensor:
    """Sum the rows of each token, with weights (tokens, top_k) or without: (tokens, out).

    Args: place (tokens, top_k), where a negative one is that of no row, or None if the rows are in
        the order of weights; bias: (experts, out), added to each row, or None; experts (tokens,
        top_k), for the bias.
    """
    each = cast(y, compute_dtype(y))
    if place is None:
        assert weights is not None
        each = each.view(*weights.shape, -1)
    else:
        each = each[place.long()].masked_fill(place[..., None] < 0, 0)
    if bias is not None:
        assert experts is not None
        each = each + cast(bias, each.dtype)[experts.long()]
    if weights is not None:
        each = each * weights[..., None]
    return cast(each.sum(1), y.dtype)


def expert_glu_forward(
    gate_up: Tensor, bias: Tensor | None, owner: Tensor | None, activation: str | ClampedSwiGLU
) -> Tensor:
    """Return the activations (rows, inner) of gate_up + bias, in gate_up's dtype.

    Args: gate_up (rows, 2 * inner); bias: (experts, 2 * inner) or None; owner: (rows,), the expert
        of each row, for the bias.
    """
    biased = _biased(gate_up, bias, owner)
    if isinstance(activation, ClampedSwiGLU):
        return cast(_clamped_swiglu(biased, activation)[0], gate_up.dtype)
    return cast(glu_forward(biased, activation), gate_up.dtype)


def expert_glu_backward(
    gate_up: Tensor,
    bias: Tensor | None,
    owner: Tensor | None,
    grad_output: Tensor,
    weights: Tensor,
    order: Tensor,
    activation: str | ClampedSwiGLU,
    overwrite: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of gate_up, the weighted activations, and the gradient of the weights.

    Args: gate_up, bias, owner: as in forward; grad_output (rows, inner), the gradient of the
        activations but for the weight of the row; weights (tokens, top_k); overwrite: whether to
        write the results into gate_up and grad_output.
    Returns: (rows, 2 * inner) and (rows, inner) in gate_up's dtype, and the last like weights.
    """
    dtype = compute_dtype(gate_up)
    grad, weight = cast(grad_output, dtype), weights.flatten()[order][:, None]
    made = cast(expert_glu_forward(gate_up, bias, owner, activation), dtype)
    biased = _biased(gate_up, bias, owner)
    if isinstance(activation, ClampedSwiGLU):
        _, by_gate, by_up = _clamped_swiglu(biased, activation)
        grad_gate_up = torch.cat((by_gate, by_up), -1) * (grad * weight).repeat(1, 2)
    else:
        overwrite = overwrite and biased is gate_up
        grad_gate_up, _ = glu_backward(biased, grad * weight, activation, False, overwrite)
    grad_gate_up = cast(grad_gate_up, gate_up.dtype)
    grad_weights = (grad * made).sum(-1).to(weights.dtype)
    grad_weights = torch.empty_like(grad_weights).index_copy_(0, order.long(), grad_weights)
    return grad_gate_up, cast(made * weight, gate_up.dtype), grad_weights.view(weights.shape)


def _biased(gate_up: Tensor, bias: Tensor | None, owner: Tensor | None) -> Tensor:
    """Return gate_up, or in the dtype of computation gate_up + bias."""
    if bias is None:
        return gate_up
    assert owner is not None
    dtype = compute_dtype(gate_up)
    return cast(gate_up, dtype) + cast(bias, dtype)[owner.long()]


def _clamped_swiglu(gate_up: Tensor, activation: ClampedSwiGLU) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activations of rows, and their derivatives by gate and by up."""
    alpha, limit = activation
    gate, up = cast(gate_up, compute_dtype(gate_up)).chunk(2, -1)
    gate_inside, up_inside = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    phi = torch.sigmoid(alpha * gate)
    slope = phi * (1 + alpha * gate * (1 - phi))
    return gate * phi * up, slope * up * gate_inside, gate * phi * up_inside


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a b into out, which may have another dtype."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _bounds(starts: Tensor, rows: int) -> list[int]:
    """Return starts as numbers. Without data, as in a simulation, all experts have as many rows."""
    if starts.is_meta:
        return [rows * expert // (len(starts) - 1) for expert in range(len(starts))]
    return starts.tolist()


def _has_no_values(starts: Tensor) -> bool:
    """Return whether torch.compile traces, so that all pairs are computed."""
    return torch.compiler.is_compiling() or type(starts) is not Tensor


def _own(starts: Tensor, rows: int) -> Tensor:
    """Return (rows, experts): whether the row is the expert's."""
    row = torch.arange(rows, device=starts.device)[:, None]
    return (starts[:-1] <= row) & (row < starts[1:])
