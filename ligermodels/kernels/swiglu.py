"""silu(gate) * up on packed gate_up rows."""

import torch
from torch import Tensor

from ligermodels.kernels.backend import refuse_double_backward, select


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return select(gate_up).swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx, grad):
        refuse_double_backward("swiglu")
        (gate_up,) = ctx.saved_tensors
        return select(gate_up).swiglu_backward(gate_up, grad, False)[0]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. Source: arXiv:2002.05202.

    Args: gate_up (..., 2 * intermediate), the gate's columns first.
    Returns: (..., intermediate) in gate_up's dtype, calculated in float32 and rounded once.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: gate_up {tuple(gate_up.shape)} needs an even last dimension")
    return _SwiGLU.apply(gate_up)
