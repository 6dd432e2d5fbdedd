"""Linears whose input is a cheap function of a tensor that is kept anyway.

The norm's output and the activation product are not saved for backward: each is recomputed there
by the kernel that computes its gradient. What stays per token is the residual, 1 / rms and the
linear's output where the next op needs it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.autocast import cast_operands, without_autocast
from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select
from ligermodels.kernels.glu import check_glu
from ligermodels.kernels.rms_norm import check_norm, check_residual
from ligermodels.kernels.rope import check_rope, split_qkv


def _linear_grads(
    grad: Tensor, x: Tensor | None, want_weight: bool, want_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias of a linear from the gradient of its output and its input."""
    rows = grad.reshape(-1, grad.shape[-1])
    grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if want_weight and x is not None else None
    grad_bias = rows.sum(0) if want_bias else None
    return grad_weight, grad_bias


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, residual, norm_weight, weight, bias, cos, sin, heads, eps, offset, casting_mode
    ):
        ctx.ops = ops = select("rms_norm", x, residual)
        y, s, rstd = ops.rms_norm_forward(
            x, residual, norm_weight, eps, offset, casting_mode, weight.dtype
        )
        out = F.linear(y, weight, bias)
        outputs = (out,)
        if cos is not None:
            # In place: `out` was made just above and nobody else holds it.
            out = select("rope", out).rope_forward(out, cos, sin, *heads, True)
            outputs = split_qkv(out, *heads)
        ctx.save_for_backward(s, norm_weight, rstd, weight, cos, sin)
        ctx.options = eps, offset, casting_mode
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return outputs if residual is None else (*outputs, s)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("norm_linear")
        s, norm_weight, rstd, weight, cos, sin = ctx.saved_tensors
        eps, offset, casting_mode = ctx.options
        x_dtype, residual_dtype = ctx.dtypes
        ops, needs = ctx.ops, ctx.needs_input_grad
        grad_s = None if residual_dtype is None else grads[-1]
        if cos is None:
            grad_out = grads[0]
        else:
            grad_out = select("rope", s).rope_backward(*grads[:3], cos, sin)

        grad_norm = grad_s_total = y = None
        with without_autocast(s):
            if any(needs[:3]):
                grad_y = grad_out @ weight
                grad_s_total, grad_norm, y = ops.rms_norm_backward(
                    grad_y, grad_s, s, norm_weight, rstd, offset, casting_mode, needs[2], needs[3]
                )
                del grad_y
            elif needs[3]:
                y, _, _ = ops.rms_norm_forward(
                    s, None, norm_weight, eps, offset, casting_mode, weight.dtype
                )
            grad_weight, grad_bias = _linear_grads(grad_out, y, needs[3], needs[4])
        grad_x = grad_s_total.to(x_dtype) if needs[0] else None
        grad_residual = grad_s_total.to(residual_dtype) if needs[1] else None
        return grad_x, grad_residual, grad_norm, grad_weight, grad_bias, *[None] * 6


def _operands(
    op: str, name: str, x: Tensor, width: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, checked, as autocast would cast them."""
    check_floating(op, "weight", weight)
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} does not fit {name} {tuple(x.shape)}; expected "
            f"(out, {width})"
        )
    weight, bias = cast_operands(x, weight, bias)
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"{op}: bias {tuple(bias.shape)} {bias.dtype} does not fit weight "
            f"{tuple(weight.shape)} {weight.dtype}; expected ({len(weight)},) {weight.dtype}"
        )
    return weight, bias


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Return (linear(rms_norm(x + residual)), x + residual), keeping only the sum for backward.

    Args: x, residual (..., in); norm_weight (in); weight (out, in); bias (out); the rest as in
        `rms_norm`. residual None means zero.
    Returns: (..., out) in weight's dtype, and the sum (..., in).
    Raises: ValueError where shapes do not agree, for another casting_mode, for tensors that are not
        floating point or a bias of another dtype than the weight.
    """
    check_norm("norm_linear", x, norm_weight, casting_mode, weight_name="norm_weight")
    if residual is not None:
        check_residual("norm_linear", x, residual)
    weight, bias = _operands("norm_linear", "x", x, x.shape[-1], weight, bias)
    with without_autocast(x):
        outputs = _NormLinear.apply(
            x, residual, norm_weight, weight, bias, None, None, None, eps, offset, casting_mode
        )
    return (outputs[0], x) if residual is None else outputs


def norm_qkv_rope(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm_linear` onto packed queries, keys and values, rotated in place.

    Args: as in `norm_linear` with x (batch, seq, in) and the packed weight
        ((heads + 2 kv heads) * head_dim, in), and as in `rope`.
    Returns: q (batch, seq, heads, head_dim), k, v (batch, seq, kv heads, head_dim), the sum.
        cos and sin are not differentiated.
    Raises: ValueError as `norm_linear` and `rope`.
    """
    check_norm("norm_qkv_rope", x, norm_weight, casting_mode, weight_name="norm_weight")
    if residual is not None:
        check_residual("norm_qkv_rope", x, residual)
    weight, bias = _operands("norm_qkv_rope", "x", x, x.shape[-1], weight, bias)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    heads = check_rope("norm_qkv_rope", shape, cos, sin, num_heads, num_kv_heads)
    with without_autocast(x):
        outputs = _NormLinear.apply(
            x, residual, norm_weight, weight, bias, cos, sin, heads, eps, offset, casting_mode
        )
    return (*outputs, x) if residual is None else outputs


class _GLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weight, bias, activation):
        ctx.ops = select("glu", gate_up)
        ctx.save_for_backward(gate_up, weight)
        ctx.activation = activation
        y = ctx.ops.glu_forward(gate_up, activation).to(weight.dtype)
        return F.linear(y, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        refuse_double_backward("glu_linear")
        gate_up, weight = ctx.saved_tensors
        ops, activation, needs = ctx.ops, ctx.activation, ctx.needs_input_grad
        grad_gate_up = y = None
        with without_autocast(gate_up):
            if needs[0]:
                grad_y = grad_out @ weight
                grad_gate_up, y = ops.glu_backward(gate_up, grad_y, activation, needs[1])
                del grad_y
            elif needs[1]:
                y = ops.glu_forward(gate_up, activation)
            if y is not None:
                y = y.to(weight.dtype)
            grad_weight, grad_bias = _linear_grads(grad_out, y, needs[1], needs[2])
        return grad_gate_up, grad_weight, grad_bias, None


def glu_linear(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """linear(glu(gate_up, activation)), keeping only gate_up for backward.

    Args: gate_up (..., 2 * intermediate); weight (out, intermediate); bias (out); activation as
        in `glu`.
    Returns: (..., out) in weight's dtype.
    Raises: ValueError where shapes do not agree, for a weight that is not floating point or a bias
        of another dtype, and as `glu`.
    """
    check_glu(gate_up, activation)
    width = gate_up.shape[-1] // 2
    weight, bias = _operands("glu_linear", "gate_up", gate_up, width, weight, bias)
    with without_autocast(gate_up):
        return _GLULinear.apply(gate_up, weight, bias, activation)
