"""act(gate) * up of packed gate_up rows: SwiGLU and GeGLU."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_glu
from ligermodels.kernels.dispatch import apply, nobody_reads_again, refuse_double_backward, select


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str, consume: bool) -> Tensor:
        ctx.ops = select("glu", gate_up)
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.consume = activation, consume
        return ctx.ops.glu_forward(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("glu")
        (gate_up,) = ctx.saved_tensors
        return glu_backward(ctx, gate_up, grad_output, False)[0], None, None


def glu_backward(
    ctx: Any,
    gate_up: Tensor,
    grad_output: Tensor,
    recompute_output: bool,
    amax: Tensor | None = None,
    turned: tuple[Tensor, Tensor] | None = None,
    taker: Any = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of gate_up, which may take its memory, and the output or None.

    The gradient overwrites gate_up if ctx.consume says that nobody else reads it, and no other
    backward will.

    Args: as in `reference.glu.glu_backward`. ctx has the attributes ops, activation and consume;
        taker: the `Products` that may take the gradient as an operand. Then the gradient that is
        returned stands for it.
    """
    overwrite = ctx.consume and nobody_reads_again()
    gate_up = gate_up.detach()
    operand = taker.new_grad_operand(gate_up) if overwrite and taker is not None else None
    grads = ctx.ops.glu_backward(
        *(gate_up, grad_output, ctx.activation, recompute_output, overwrite),
        *(amax, turned, operand, scale),
    )
    if overwrite and scale is None:
        # If another op has saved gate_up after all, autograd raises an error there.
        torch.autograd.graph.increment_version(gate_up)
    if operand is not None:
        taker.take(grads[0], operand)
    return grads


def glu(gate_up: Tensor, activation: str = "silu", *, consume: bool = False) -> Tensor:
    """Return act(gate) * up.

    Args: gate_up: (..., 2 * intermediate), with the gate's columns first; activation: "silu" for
        SwiGLU; for GeGLU "gelu_tanh" (tanh approximation) or "gelu" (erf); consume: whether
        backward may write the gradient into gate_up, which saves a tensor of its size. Pass True
        only if nothing else reads gate_up: it must be the output of an op that does not save it.
    Returns: (..., intermediate) in gate_up's dtype, computed in float32 and rounded once.
    Raises: ValueError if gate_up has no even last dimension or is not floating point, or the
        activation is unknown.
    Source: arXiv:2002.05202.
    """
    check_glu("glu", gate_up, activation)
    return apply(_GLU, gate_up, activation, consume)
