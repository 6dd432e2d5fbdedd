"""Fusion of a norm with the projection after it, and the rules for when a layer may fuse."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ligermodels import kernels
from ligermodels.kernels.dispatch import autocast_dtype, cast, real_device
from ligermodels.kernels.fused_linear import Products
from ligermodels.layers.norm import LayerNorm, RMSNorm

Kind = TypeVar("Kind", bound=nn.Module)


def is_plain(module: nn.Module | None, kind: type[Kind]) -> TypeGuard[Kind]:
    """Return whether `module` behaves exactly like `kind`, so that a fused op may take its weight.

    It is False for a subclass or wrapper (LoRA, float8), for a module with hooks, for every module
    while hooks of all modules are registered (`register_module_forward_hook`), and for an instance
    whose `forward` was replaced (accelerate). It is also False if the weight is a DTensor
    or another tensor subclass (tensor parallelism, `fully_shard` on the module itself). If it is
    False, the layer calls the module.
    """
    weight = getattr(module, "weight", None)
    return has_plain_call(module, kind) and type(weight) in (nn.Parameter, Tensor)


def has_plain_call(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Return whether a call of `module` computes the forward of `kind` and nothing else."""
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and not torch_module._has_any_global_hook()
    )


def fusion_pays(x: Tensor) -> bool:
    """Return whether fused ops save memory for backward, or launches on a GPU."""
    on_cpu = x.is_cpu or real_device(x.device).type == "cpu"
    return torch.is_grad_enabled() or not on_cpu


class FusableLinear(nn.Linear):
    """A linear that computes its products in its own way, also inside of a fused op.

    A subclass is one of this library's own; what others put in a linear's place is called.
    """

    def products(self) -> Callable[[], Products] | None:
        """Return what makes the products of a call; None lets the layer call this module."""
        raise NotImplementedError


def products_of(linear: nn.Module) -> Callable[[], Products] | None:
    """Return what computes the products of a linear in a fused op.

    None means that no fused op may take its weight, so that the layer calls the module.
    """
    if is_plain(linear, nn.Linear):
        return Products
    if isinstance(linear, FusableLinear) and is_plain(linear, type(linear)):
        return linear.products()
    return None


def is_sharded(tensor: Tensor | None) -> bool:
    """Return whether a tensor is a DTensor, so that this rank may hold only a shard of it."""
    return hasattr(tensor, "full_tensor")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's values of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


class PendingNorm(NamedTuple):
    """An RMSNorm of x + residual that is not computed yet, so that a projection can fuse it.

    It holds tensors and numbers, not modules. Tools that move a module's arguments to another
    device (accelerate) or cast them (FSDP2) can therefore process it like other arguments.
    """

    x: Tensor  # (..., hidden)
    residual: Tensor | None  # (..., hidden); None means zero
    weight: Tensor  # (hidden)
    options: dict[str, Any]  # of `RMSNorm`

    def apply(self) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        y, total = kernels.add_rms_norm(self.x, self.residual, self.weight, **self.options)
        return _as_operand(y), total

    def of_the_sum(self) -> "PendingNorm":
        """Return the same norm with x + residual as its x, computed now."""
        x = self.x if self.residual is None else self.x + self.residual
        return self._replace(x=x, residual=None)


class AppliedNorm(NamedTuple):
    """The result of a norm that could not be fused: its output and the sum that it normalised."""

    output: Tensor  # (..., hidden)
    total: Tensor  # (..., hidden)

    def apply(self) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return self.output, self.total


PreNormed = PendingNorm | AppliedNorm
"""The type that `pre_norm` returns. `Attention` and `GatedMLP` take it instead of a tensor."""


def _as_operand(y: Tensor) -> Tensor:
    """Cast a norm's output to the dtype in which autocast computes the products with it.

    The norms of this library return the dtype of x. If autograd added the gradients of several
    products in that dtype, they would depend on whether a memory plan has added the residual, which
    may have another dtype, to x before.
    """
    if y.is_cpu and not torch.is_autocast_enabled("cpu"):
        return y  # on a short way
    dtype = autocast_dtype(y)
    return y if dtype is None else cast(y, dtype)


def pre_norm(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> PreNormed:
    """Return norm(x + residual) as input of a sub-layer, which then also returns x + residual.

    A plain `RMSNorm` is not computed here if fusion pays: the sub-layer fuses it into its first
    projection. Any other norm is called here. The norms of `ligermodels.layers` add the residual
    themselves; for other norms this function adds it.

    Args: norm: any module from (..., hidden) to (..., hidden); x, residual: (..., hidden).
    Returns: what a sub-layer takes. The output of its `apply` has the dtype of autocast, if that is
        enabled, else the dtype that the norm returns.
    """
    if fusion_pays(x) and is_plain(norm, RMSNorm):
        return PendingNorm(x, residual, norm.weight, norm.options)
    if residual is not None and isinstance(norm, (RMSNorm, LayerNorm)):
        y, total = norm(x, residual)
    else:
        total = x if residual is None else x + residual
        y = norm(total)
    return AppliedNorm(_as_operand(y), total)


def pre_norm_names(block: nn.Module) -> tuple[str, str]:
    """Return the attribute names of a block's norms before attention and before the MLP.

    They are HF's names. `post_attention_layernorm` is the norm before the MLP. But if the block
    also has a pre- or post_feedforward_layernorm, it is the norm after attention.
    """
    sandwich = any(hasattr(block, f"{side}_feedforward_layernorm") for side in ("pre", "post"))
    return "input_layernorm", (
        "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    )


def norm_then_linear(x: Tensor | PreNormed, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return (linear(x), None), or for a norm (linear(norm(x + residual)), x + residual).

    A pending norm and a linear that may be fused run as one op, which does not save the norm's
    output for backward.
    """
    if isinstance(x, Tensor):
        return linear(x), None
    if isinstance(x, PendingNorm) and (products := products_of(linear)) is not None:
        weights: Any = x.weight, linear.weight, linear.bias
        return kernels.norm_linear(x.x, x.residual, *weights, products=products, **x.options)
    y, total = x.apply()
    return linear(y), total


def gate_then_linear(
    x: Tensor,
    gate: Tensor,
    norm_weight: Tensor | None,
    linear: nn.Module,
    activation: str,
    eps: float = 1e-6,
) -> Tensor:
    """Return linear(output_gate(x, gate, norm_weight)), as one op if the linear may be fused."""
    products = products_of(linear) if fusion_pays(x) else None
    if products is None or not x.numel():
        y = kernels.output_gate(x, gate, norm_weight, activation, eps).flatten(-2)
        return linear(y)  # type: ignore[no-any-return]
    rest: Any = norm_weight, linear.weight, linear.bias, activation, eps
    return kernels.gate_linear(x, gate, *rest, products=products)
