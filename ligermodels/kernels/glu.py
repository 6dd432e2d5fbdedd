"""act(gate) * up on packed gate_up rows: SwiGLU and GeGLU."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, activation):
        ctx.ops = select("glu", gate_up)
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return ctx.ops.glu_forward(gate_up, activation)

    @staticmethod
    def backward(ctx, grad):
        refuse_double_backward("glu")
        (gate_up,) = ctx.saved_tensors
        return ctx.ops.glu_backward(gate_up, grad, ctx.activation, False)[0], None


def glu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up. Source: arXiv:2002.05202.

    Args: gate_up (..., 2 * intermediate), the gate's columns first; activation "silu" for SwiGLU,
        "gelu_tanh" or "gelu" for GeGLU with the tanh approximation or with erf.
    Returns: (..., intermediate) in gate_up's dtype, calculated in float32 and rounded once.
    Raises: ValueError for no dimension or an odd last one, another activation, or integers.
    """
    check_glu(gate_up, activation)
    return _GLU.apply(gate_up, activation)


def swiglu(gate_up: Tensor) -> Tensor:
    """`glu` with silu, of the same shapes."""
    return glu(gate_up, "silu")


def geglu(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """`glu` with gelu, of the same shapes; approximate "tanh" or "none" as in `F.gelu`.

    Raises: ValueError for another approximate.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"geglu: approximate={approximate!r}; expected 'tanh' or 'none'")
    return glu(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu")


def check_glu(gate_up: Tensor, activation: str) -> None:
    """Raise ValueError for rows that are not two halves, or an unknown activation."""
    check_floating("glu", "gate_up", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"glu: gate_up {tuple(gate_up.shape)} needs an even last dimension")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"glu: activation={activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}"
        )
