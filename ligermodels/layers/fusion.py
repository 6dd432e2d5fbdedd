"""When a layer may fuse across modules, and how a norm reaches the projection that follows it."""

from typing import NamedTuple, TypeGuard, TypeVar

from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.layers.norm import LayerNorm, RMSNorm, RMSNormOptions

Kind = TypeVar("Kind", bound=nn.Module)


def is_plain(module: nn.Module | None, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether calling `module` does exactly what `kind` does, so that its weight may be used alone.

    It is False for a subclass or wrapper (LoRA, float8), for a module with hooks or with a
    `forward` of the instance's own (accelerate), and for a weight that is a DTensor or another
    tensor subclass (tensor parallelism, `fully_shard` on the module itself). The layer then calls
    the module.
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and type(module.weight) in (nn.Parameter, Tensor)
    )


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether a tensor is a DTensor, of which this rank may hold a part only."""
    return hasattr(tensor, "full_tensor")


class PendingNorm(NamedTuple):
    """An RMSNorm of x + residual that is still to be computed, so that a projection may fuse it.

    It holds tensors and numbers and no module: tools that move a module's arguments to another
    device (accelerate) or cast them (FSDP2) then handle it like any other arguments.
    """

    x: Tensor  # (..., hidden)
    residual: Tensor | None  # (..., hidden), or None for zero
    weight: Tensor  # (hidden)
    options: RMSNormOptions

    def apply(self) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        x, residual, weight, options = self
        if residual is None:
            return kernels.rms_norm(x, weight, **options), x
        return kernels.add_rms_norm(x, residual, weight, **options)


class AppliedNorm(NamedTuple):
    """A norm's output and the sum that it normalised, where the norm had to be called."""

    output: Tensor  # (..., hidden)
    total: Tensor  # (..., hidden)

    def apply(self) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return self.output, self.total


PreNormed = PendingNorm | AppliedNorm
"""What `pre_norm` returns and `Attention` and `GatedMLP` take in place of a tensor."""


def pre_norm(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> PreNormed:
    """norm(x + residual) on its way into a sub-layer, which then also returns the sum.

    A plain `RMSNorm` is left to the sub-layer, whose first projection fuses it. Any other norm is
    called here; the norms of `ligermodels.layers` add the residual themselves.

    Args: norm, any module from (..., hidden) to (..., hidden); x, residual (..., hidden).
    """
    if is_plain(norm, RMSNorm):
        return PendingNorm(x, residual, norm.weight, norm.options)
    if residual is None:
        return AppliedNorm(norm(x), x)
    if isinstance(norm, (RMSNorm, LayerNorm)):
        return AppliedNorm(*norm(x, residual))
    total = x + residual
    return AppliedNorm(norm(total), total)


def pre_norm_names(block: nn.Module) -> tuple[str, str]:
    """Attributes of a block's norms before attention and before the MLP, as HF names them.

    `post_attention_layernorm` stands before the MLP, unless the block has norms named for the
    feed-forward: then it stands behind attention.
    """
    sandwich = any(hasattr(block, f"{side}_feedforward_layernorm") for side in ("pre", "post"))
    return "input_layernorm", (
        "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    )


def norm_then_linear(x: Tensor | PreNormed, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return (linear(x), None), or for a norm (linear(norm(x + residual)), x + residual).

    A pending norm and a plain `nn.Linear` are one fused op, which does not keep the norm's output.
    """
    if isinstance(x, Tensor):
        return linear(x), None
    if isinstance(x, PendingNorm) and is_plain(linear, nn.Linear):
        return kernels.norm_linear(
            x.x, x.residual, x.weight, linear.weight, linear.bias, **x.options
        )
    y, total = x.apply()
    return linear(y), total
