"""An `nn.Linear` whose products run in float8."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakIdRef

from ligermodels.float8.delayed import follow_optimizers, waiting
from ligermodels.kernels.dispatch import autocast_is_on
from ligermodels.kernels.float8_linear import (
    RECIPES,
    Casts,
    Float8Products,
    Recipe,
    Scales,
    float8_linear,
)
from ligermodels.kernels.fused_linear import Products
from ligermodels.layers.fusion import FusableLinear, is_sharded
from ligermodels.layers.recompute import Planned

# Without gradients, so few rows are multiplied in the dtype of the weight. Float8 would read and
# write 6 bytes for each weight instead of 2, which takes longer than what the product saves.
FEW = 1024


def _are_few(x: Tensor) -> bool:
    return x.numel() < FEW * x.shape[-1]


class _Inference(Float8Products):
    """The products of a call without gradients."""

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, amax: Tensor | None = None
    ) -> Tensor:
        if _are_few(x):
            return Products.output(self, x, weight, bias)
        return super().output(x, weight, bias, amax)


class Float8Linear(Planned, FusableLinear):
    """A linear with float8 products: the output, the gradient of x, and that of the weight.

    Weight and bias keep their dtype, so the state dict, exports and optimizers see an `nn.Linear`.
    `float8.convert` makes it from one. A call without gradients that has few rows, as in decoding,
    computes what an `nn.Linear` does.

    Attributes:
        recipe: how the operands get their scales.
        input_is_kept: whether another op saves the input of this one for backward anyway. Then this
            one saves it, too, instead of a copy in float8.
    """

    recipe: Recipe = RECIPES["tensorwise"]
    input_is_kept = False
    # With delayed scales an int32 (3, 4): the bits of `Scales.rows`, and counts of overflows. It is
    # a buffer that is not in the state dict, in a dtype that `model.to(dtype)` does not change.
    delayed: Tensor
    keeps_casts = False  # whether this is inside of `float8.weights_cast_once`
    # The weight, its version and address, and its casts.
    _casts: tuple[tuple[WeakIdRef, int, int], Casts] | None = None

    def products(self) -> Callable[[], Float8Products] | None:
        """Return what makes the products of a call; None if torch.compile traces it."""
        if torch.compiler.is_compiling():
            return None
        casts = self._casts_now()
        if casts is None and not torch.is_grad_enabled():
            return partial(_Inference, self.recipe)
        return partial(Float8Products, self.recipe, casts, self._scales_now(), self.keeps_float8)

    @_disable_dynamo  # torch.compiler.disable, which would import the compiler now
    def forward(self, x: Tensor) -> Tensor:
        """Return the output (..., out) for x (..., in)."""
        casts = self._casts_now()
        if casts is None and not torch.is_grad_enabled() and _are_few(x):
            return super().forward(x)
        return float8_linear(
            *(x, self.weight, self.bias, self.recipe),
            casts=casts,
            scales=self._scales_now(),
            keeps_input=self.input_is_kept and not autocast_is_on(x),
        )

    def use(self, recipe: Recipe) -> None:
        """Compute with this recipe from now on."""
        self.recipe = recipe
        if recipe.delayed:
            zeros = torch.zeros(3, 4, dtype=torch.int32, device=self.weight.device)
            self.register_buffer("delayed", zeros, persistent=False)
            self.known_scales: list[bool | None] = [None] * 3

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        on_meta = self.recipe.delayed and self.delayed.is_meta
        super()._apply(fn, recurse)
        if self._casts is not None and self._casts[0][2] != self.weight.data_ptr():
            self._casts = None  # they would stay on the device that the weight has left
        if on_meta:
            self.delayed.zero_()  # `to_empty` gives it no values
        return self

    def know_scales(self, known: list[bool]) -> None:
        """Say of which operands the scales are known."""
        self.known_scales[:] = [new or old for new, old in zip(known, self.known_scales)]

    def _scales_now(self) -> Scales | None:
        """Return the scales from the step before. Outside of training they are not used."""
        if not self.recipe.delayed or not torch.is_grad_enabled():
            return None
        follow_optimizers()
        waiting.add(self)
        return Scales(self.delayed.view(torch.float32), self.known_scales)

    def cast_once(self, enabled: bool) -> None:
        """Keep casts of the weight from now on, or no longer. Those of a frozen one stay."""
        self.keeps_casts = enabled
        if self.weight.requires_grad or is_sharded(self.weight):
            self._casts = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which keeps no casts."""
        return {**self.__dict__, "keeps_casts": False, "_casts": None}

    def _casts_now(self) -> Casts | None:
        weight = self.weight
        if not self.keeps_casts:
            if weight.requires_grad and self._casts is not None:
                self._casts = None  # a fused optimizer may change it
            return None
        now = WeakIdRef(weight), weight._version, weight.data_ptr()
        if self._casts is None or self._casts[0] != now:
            self._casts = now, {}
            if self.recipe.delayed and not weight.requires_grad:
                # A resumed run casts it again, so let no scale of a step before matter.
                exact = Float8Products(self.recipe, self._casts[1])
                exact.cast_weight(weight, False)
                exact.cast_weight(weight, True)
        return self._casts[1]

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        name = next(name for name, recipe in RECIPES.items() if recipe == self.recipe)
        return f"{super().extra_repr()}, float8={name!r}"


def obstacle(linear: torch.nn.Linear, recipe: Recipe = RECIPES["tensorwise"]) -> str | None:
    """Return why the products of a linear cannot run in float8, or None if they can."""
    weight = linear.weight
    if type(weight) not in (torch.nn.Parameter, Tensor):
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return f"its weight is {str(weight.dtype)[6:]}"
    if linear.in_features % 16 or linear.out_features % 16:
        return f"{linear.in_features} to {linear.out_features} are not multiples of 16"
    if recipe.scales == "blocks" and (linear.in_features % 512 or linear.out_features % 512):
        return (
            f"{linear.in_features} to {linear.out_features} are not multiples of 512, the four "
            "blocks that the products read at once"
        )
    return None
