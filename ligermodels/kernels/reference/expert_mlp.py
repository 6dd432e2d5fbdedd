"""Plain PyTorch: linears and gated MLPs of each row's expert, and the sum over a token's rows.

The rows are pairs of a token and an expert, sorted by expert: see `routing.sort_by_expert`.
"""

from itertools import pairwise

import torch
from torch import Tensor

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
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        out[first:end] = cast(x[first:end], dtype) @ cast(weight[expert], dtype)
    return out


def expert_linear_weight_gradient(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """Return left^T right of each expert's rows: (experts, left's columns, right's columns)."""
    dtype = compute_dtype(left)
    if _has_no_values(starts):
        own = _own(starts, len(left)).to(dtype)
        return cast(torch.einsum("re,rl,ri->eli", own, left.to(dtype), right.to(dtype)), left.dtype)
    out = left.new_empty(len(starts) - 1, left.shape[1], right.shape[1])
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        out[expert] = cast(left[first:end], dtype).mT @ cast(right[first:end], dtype)
    return out


def expert_sum(y: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the rows of each token, with weights (tokens, top_k) or without: (tokens, out)."""
    each = cast(y, compute_dtype(y))[place.long()]
    if weights is not None:
        each = each * weights[..., None]
    return cast(each.sum(1), y.dtype)


def expert_glu_backward(
    gate_up: Tensor,
    grad_output: Tensor,
    weights: Tensor,
    order: Tensor,
    activation: str,
    overwrite: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of gate_up, the weighted activations, and the gradient of the weights.

    Args: gate_up (rows, 2 * inner); grad_output (rows, inner), the gradient of the activations but
        for the weight of the row; weights (tokens, top_k); overwrite: whether to write the results
        into gate_up and grad_output.
    Returns: (rows, 2 * inner) and (rows, inner) in gate_up's dtype, and (rows,) in weights' dtype.
    """
    dtype = compute_dtype(gate_up)
    grad, weight = cast(grad_output, dtype), weights.flatten()[order][:, None]
    made = cast(glu_forward(gate_up, activation), dtype)
    grad_gate_up, _ = glu_backward(gate_up, grad * weight, activation, False, overwrite)
    return grad_gate_up, cast(made * weight, gate_up.dtype), (grad * made).sum(-1).to(weights.dtype)


def _has_no_values(starts: Tensor) -> bool:
    """Return whether the rows of each expert are unknown, so that all pairs are computed."""
    return torch.compiler.is_compiling() or type(starts) is not Tensor or starts.is_meta


def _own(starts: Tensor, rows: int) -> Tensor:
    """Return (rows, experts): whether the row is the expert's."""
    row = torch.arange(rows, device=starts.device)[:, None]
    return (starts[:-1] <= row) & (row < starts[1:])
