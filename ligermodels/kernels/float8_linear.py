"""A linear whose three products run in float8."""

from typing import Any, Literal, NamedTuple

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
    Float8,
    absolute_maximum,
    float8_cast,
    float8_product,
    formats,
)
from ligermodels.kernels.fused_linear import Products
from ligermodels.kernels.reference.float8_cast import BLOCK, MULTIPLE


class Recipe(NamedTuple):
    """How the operands of the products get their scales.

    x and the weight are in e4m3. e5m2 has a wider range and less precision.
    """

    scales: Literal["tensor", "rows", "blocks"]  # what has a scale of its own
    grad_e5m2: bool = False  # whether gradients are in e5m2 instead of e4m3
    delayed: bool = False  # whether scales come from the step before; see `Scales`


RECIPES = {
    "tensorwise": Recipe("tensor", grad_e5m2=True),
    "delayed": Recipe("tensor", grad_e5m2=True, delayed=True),
    "rowwise": Recipe("rows"),
    "blocks": Recipe("blocks"),
}

# The casts of a weight, straight and transposed, which later calls may take.
Casts = dict[bool, Float8]
X, WEIGHT, GRAD = range(3)  # the operands


class Scales:
    """The scales of one linear's operands x, weight and gradient, from the step before.

    Args: rows: float32 (3, 4): for each operand the scale, which must begin a multiple of 16 bytes,
        the absolute value that fits into float8, and the largest one since, which kernels record.
        known: for each operand whether the scale is known; None means that it was not needed yet.
    """

    def __init__(self, rows: Tensor, known: list[bool | None]) -> None:
        self.rows, self.known = rows, known

    def limit(self, operand: int) -> Tensor | None:
        """Return the limit of an operand (1, 1); None if the scale must come from the operand."""
        if not self.known[operand]:
            self.known[operand] = False
            return None
        return self.rows[operand, 1].view(1, 1)

    def scale(self, operand: int) -> Tensor:
        """Return the scale (1, 1) that belongs to the limit."""
        return self.rows[operand, 0].view(1, 1)

    def seen(self, operand: int) -> Tensor:
        """Return the number (1, 1) that records the largest absolute value."""
        return self.rows[operand, 2].view(1, 1)


class Float8Products(Products):
    """The products of one call of a linear, in float8.

    Each product is a @ b^T of two row-major matrices, which is what Hopper multiplies. So the
    output takes x and the weight straight, the gradient of x takes the weight transposed, and that
    of the weight takes both grad_output and x transposed. A scale by row belongs to a row of these
    operands, since all of it must be outside of the sum.

    Args: recipe: how scales are made; casts: the casts of the weight, which this call may take and
        which it completes; None means that each product makes its own; scales: those of the step
        before, or None if each must come from its operand; keeps_float8: whether the activation
        before the linear keeps its input in float8.
    """

    def __init__(
        self,
        recipe: Recipe,
        casts: Casts | None = None,
        scales: Scales | None = None,
        keeps_float8: bool = False,
    ) -> None:
        self.recipe, self.casts, self.scales = recipe, casts, scales
        self.keeps_float8 = keeps_float8
        self.by_tensor = recipe.scales == "tensor"
        self.e4m3, self.e5m2 = formats()
        self.limit = self._limit(X)
        self.x: Float8 | None = None  # between the cast and the product
        self.taken: tuple[Tensor, ...] | None = None  # see `take`
        # With one scale for a tensor, the transposed casts of backward need not find it again.
        self.x_amax: Tensor | None = None
        self.x_scale: Tensor | None = None
        self.weight_amax: Tensor | None = None

    def _limit(self, operand: int) -> Tensor | None:
        return None if self.scales is None else self.scales.limit(operand)

    def _seen(self, operand: int) -> Tensor | None:
        return None if self.scales is None else self.scales.seen(operand)

    def target(self, x: Tensor) -> tuple[Tensor | None, tuple[torch.dtype, Tensor] | None]:
        if self.limit is None:
            return self.new_grad_amax(x), None
        return self._seen(X), (self.e4m3, self.limit)

    def new_kept(self, gate_up: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.keeps_float8:
            return None
        rows, blocks = gate_up.shape[:-1].numel(), -(-gate_up.shape[-1] // (2 * BLOCK))
        scale = gate_up.new_empty(2 * blocks, rows, dtype=torch.float32)
        return gate_up.new_empty(gate_up.shape, dtype=self.e4m3), scale

    def new_grad_amax(self, grad: Tensor) -> Tensor | None:
        if not self.by_tensor or self.limit is not None:
            return None
        return grad.new_zeros(1, 1, dtype=torch.float32)

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
        if x.dtype == self.e4m3:  # see `target`
            assert self.scales is not None
            self.x_amax, self.x_scale = self.limit, self.scales.scale(X)
            return Float8(rows, self.x_scale), None
        if self.by_tensor:
            amax = self.limit if self.limit is not None else amax
            self.x_amax = amax = absolute_maximum(rows) if amax is None else amax
        straight, turned = self._cast(rows, amax, self.e4m3, seen=self._seen(X), transposed=keeps_x)
        assert straight is not None
        if self.by_tensor:
            self.x_scale = straight.scale
        return straight, turned

    def _cast(
        self, x: Tensor, amax: Tensor | None, dtype: torch.dtype, **options: Any
    ) -> tuple[Float8 | None, Float8 | None]:
        """Return what `float8_cast` does with this recipe's scales; amax is that of a tensor."""
        if self.recipe.scales != "rows":
            return float8_cast(x, amax, dtype, **options)
        # A scale must be outside of the sum, so the two orientations have other ones.
        straight, turned = options.pop("straight", True), options.pop("transposed", False)
        by_row = float8_cast(x, absolute_maximum(x, "rows"), dtype)[0] if straight else None
        if not turned:
            return by_row, None
        amax = absolute_maximum(x, "columns")
        return by_row, float8_cast(x, amax, dtype, straight=False, transposed=True)[1]

    def product(self, x: Float8, weight: Tensor, bias: Tensor | None, shape: torch.Size) -> Tensor:
        """Return the output for an x of this shape."""
        out = float8_product(x, self.cast_weight(weight, False), weight.dtype, bias, fast=True)
        out = out[: shape[:-1].numel()]  # blocks fill the rows up
        # LoRA adds to the output in place, which autograd forbids for a view.
        return torch.ops.aten._unsafe_view(out, (*shape[:-1], weight.shape[0]))  # type: ignore[no-any-return]

    def new_turned(self, grad_x: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.x_amax is None or grad_x.numel() == 0 or grad_x.element_size() > 2:
            return None
        width = grad_x.shape[-1]
        rows = -(-(grad_x.numel() // width) // MULTIPLE) * MULTIPLE
        return grad_x.new_empty((width, rows), dtype=self.e4m3), self.x_amax

    def offer(self, output: Tensor) -> None:
        if self.scales is not None:
            vars(output)["_taker"] = self

    def new_grad_operand(self, output: Tensor) -> tuple[Tensor, ...] | None:
        limit, seen = self._limit(GRAD), self._seen(GRAD)
        if limit is None or seen is None:
            return None
        width, dtype = output.shape[-1], self._grad_dtype()
        rows = output.numel() // width
        straight = output.new_empty((rows, width), dtype=dtype)
        padded = -(-rows // MULTIPLE) * MULTIPLE
        return straight, output.new_empty((width, padded), dtype=dtype), limit, seen

    def take(self, grad: Tensor, operand: tuple[Tensor, ...]) -> None:
        self.taken = operand
        vars(grad)["_stands_for"] = operand, grad._version

    def hand_over(self, grad: Tensor, amax: Tensor | None) -> None:
        # The attribute stays on the tensor in autograd. A sum of gradients is another tensor, and
        # a hook that writes to this one changes its version.
        vars(grad)["_amax"] = amax, grad._version

    def grad_operand(self, grad_output: Tensor, needs_x: bool, needs_weight: bool) -> Any:
        """Return grad_output straight and transposed, where the gradients need it.

        `grad_x` takes the first one away, so that its memory is free for the next product.
        """
        if self.taken is not None:
            assert self.scales is not None
            (straight, turned, *_), version = vars(grad_output)["_stands_for"]
            assert straight is self.taken[0] and version == grad_output._version
            self.taken, scale = None, self.scales.scale(GRAD)
            return [Float8(straight, scale), Float8(turned, scale)]
        rows, dtype = grad_output.reshape(-1, grad_output.shape[-1]), self._grad_dtype()
        wanted = {"straight": needs_x, "transposed": needs_weight}
        amax = None
        if self.by_tensor:
            amax, version = getattr(grad_output, "_amax", (None, 0))
            if (limit := self._limit(GRAD)) is not None:
                amax = limit
            elif amax is None or version != grad_output._version:
                amax = absolute_maximum(rows)
        return [*self._cast(rows, amax, dtype, seen=self._seen(GRAD), **wanted)]

    def _grad_dtype(self) -> torch.dtype:
        return self.e5m2 if self.recipe.grad_e5m2 else self.e4m3

    def grad_x(self, operand: Any, weight: Tensor, shape: torch.Size) -> Tensor:
        straight, operand[0] = operand[0], None
        grad = float8_product(straight, self.cast_weight(weight, True), weight.dtype, fast=True)
        return grad[: shape[:-1].numel()].view(*shape[:-1], weight.shape[1])

    def grad_weight(self, operand: Any, x: Any, dtype: torch.dtype) -> Tensor:
        if isinstance(x, Tensor):
            x = self._turned_x(x.reshape(-1, x.shape[-1]))
        elif not isinstance(x, Float8):  # what `new_turned` returned
            assert self.x_scale is not None
            x = Float8(x[0], self.x_scale)
        return float8_product(operand[1], x, dtype)

    def _turned_x(self, rows: Tensor) -> Float8:
        made = self._cast(rows, self.x_amax, self.e4m3, straight=False, transposed=True)
        turned = made[1]
        assert turned is not None
        return turned

    def cast_weight(self, weight: Tensor, transposed: bool) -> Float8:
        """Return the weight in float8, or its transpose."""
        casts = {} if self.casts is None else self.casts
        if transposed not in casts:
            wanted = {"straight": not transposed, "transposed": transposed}
            if self.by_tensor and self.weight_amax is None:
                limit = self._limit(WEIGHT)
                self.weight_amax = absolute_maximum(weight) if limit is None else limit
            seen = None if transposed else self._seen(WEIGHT)
            square = self.recipe.scales == "blocks"
            options: dict[str, Any] = {"square": square, "seen": seen, **wanted}
            found = self._cast(weight, self.weight_amax, self.e4m3, **options)[transposed]
            assert found is not None
            casts[transposed] = found
        return casts[transposed]


class _Float8Linear(torch.autograd.Function):
    """Cast x, save what backward needs, and return a tensor of the output's shape without memory.

    The product is an op of its own, which saves nothing. So a block that runs again for backward
    stops before its last product.
    """

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
        products.x, turned = products.cast_x(x, keeps_x=needs_weight and not keeps_input)
        kept = x if needs_weight and keeps_input else None
        ctx.save_for_backward(weight if needs_x else None, kept, *(turned or (None, None)))
        return x.new_empty(1, dtype=weight.dtype).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("float8_linear")
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        weight, x, values, scale = ctx.saved_tensors  # it may run a block again, with autocast
        with without_autocast(grad_output):
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


class _Product(torch.autograd.Function):
    """Compute the output; its gradient goes to `_Float8Linear` as it is."""

    @staticmethod
    def forward(
        ctx: Any, empty: Tensor, weight: Tensor, bias: Tensor | None, products: Float8Products
    ) -> Tensor:
        x, products.x = products.x, None
        assert x is not None
        return products.product(x, weight, bias, empty.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None, None, None


def float8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe = RECIPES["tensorwise"],
    *,
    casts: Casts | None = None,
    scales: Scales | None = None,
    keeps_input: bool = False,
) -> Tensor:
    """Return linear(x, weight, bias), whose products take float8 operands.

    For the gradient of the weight it saves x in float8.

    Args: x: (..., in); weight: (out, in), both multiples of 16; bias: (out); casts, scales: see
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
        products = Float8Products(recipe, casts, scales)
        empty = _Float8Linear.apply(x, weight, bias, products, keeps_input)
        bias = None if bias is None else bias.detach()
        return _Product.apply(empty, weight.detach(), bias, products)
