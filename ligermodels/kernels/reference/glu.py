"""Plain PyTorch: act(gate) * up of packed rows."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype
from ligermodels.kernels.reference.float8_cast import BLOCK, float8_cast, recorded, scaled


def glu_forward(
    gate_up: Tensor,
    activation: str,
    amax: Tensor | None = None,
    direct: tuple[torch.dtype, Tensor] | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return act(gate) * up for gate_up (..., 2 * intermediate). Shazeer 2020, arXiv:2002.05202.

    Args: activation: "silu", or the GELU of arXiv:1606.08415: "gelu_tanh" (approximation) or
        "gelu" (erf); amax: float32 (1, 1) that is raised to the largest absolute value of the
        output; direct: a float8 dtype to return, and the absolute value (1, 1) that fits into it;
        kept: where to write gate_up in float8, of its shape, and float32 (2 * blocks, rows) for
        the scale of each 128 elements of a row of the gate, then of up.
    """
    if kept is not None:
        values, scale = kept
        parts = zip(gate_up.chunk(2, -1), values.chunk(2, -1), scale.chunk(2))
        for part, to, scale_to in parts:
            rows, width = part.shape[:-1].numel(), part.shape[-1]
            part = part.reshape(rows, width)
            made, _ = float8_cast(part, None, to.dtype, False, True, False)
            assert made is not None
            to.copy_(made[0][:rows, :width].view(to.shape))
            scale_to.copy_(made[1].t()[: len(scale_to), :rows])
    gate, up = cast(gate_up, compute_dtype(gate_up)).chunk(2, -1)
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    y = cast(gate * up, gate_up.dtype)
    y = y if amax is None else recorded(y, amax)
    return y if direct is None else scaled(y, direct[1], direct[0])[0]


def glu_backward(
    gate_up: Tensor,
    grad_output: Tensor,
    activation: str,
    recompute_output: bool,
    overwrite: bool,
    amax: Tensor | None = None,
    turned: tuple[Tensor, Tensor] | None = None,
    operand: tuple[Tensor, ...] | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradient of `glu_forward`; recompute its output if asked to.

    Args: overwrite: whether to write the gradient into gate_up instead of a new tensor; amax:
        float32 zeros (1, 1) that get the largest absolute value of the gradient; turned: where to
        write the output transposed and in float8 (intermediate, rows up to a multiple of 16), and
        its amax; operand: where to write the gradient in float8 (rows, 2 * intermediate) and
        transposed as the output, the absolute value that fits into it, and a number that is raised
        to its largest absolute value; scale: that of a gate_up which `glu_forward` has written in
        float8, and which stands for one of grad_output's dtype.
    Returns: the gradient (..., 2 * intermediate) in gate_up's dtype, or a tensor whose values mean
        nothing if operand is given; and the output, rounded to gate_up's dtype, in grad_output's
        dtype, or None. The output may take the memory of grad_output.
    """
    rounded = gate_up.dtype
    if scale is not None:
        factors = scale.t().reshape(*grad_output.shape[:-1], 2, -1).repeat_interleave(BLOCK, -1)
        factors = factors[..., : grad_output.shape[-1]].flatten(-2)
        gate_up, rounded = gate_up.float() * factors, grad_output.dtype
    dtype = compute_dtype(gate_up)
    gate, up = cast(gate_up, dtype).chunk(2, -1)
    grad = cast(grad_output, dtype)
    if activation == "silu":
        activated = F.silu(gate)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    else:
        activated, slope = _gelu_and_derivative(gate, activation == "gelu_tanh")
        grad_gate = grad * up * slope
    out = None
    if recompute_output or turned is not None:
        # The output must have the bits of forward's, and F.gelu rounds unlike x * phi(x).
        silu = activation == "silu"
        out = activated * up if silu else glu_forward(gate_up, activation)
        out = cast(cast(out, rounded), grad_output.dtype)
    if turned is not None and out is not None:
        values, out_amax = turned
        _, made = float8_cast(out.flatten(0, -2), out_amax, values.dtype, False, False, True)
        assert made is not None
        values.copy_(made[0])
        out = None
    parts = grad_gate, grad * activated
    if operand is not None:
        straight, across, limit, seen = operand
        grad = cast(torch.cat(parts, -1), rounded).flatten(0, -2)
        both = float8_cast(grad, limit, straight.dtype, False, True, True, seen)
        for to, part in zip((straight, across), both):
            assert part is not None
            to.copy_(part[0])
        return gate_up if scale is None else grad_output.new_empty(1).expand(gate_up.shape), out
    if overwrite and scale is None:
        return recorded(torch.cat(parts, -1, out=gate_up), amax), out
    return recorded(cast(torch.cat(parts, -1), rounded), amax), out


def _gelu_and_derivative(x: Tensor, tanh_approximation: bool) -> tuple[Tensor, Tensor]:
    """GELU(x) = x * phi(x) and its derivative phi(x) + x * phi'(x), both of x's shape."""
    if tanh_approximation:
        # phi = (1 + tanh(u)) / 2 is sigmoid(2 u), which does not cancel where tanh(u) is near -1.
        two_u = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
        phi = torch.sigmoid(two_u)
        slope = phi * (1 - phi) * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x**2)
    else:
        phi = (1 + torch.erf(x * math.sqrt(0.5))) / 2
        slope = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return x * phi, phi + x * slope
