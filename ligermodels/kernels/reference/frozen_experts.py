"""Plain PyTorch: products of each row with its expert's weight of few bits, and with a thin one."""

from torch import Tensor

from ligermodels.kernels.dispatch import compute_dtype
from ligermodels.kernels.reference.dequantize import dequantize_forward
from ligermodels.kernels.reference.expert_mlp import expert_linear, expert_linear_few


def expert_linear_add(out: Tensor, x: Tensor, weight: Tensor, starts: Tensor) -> None:
    """Add x W of each row's expert to out (rows, out); the arguments are as in `expert_linear`."""
    dtype = compute_dtype(x)
    out.copy_(out.to(dtype) + expert_linear(x.to(dtype), weight.to(dtype), starts))


def quantized_expert_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    levels: Tensor | None,
    starts: Tensor,
    transposed: bool,
) -> Tensor:
    """Return x W of each row's expert, or x W^T if transposed.

    Args:
        x: (rows, out), or (rows, in) if transposed.
        codes: (experts * out, in) int8, or (experts * out, in / 2) uint8: see `dequantize`.
        scales: (experts * out, 1) for 8 bits, (experts * out, blocks) for 4 bits.
        levels: (16,), the values of 4 bits, NF4; None for 8 bits.
        starts: (experts + 1,), see `routing.sort_by_expert`.
    """
    dtype = compute_dtype(x)
    weight = dequantize_forward(codes, scales, levels, dtype)
    stack = weight.to(x.dtype).unflatten(0, (len(starts) - 1, -1))
    return expert_linear(x, stack.mT if transposed else stack, starts)


def quantized_expert_linear_few(
    x: Tensor, codes: Tensor, scales: Tensor, levels: Tensor | None, experts: Tensor, count: int
) -> Tensor:
    """Return x W^T of each pair of a row and an expert: (pairs, out), in the order of experts.

    Args: experts (rows, top_k); count: the number of experts; the others as in
        `quantized_expert_linear`.
    """
    weight = dequantize_forward(codes, scales, levels, compute_dtype(x)).to(x.dtype)
    return expert_linear_few(x, weight.unflatten(0, (count, -1)).mT, experts)
