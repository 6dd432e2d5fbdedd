"""Residual add and LayerNorm: one launch in forward, one or two in backward.

The second launch of backward is small and sums the gradients of weight and bias.
"""

import torch
from torch import Tensor

from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.launch import Launch, Launches
from ligermodels.kernels.triton.norm_tile import (
    AMD_BACKWARD,
    AMD_FORWARD,
    norm_backward,
    norm_forward,
)

FORWARD = Launches(
    nvidia=(
        (768, Launch(0, 1, rows=2)),
        (2048, Launch(0, 2)),
        (8192, Launch(0, 4)),
        (None, Launch(0, 8)),
    ),
    amd=AMD_FORWARD,
)
BACKWARD = Launches(
    nvidia=(
        (1024, Launch(0, 4, 1, rows=4, programs=4)),
        (2048, Launch(0, 8, 1, rows=4, programs=2)),
        (4096, Launch(0, 8, programs=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    amd=AMD_BACKWARD,
)
# Configs of the same kernel, if there is also an upstream gradient of the sum.
ADD_BACKWARD = Launches(
    nvidia=(
        (1024, Launch(0, 4, rows=2, programs=4, prefetch=True)),
        (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
        (4096, Launch(0, 16, rows=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    amd=AMD_BACKWARD,
)


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel for `reference.layer_norm_forward`."""
    options = NormOptions(eps, 0.0, "gemma")
    y, s, mean, rstd = norm_forward(FORWARD, x, residual, weight, bias, options, True, x.dtype)
    assert mean is not None
    return y, s, mean, rstd


def layer_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the kernels for `reference.layer_norm_backward`."""
    launches = BACKWARD if grad_s is None else ADD_BACKWARD
    options = NormOptions(0.0, 0.0, "gemma")
    grad_x, grad_weight, grad_bias, _ = norm_backward(
        *(launches, grad_y, grad_s, s, weight, mean, rstd, options),
        *(weight_dtype, bias_dtype, False),
    )
    return grad_x, grad_weight, grad_bias
