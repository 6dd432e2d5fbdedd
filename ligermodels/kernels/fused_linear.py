"""Linears fused with the norm or the activation before them, to save memory.

Forward does not save the output of the norm or of the activation. In backward, the kernel that
computes its gradient also recomputes it. For each token, forward keeps only the residual, 1 / rms
and, if the next op needs it, the output of the linear.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.checks import (
    NormOptions,
    check_glu,
    check_linear_bias,
    check_linear_weight,
    check_output_gate,
    check_residual,
    check_rms_norm,
    check_rope,
)
from ligermodels.kernels.dispatch import (
    apply,
    cast_operands,
    outputs_are_stored,
    refuse_double_backward,
    select,
    without_autocast,
)
from ligermodels.kernels.glu import glu_backward
from ligermodels.kernels.norms import grads_of_summands
from ligermodels.kernels.rope import split_qkv


class Products:
    """The three products of one call of a linear. A subclass may compute them in another way.

    An instance serves one forward and its backward, so it may keep what is small between them.
    """

    def target(self, x: Tensor) -> tuple[Tensor | None, tuple[torch.dtype, Tensor] | None]:
        """Return what the op that makes an operand needs, which is on x's device; each may be None.

        Zeros, where it writes the largest absolute value of the operand. A float8 dtype, in which
        it may write the operand, and the absolute value that fits into it.
        """
        return None, None

    def new_kept(self, gate_up: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return where the activation may write gate_up in float8, which backward then reads."""
        return None

    def new_grad_amax(self, grad: Tensor) -> Tensor | None:
        """Return zeros for the amax of a gradient that `hand_over` gets, or None."""
        return None

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, amax: Tensor | None = None
    ) -> Tensor:
        """Return linear(x) (..., out) for x (..., in), whose amax may be known."""
        return F.linear(x, weight, bias)

    def new_turned(self, grad_x: Tensor) -> Any:
        """Return where an op may write x for `grad_weight` instead of a tensor, or None.

        Args: grad_x: the gradient of x, with its shape and device.
        """
        return None

    def offer(self, output: Tensor) -> None:
        """Let the op that takes the output write its gradient with `new_grad_operand`."""

    def new_grad_operand(self, output: Tensor) -> tuple[Tensor, ...] | None:
        """Return where an op may write an output's gradient instead of a tensor, or None."""
        return None

    def take(self, grad: Tensor, operand: tuple[Tensor, ...]) -> None:
        """Take the operand in place of a gradient, whose own values then mean nothing."""

    def hand_over(self, grad: Tensor, amax: Tensor | None) -> None:
        """Let the products that get this gradient know its amax."""

    def grad_operand(self, grad_output: Tensor, needs_x: bool, needs_weight: bool) -> Any:
        """Return grad_output (..., out) as the operand of those products that are needed."""
        return grad_output

    def grad_x(self, operand: Any, weight: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of x (..., in). The shape is that of grad_output."""
        return operand @ weight  # type: ignore[no-any-return]

    def grad_weight(self, operand: Any, x: Any, dtype: torch.dtype) -> Tensor:
        """Return the gradient of the weight (out, in) in its dtype."""
        rows = operand.reshape(-1, operand.shape[-1])
        return rows.t() @ x.reshape(-1, x.shape[-1])  # type: ignore[no-any-return]


def _linear_backward(
    ctx: Any,
    grad_output: Tensor,
    operand: Any,
    x: Any,
    needs_weight_grad: bool,
    needs_bias_grad: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias. x may be None if only the bias needs one."""
    grad_weight = grad_bias = None
    if needs_weight_grad and x is not None:
        grad_weight = ctx.products.grad_weight(operand, x, ctx.weight_dtype)
    if needs_bias_grad:
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0)
    return grad_weight, grad_bias


class _NormLinear(torch.autograd.Function):
    """Return the linear of the norm, with `heads` as rotated heads, and the sum.

    It returns the sum even if that is x itself. Backward then receives its gradient, and the kernel
    adds it, which saves a tensor of its size and a rounding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: NormOptions,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: tuple[int, int] | None,
        interleaved: bool,
        products: Callable[[], Products],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.products, ctx.weight_dtype = products(), weight.dtype
        ctx.ops, ctx.options = select("norms", x, residual), options
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        amax, direct = ctx.products.target(x)
        keeps_y = ctx.needs_input_grad[3] and not any(ctx.needs_input_grad[:3])
        dtype, limit = (weight.dtype, None) if keeps_y or direct is None else direct
        y, s, _, rstd = ctx.ops.norm_forward(
            x, residual, norm_weight, None, options, False, dtype, amax, limit
        )
        saved: tuple[Tensor | None, ...] = s, norm_weight, rstd, weight, None
        if not any(ctx.needs_input_grad[:3]):
            # Then backward needs only the linear's input, if anything.
            saved = (*[None] * 4, y if keeps_y else None)
        output = ctx.products.output(y, weight, bias, amax)
        ctx.save_for_backward(*saved, cos, sin)
        if heads is None:
            if bias is None and any(ctx.needs_input_grad[:3]) and ctx.needs_input_grad[3]:
                ctx.products.offer(output)
            return output, s
        if cos is not None and cos.shape[-1]:
            # Rotate in place, unless other code holds the new tensor.
            rope, in_place = select("rope", output).rope_forward, not outputs_are_stored()
            output = rope(output, cos, sin, *heads, in_place, interleaved)
        heads_of_qkv = split_qkv(output, *heads)
        ctx.shapes, ctx.interleaved = [x.shape for x in heads_of_qkv], interleaved
        return *heads_of_qkv, s

    @staticmethod
    def backward(ctx: Any, *grads_of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        *grads, grad_s = grads_of_outputs
        refuse_double_backward("norm_linear" if len(grads) == 1 else "norm_qkv_rope")
        s, norm_weight, rstd, weight, y, cos, sin = ctx.saved_tensors
        needs_grad, grad_output = ctx.needs_input_grad, grads[0]
        if len(grads) > 1:
            grad_output = _qkv_grad(ctx, grads, cos, sin)
        if grad_output is None:
            return *grads_of_summands(ctx, grad_s), *[None] * 9
        grad = grad_norm_weight = None
        with without_autocast(grad_output):
            operand = ctx.products.grad_operand(grad_output, any(needs_grad[:3]), needs_grad[3])
            if any(needs_grad[:3]):
                grad_y = ctx.products.grad_x(operand, weight, grad_output.shape)
                norm_dtype = norm_weight.dtype if needs_grad[2] else None
                grad, grad_norm_weight, _, y = ctx.ops.norm_backward(
                    *(grad_y, grad_s, s, norm_weight, None, rstd, ctx.options),
                    *(norm_dtype, None, needs_grad[3]),
                )
                del grad_y
            grad_weight, grad_bias = _linear_backward(
                ctx, grad_output, operand, y, needs_grad[3], needs_grad[4]
            )
        grads_of_linear = grad_norm_weight, grad_weight, grad_bias
        return *grads_of_summands(ctx, grad), *grads_of_linear, *[None] * 6


def _qkv_grad(ctx: Any, grads: list[Tensor | None], cos: Tensor, sin: Tensor) -> Tensor | None:
    """Return the gradient of packed qkv from those of rotated q, k and v; None if all are None."""
    known = [grad for grad in grads if grad is not None]
    if not known:
        return None
    upstream = [
        known[0].new_zeros(shape) if grad is None else grad
        for grad, shape in zip(grads, ctx.shapes)
    ]
    if cos.shape[-1]:
        ops = select("rope", known[0])
        return ops.rope_backward(*upstream, cos, sin, ctx.interleaved)  # type: ignore[no-any-return]
    return torch.cat(upstream, -2).flatten(-2)


def _check_norm(
    op: str, x: Tensor, residual: Tensor | None, norm_weight: Tensor, options: NormOptions
) -> None:
    check_rms_norm(op, x, norm_weight, options.casting_mode, weight_name="norm_weight")
    if residual is not None:
        check_residual(op, x, residual)


def _linear_operands(
    op: str, x_name: str, x: Tensor, width: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Check weight and bias; return them, cast if autocast is enabled."""
    check_linear_weight(op, x_name, x, width, weight)
    weight, bias = cast_operands(x, weight, bias)
    if bias is not None:
        check_linear_bias(op, weight, bias)
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
    products: Callable[[], Products] = Products,
) -> tuple[Tensor, Tensor]:
    """Return (linear(rms_norm(x + residual)), x + residual); save only the sum for backward.

    Args: x, residual: (..., in); norm_weight: (in); weight: (out, in); bias: (out); products: makes
        what computes the products of a call; for the other arguments see `rms_norm`. residual=None
        means zero.
    Returns: (..., out) in weight's dtype, and the sum (..., in).
    Raises: ValueError if shapes do not fit, casting_mode is unknown, a tensor is not floating
        point, or bias and weight differ in dtype.
    """
    options = NormOptions(eps, offset, casting_mode)
    _check_norm("norm_linear", x, residual, norm_weight, options)
    weight, bias = _linear_operands("norm_linear", "x", x, x.shape[-1], weight, bias)
    operands = x, residual, norm_weight, weight, bias
    with without_autocast(x):
        return apply(_NormLinear, *operands, options, None, None, None, False, products)


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
    interleaved: bool = False,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    products: Callable[[], Products] = Products,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply `norm_linear` to get packed queries, keys and values, then rotate them in place.

    Args: x: (batch, seq, in); weight: packed, ((heads + 2 kv heads) * head_dim, in); for the other
        arguments see `norm_linear` and `rope`.
    Returns: q (batch, seq, heads, head_dim), k, v (batch, seq, kv heads, head_dim), and the sum
        x + residual. cos and sin get no gradient.
    Raises: ValueError as `norm_linear` and `rope`.
    """
    options = NormOptions(eps, offset, casting_mode)
    _check_norm("norm_qkv_rope", x, residual, norm_weight, options)
    weight, bias = _linear_operands("norm_qkv_rope", "x", x, x.shape[-1], weight, bias)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    heads = check_rope("norm_qkv_rope", shape, cos, sin, num_heads, num_kv_heads)
    operands, rope = (x, residual, norm_weight, weight, bias), (cos, sin, heads, interleaved)
    with without_autocast(x):
        return apply(_NormLinear, *operands, options, *rope, products)


class _GLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        consume: bool,
        products: Callable[[], Products],
    ) -> Tensor:
        ctx.ops = select("glu", gate_up)
        ctx.products, ctx.weight_dtype = products(), weight.dtype
        ctx.activation, ctx.consume = activation, consume
        ctx.taker = getattr(gate_up, "_taker", None)
        amax = direct = kept = None
        if gate_up.dtype == weight.dtype:  # a rounding to another dtype would change the amax
            amax, direct = ctx.products.target(gate_up)
            kept = ctx.products.new_kept(gate_up) if ctx.needs_input_grad[0] else None
        keeps_y = ctx.needs_input_grad[1] and not ctx.needs_input_grad[0]
        direct = None if keeps_y else direct
        y = ctx.ops.glu_forward(gate_up, activation, amax, direct, kept)
        y = y if direct else y.to(weight.dtype)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(*(kept or (gate_up, None)), weight, None)
        else:
            ctx.save_for_backward(None, None, None, y if keeps_y else None)
        return ctx.products.output(y, weight, bias, amax)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("glu_linear")
        gate_up, scale, weight, y = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        grad_gate_up = None
        with without_autocast(grad_output):
            operand = ctx.products.grad_operand(grad_output, needs_grad[0], needs_grad[1])
            if needs_grad[0]:
                grad_y = ctx.products.grad_x(operand, weight, grad_output.shape)
                amax = ctx.products.new_grad_amax(gate_up)
                turned = ctx.products.new_turned(grad_y) if needs_grad[1] else None
                recomputes = needs_grad[1] and turned is None
                taker = None if turned is None else ctx.taker
                grad_gate_up, y = glu_backward(
                    ctx, gate_up, grad_y, recomputes, amax, turned, taker, scale
                )
                y = turned if y is None else y
                ctx.products.hand_over(grad_gate_up, amax)
                del grad_y
            grad_weight, grad_bias = _linear_backward(
                ctx, grad_output, operand, y, needs_grad[1], needs_grad[2]
            )
        return grad_gate_up, grad_weight, grad_bias, None, None, None


def glu_linear(
    gate_up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    consume: bool = False,
    products: Callable[[], Products] = Products,
) -> Tensor:
    """Return linear(glu(gate_up, activation)); save only gate_up for backward.

    The products may ask for gate_up in float8, which rounds it. If gate_up needs no gradient, it
    saves the activation's output instead, which is half as large.

    Args: gate_up: (..., 2 * intermediate); weight: (out, intermediate); bias: (out); activation,
        consume: as in `glu`; products: as in `norm_linear`.
    Returns: (..., out) in weight's dtype.
    Raises: ValueError as `glu`, or if shapes do not fit, weight is not floating point, or bias and
        weight differ in dtype.
    """
    check_glu("glu_linear", gate_up, activation)
    width = gate_up.shape[-1] // 2
    weight, bias = _linear_operands("glu_linear", "gate_up", gate_up, width, weight, bias)
    with without_autocast(gate_up):
        return apply(_GLULinear, gate_up, weight, bias, activation, consume, products)


class _GateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        norm_weight: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        eps: float,
        products: Callable[[], Products],
    ) -> Tensor:
        ctx.ops, ctx.options = select("output_gate", x), (activation, eps)
        ctx.products, ctx.weight_dtype = products(), weight.dtype
        y = ctx.ops.output_gate_forward(x, gate, norm_weight, activation, eps)
        y = y.flatten(-2).to(weight.dtype)
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(x, gate, norm_weight, weight, None)
        else:
            ctx.save_for_backward(*[None] * 4, y if ctx.needs_input_grad[3] else None)
        return ctx.products.output(y, weight, bias)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("gate_linear")
        *inputs, weight, y = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        grads: tuple[Tensor | None, ...] = (None,) * 3
        with without_autocast(grad_output):
            operand = ctx.products.grad_operand(grad_output, any(needs_grad[:3]), needs_grad[3])
            if any(needs_grad[:3]):
                grad_y = ctx.products.grad_x(operand, weight, grad_output.shape)
                grad_y = grad_y.view(inputs[0].shape)
                *grads, y = ctx.ops.output_gate_backward(
                    grad_y, *inputs, *ctx.options, needs_grad[3]
                )
                y = None if y is None else y.flatten(-2)
                del grad_y
            grads_of_linear = _linear_backward(
                ctx, grad_output, operand, y, needs_grad[3], needs_grad[4]
            )
        return *grads, *grads_of_linear, None, None, None


def gate_linear(
    x: Tensor,
    gate: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "sigmoid",
    eps: float = 1e-6,
    *,
    products: Callable[[], Products] = Products,
) -> Tensor:
    """Return linear(output_gate(x, gate, norm_weight)); save only x and gate for backward.

    Args: weight: (out, heads * head_dim); bias: (out); products: as in `norm_linear`; for the other
        arguments see `output_gate`.
    Returns: (batch, seq, out) in weight's dtype.
    Raises: ValueError as `output_gate`, or if shapes do not fit, weight is not floating point, or
        bias and weight differ in dtype.
    """
    check_output_gate("gate_linear", x, gate, norm_weight, activation, "norm_weight")
    width = x.shape[-2] * x.shape[-1]
    weight, bias = _linear_operands("gate_linear", "x", x, width, weight, bias)
    with without_autocast(x):
        return apply(_GateLinear, x, gate, norm_weight, weight, bias, activation, eps, products)  # type: ignore[no-any-return]
