"""Residual add and RMSNorm: one launch in forward, one or two in backward.

The second launch of backward is small and sums the gradient of the weight.
"""

import torch
from torch import Tensor

from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.launch import Launch, Launches, Table
from ligermodels.kernels.triton.norm_tile import (
    AMD_BACKWARD,
    AMD_FORWARD,
    norm_backward,
    norm_forward,
)

FORWARD = Launches(
    nvidia=(
        (768, Launch(0, 2, rows=2)),
        (2048, Launch(0, 2)),
        (4096, Launch(0, 8)),
        (8192, Launch(0, 4)),
        (None, Launch(0, 8)),
    ),
    amd=AMD_FORWARD,
)
_LONGER: Table = (
    (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
    (4096, Launch(0, 8, programs=2, prefetch=True)),
    (8192, Launch(0, 16, prefetch=True)),
    (None, Launch(0, 16, 1, reload=True)),
)
BACKWARD = Launches(
    nvidia=((1024, Launch(0, 4, rows=4, programs=3, prefetch=True)), *_LONGER), amd=AMD_BACKWARD
)
# Configs of the same kernel, if there is also an upstream gradient of the sum.
ADD_BACKWARD = Launches(
    nvidia=((1024, Launch(0, 4, rows=2, programs=4, prefetch=True)), *_LONGER), amd=AMD_BACKWARD
)


def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    options: NormOptions,
    out_dtype: torch.dtype,
    amax: Tensor | None = None,
    limit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for `reference.rms_norm_forward`."""
    y, s, _, rstd = norm_forward(
        FORWARD, x, residual, weight, None, options, False, out_dtype, amax, limit
    )
    return y, s, rstd


def rms_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor,
    rstd: Tensor,
    options: NormOptions,
    needs_weight_grad: bool,
    recompute_y: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the kernels for `reference.rms_norm_backward`."""
    launches = BACKWARD if grad_s is None else ADD_BACKWARD
    dtype = weight.dtype if needs_weight_grad else None
    grad_x, grad_weight, _, y = norm_backward(
        launches, grad_y, grad_s, s, weight, None, rstd, options, dtype, None, recompute_y
    )
    return grad_x, grad_weight, y
