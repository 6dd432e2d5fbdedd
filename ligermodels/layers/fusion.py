"""When a layer may fuse across a module, and the fused calls themselves."""

from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.layers.norm import RMSNorm


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling `module` does just what `kind` does, so that its weight may be used alone.

    False for a subclass or wrapper (LoRA, float8), a module with hooks or with a `forward` of the
    instance's own (accelerate), and a weight that is a DTensor or another tensor subclass (tensor
    parallelism, `fully_shard` on the module itself): then the layer calls the module.
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


def norm_then_linear(
    x: Tensor, residual: Tensor | None, norm: RMSNorm, linear: nn.Module
) -> tuple[Tensor, Tensor]:
    """Return (linear(norm(x + residual)), x + residual), fused while both modules are plain."""
    if is_plain(norm, RMSNorm) and is_plain(linear, nn.Linear):
        return kernels.norm_linear(
            x,
            residual,
            norm.weight,
            linear.weight,  # type: ignore[arg-type]
            linear.bias,  # type: ignore[arg-type]
            eps=norm.eps,
            offset=norm.offset,
            casting_mode=norm.casting_mode,
        )
    if residual is None:
        return linear(norm(x)), x
    y, residual = norm(x, residual)
    return linear(y), residual


def normalized(x: Tensor, residual: Tensor | None, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual); without a norm, the sum twice."""
    if norm is None:
        total = x if residual is None else x + residual
        return total, total
    return (norm(x), x) if residual is None else norm(x, residual)
