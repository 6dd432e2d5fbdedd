"""AdamW's update of one parameter."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch

ADAMW = Launches(nvidia=Launch(1024, 4), amd=Launch(2048, 4))


@triton.jit
def _correction(log_beta, step):
    """Return 1 - beta^step, of which 1 - exp would keep few significant bits near 0."""
    x = log_beta * step
    series = 1.0
    for n in tl.static_range(9, 1, -1):  # of expm1
        series = 1 + series * (x / n)
    return tl.where(x > -0.7, -x * series, 1 - tl.exp(x))


@triton.jit
def adamw_kernel(
    param_ptr,
    grad_ptr,
    mean_ptr,
    square_ptr,
    step_ptr,
    size,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    log_beta1,
    log_beta2,
    eps,
    decay,
    BLOCK: tl.constexpr,
):
    """Each program handles a block. step has the number of the updates before this one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    param = tl.load(param_ptr + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + at, mask=mask, other=0.0).to(tl.float32)
    square = tl.load(square_ptr + at, mask=mask, other=0.0).to(tl.float32)
    step = tl.load(step_ptr) + 1
    mean = beta1 * mean + rest1 * grad
    square = beta2 * square + rest2 * grad * grad
    root = tl.sqrt(square / _correction(log_beta2, step)) + eps
    param = param * (1 - lr * decay) - lr / _correction(log_beta1, step) * mean / root
    tl.store(param_ptr + at, param.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + at, mean.to(mean_ptr.dtype.element_ty), mask=mask)
    tl.store(square_ptr + at, square.to(square_ptr.dtype.element_ty), mask=mask)


def adamw(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """Update a parameter and its moments in place; step counts the updates before this one."""
    setting = launch(ADAMW, param.numel())
    adamw_kernel[(cdiv(param.numel(), setting.block),)](
        param,
        grad,
        mean,
        square,
        step,
        param.numel(),
        lr,
        *betas,
        *(1 - beta for beta in betas),
        *(math.log(max(beta, 1e-30)) for beta in betas),
        eps,
        decay,
        **keywords(setting),
    )
