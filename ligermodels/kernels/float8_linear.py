"""A linear whose three products run in float8."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.kernels.checks import check_linear_bias, check_linear_weight
from ligermodels.kernels.dispatch import (
    autocast_dtype,
    cast,
    cast_operands,
    refuse_double_backward,
    without_autocast,
)
from ligermodels.kernels.float8_cast import (
    Axis,
    Float8,
    absolute_maximum,
    float8_cast,
    float8_product,
    formats,
)
from ligermodels.kernels.fused_linear import Products
from ligermodels.kernels.reference.float8_cast import MULTIPLE


class Recipe(NamedTuple):
    """How the operands of the products get their scales.

    x and the weight are in e4m3. e5m2 has a wider range and less precision.
    """

    by_row: bool  # whether each row of an operand has a scale, or the whole tensor
    grad_e5m2: bool  # whether gradients are in e5m2 instead of e4m3


RECIPES = {
    "tensorwise": Recipe(by_row=False, grad_e5m2=True),
    "rowwise": Recipe(by_row=True, grad_e5m2=False),
}

# The casts of a weight, straight and transposed, which later calls may take.
Casts = dict[bool, Float8]


class Float8Products(Products):
    """The products of one call of a linear, in float8.

    Each product is a @ b^T of two row-major matrices, which is what Hopper multiplies. So the
    output takes x and the weight straight, the gradient of x takes the weight transposed, and that
    of the weight takes both grad_output and x transposed. A scale by row belongs to a row of these
    operands, since all of it must be outside of the sum.

    Args: recipe: how scales are made; casts: the casts of the weight, which this call may take and
        which it completes; None means that each product makes its own.
    """

    def __init__(self, recipe: Recipe, casts: Casts | None = None) -> None:
        self.recipe, self.casts = recipe, casts
        self.e4m3, self.e5m2 = formats()
        # With one scale for a tensor, the transposed casts of backward need not find it again.
        self.x_amax: Tensor | None = None
        self.x_scale: Tensor | None = None
        self.weight_amax: Tensor | None = None

    def new_amax(self, x: Tensor) -> Tensor | None:
        return None if self.recipe.by_row else x.new_zeros(1, 1, dtype=torch.float32)

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, amax: Tensor | None = None
    ) -> Tensor:
        straight, _ = self.cast_x(x, amax)
        return self.product(straight, weight, bias, x.shape)

    def cast_x(
        self, x: Tensor, amax: Tensor | None = None, *, keeps_x: bool = False
    ) -> tuple[Float8, Float8 | None]:
        """Return x in float8, and its transpose for `grad_weight` if keeps_x."""
        if x.dtype == torch.float16:
            raise ConfigError(
                "a float8 linear got an input in float16, in which small gradients vanish before "
                "they are scaled; use bfloat16"
            )
        rows = x.reshape(-1, x.shape[-1])
        by_row = self.recipe.by_row
        if amax is None:
            amax = absolute_maximum(rows, "rows" if by_row else "tensor")
        both = keeps_x and not by_row
        straight, turned = float8_cast(rows, amax, self.e4m3, transposed=both)
        assert straight is not None
        if not by_row:
            self.x_amax, self.x_scale = amax, straight.scale
        if keeps_x and turned is None:
            turned = self._turned_x(rows)
        return straight, turned

    def product(self, x: Float8, weight: Tensor, bias: Tensor | None, shape: torch.Size) -> Tensor:
        """Return the output for an x of this shape."""
        out = float8_product(x, self._weight(weight, False), weight.dtype, bias, fast=True)
        # LoRA adds to the output in place, which autograd forbids for a view.
        return torch.ops.aten._unsafe_view(out, (*shape[:-1], weight.shape[0]))  # type: ignore[no-any-return]

    def new_turned(self, grad_x: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.x_amax is None or grad_x.numel() == 0 or grad_x.element_size() > 2:
            return None
        width = grad_x.shape[-1]
        rows = -(-(grad_x.numel() // width) // MULTIPLE) * MULTIPLE
        return grad_x.new_empty((width, rows), dtype=self.e4m3), self.x_amax

    def hand_over(self, grad: Tensor, amax: Tensor | None) -> None:
        # The attribute stays on the tensor in autograd. A sum of gradients is another tensor, and
        # a hook that writes to this one changes its version.
        vars(grad)["_amax"] = amax, grad._version

    def grad_operand(self, grad_output: Tensor, needs_x: bool, needs_weight: bool) -> Any:
        """Return grad_output straight and transposed, where the gradients need it."""
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        dtype = self.e5m2 if self.recipe.grad_e5m2 else self.e4m3
        if not self.recipe.by_row:
            amax, version = getattr(grad_output, "_amax", (None, 0))
            if amax is None or version != grad_output._version:
                amax = absolute_maximum(rows)
            return float8_cast(rows, amax, dtype, straight=needs_x, transposed=needs_weight)
        straight = turned = None
        if needs_x:
            straight, _ = float8_cast(rows, absolute_maximum(rows, "rows"), dtype)
        if needs_weight:
            amax = absolute_maximum(rows, "columns")
            _, turned = float8_cast(rows, amax, dtype, straight=False, transposed=True)
        return straight, turned

    def grad_x(self, operand: Any, weight: Tensor, shape: torch.Size) -> Tensor:
        grad = float8_product(operand[0], self._weight(weight, True), weight.dtype)
        return grad.view(*shape[:-1], weight.shape[1])

    def grad_weight(self, operand: Any, x: Any, dtype: torch.dtype) -> Tensor:
        if isinstance(x, Tensor):
            x = self._turned_x(x.reshape(-1, x.shape[-1]))
        elif not isinstance(x, Float8):  # what `new_turned` returned
            assert self.x_scale is not None
            x = Float8(x[0], self.x_scale)
        return float8_product(operand[1], x, dtype)

    def _turned_x(self, rows: Tensor) -> Float8:
        amax = absolute_maximum(rows, "columns") if self.x_amax is None else self.x_amax
        _, turned = float8_cast(rows, amax, self.e4m3, straight=False, transposed=True)
        assert turned is not None
        return turned

    def _weight(self, weight: Tensor, transposed: bool) -> Float8:
        casts = {} if self.casts is None else self.casts
        if transposed not in casts:
            amax = self.weight_amax
            if amax is None:
                by_row: Axis = "columns" if transposed else "rows"
                amax = absolute_maximum(weight, by_row if self.recipe.by_row else "tensor")
            if not self.recipe.by_row:
                self.weight_amax = amax
            made = float8_cast(
                weight, amax, self.e4m3, straight=not transposed, transposed=transposed
            )
            found = made[transposed]
            assert found is not None
            casts[transposed] = found
        return casts[transposed]


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Float8Products,
        keeps_input: bool,
    ) -> Tensor:
        ctx.products, ctx.dtype, ctx.shape = products, x.dtype, x.shape
        ctx.weight_dtype = weight.dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        straight, turned = products.cast_x(x, keeps_x=needs_weight and not keeps_input)
        kept = x if needs_weight and keeps_input else None
        ctx.save_for_backward(weight if needs_x else None, kept, *(turned or (None, None)))
        return products.product(straight, weight, bias, x.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("float8_linear")
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        with without_autocast(grad_output):
            weight, x, values, scale = ctx.saved_tensors
            if needs_x or needs_weight:
                operand = ctx.products.grad_operand(grad_output, needs_x, needs_weight)
            if needs_x:
                grad_x = cast(ctx.products.grad_x(operand, weight, ctx.shape), ctx.dtype)
            if needs_weight:
                kept = Float8(values, scale) if x is None else x
                grad_weight = ctx.products.grad_weight(operand, kept, ctx.weight_dtype)
            if needs_bias:
                grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0)
        return grad_x, grad_weight, grad_bias, None, None


def float8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe = RECIPES["tensorwise"],
    *,
    casts: Casts | None = None,
    keeps_input: bool = False,
) -> Tensor:
    """Return linear(x, weight, bias), whose products take float8 operands with exact scales.

    For the gradient of the weight it saves x in float8.

    Args: x: (..., in); weight: (out, in), both multiples of 16; bias: (out); casts: see
        `Float8Products`; keeps_input: whether to save x itself instead, which takes no memory if
        another op saves it anyway.
    Returns: (..., out) in weight's dtype or that of autocast.
    Raises: ConfigError (also a ValueError) if x is float16. ValueError if shapes do not fit.
    """
    check_linear_weight("float8_linear", "x", x, x.shape[-1], weight)
    x = cast(x, autocast_dtype(x) or x.dtype)
    weight, bias = cast_operands(x, weight, bias)
    if bias is not None:
        check_linear_bias("float8_linear", weight, bias)
    with without_autocast(x):
        products = Float8Products(recipe, casts)
        return _Float8Linear.apply(x, weight, bias, products, keeps_input)


def float8_products(recipe: Recipe, casts: Casts | None) -> "partial[Float8Products]":
    """Return what makes the products of a call, for the fused ops of `kernels.fused_linear`."""
    return partial(Float8Products, recipe, casts)
