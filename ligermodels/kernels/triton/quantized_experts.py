"""The product of each row with its expert's weight, which is kept in few bits."""

from torch import Tensor

from ligermodels.kernels.triton.dequantize import dequantize_forward
from ligermodels.kernels.triton.expert_mlp import expert_linear


def quantized_expert_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    levels: Tensor | None,
    starts: Tensor,
    transposed: bool,
) -> Tensor:
    """Launch the kernels for `reference.quantized_expert_linear`."""
    if levels is None:
        weight = codes.to(x.dtype) * scales.to(x.dtype)
    else:
        weight = dequantize_forward(codes, scales, levels, x.dtype)
    stack = weight.unflatten(0, (len(starts) - 1, -1))
    return expert_linear(x, stack.mT if transposed else stack, starts)
