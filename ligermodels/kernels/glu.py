"""act(gate) * up of packed gate_up rows: SwiGLU and GeGLU."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_glu
from ligermodels.kernels.dispatch import refuse_double_backward, select


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        ctx.ops = select("glu", gate_up)
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return ctx.ops.glu_forward(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("glu")
        (gate_up,) = ctx.saved_tensors
        grad_gate_up, _ = ctx.ops.glu_backward(gate_up, grad_output, ctx.activation, False)
        return grad_gate_up, None


def glu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Return act(gate) * up.

    Args: gate_up: (..., 2 * intermediate), with the gate's columns first; activation: "silu" for
        SwiGLU; for GeGLU "gelu_tanh" (tanh approximation) or "gelu" (erf).
    Returns: (..., intermediate) in gate_up's dtype, computed in float32 and rounded once.
    Raises: ValueError if gate_up has no even last dimension or is not floating point, or the
        activation is unknown.
    Source: arXiv:2002.05202.
    """
    check_glu("glu", gate_up, activation)
    return _GLU.apply(gate_up, activation)


def swiglu(gate_up: Tensor) -> Tensor:
    """Apply `glu` with silu. The shapes are the same."""
    return glu(gate_up, "silu")


def geglu(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """Apply `glu` with gelu. The shapes are the same.

    Args: approximate: "tanh" or "none", as in `F.gelu`.
    Raises: ValueError as `glu`, or if approximate has another value.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"geglu: approximate={approximate!r}; expected 'tanh' or 'none'")
    return glu(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu")
