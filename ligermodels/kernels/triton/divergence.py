"""The divergence of rows of logits: two passes over both, and one more for most gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, keywords, launch
from ligermodels.kernels.loss_options import DivergenceOptions

DIVERGENCE = Launches(
    nvidia=((4096, Launch(1024, 4)), (None, Launch(2048, 8, pieces=2))),
    amd=((4096, Launch(1024, 4)), (None, Launch(2048, 8))),
)

FORWARD_KL: tl.constexpr = tl.constexpr(0)
REVERSE_KL: tl.constexpr = tl.constexpr(1)
JSD: tl.constexpr = tl.constexpr(2)
TOTAL_VARIATION: tl.constexpr = tl.constexpr(3)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-1e30)
ULP: tl.constexpr = tl.constexpr(2.0**-23)
TINY: tl.constexpr = tl.constexpr(1e-37)  # keeps the logarithm of a sum of probabilities finite
MIN_LOG: tl.constexpr = tl.constexpr(-200.0)  # 2 to the power of it is 0 in float32


@triton.jit
def _inputs(student_ptr, teacher_ptr, at, mask, inner, teacher_inner, EVICT: tl.constexpr):
    """Load a tile of both rows: the logits, or with a softcap their tanh; -inf outside the row.

    inner is 2 log2(e) * logit_scale / softcap, or None, and tanh(x) = 1 - 2 / (1 + e^2x).
    """
    infinity = float("inf")
    x = tl.load(student_ptr + at, mask=mask, other=-infinity, eviction_policy=EVICT).to(tl.float32)
    y = tl.load(teacher_ptr + at, mask=mask, other=-infinity, eviction_policy=EVICT).to(tl.float32)
    if inner is not None and teacher_inner is not None:
        # One reciprocal serves both: 1 / e = f / (e f). At 2^60 the tanh is 1, and e f is finite.
        e = 1.0 + tl.exp2(tl.minimum(x * inner, 60.0, propagate_nan=tl.PropagateNan.ALL))
        f = 1.0 + tl.exp2(tl.minimum(y * teacher_inner, 60.0, propagate_nan=tl.PropagateNan.ALL))
        root = tl.rsqrt(e * f)
        both = -2.0 * root * root  # cheaper than a division
        x = tl.where(mask, 1.0 + both * f, -infinity)
        y = tl.where(mask, 1.0 + both * e, -infinity)
    elif inner is not None:
        x = tl.where(mask, 1.0 - 2.0 / (1.0 + tl.exp2(x * inner)), -infinity)
    elif teacher_inner is not None:
        y = tl.where(mask, 1.0 - 2.0 / (1.0 + tl.exp2(y * teacher_inner)), -infinity)
    return x, y


@triton.jit
def _log2(x):
    """Return log2(x) of a positive normal number, in a third of the instructions of tl.log2.

    As an integer, the bits of x are about 2^23 (127 + log2(x)), which gives a guess of log2(x) with
    an error of at most 0.043. The rest is log2(1 + d), d = x / 2^guess - 1, and its series to the
    fourth power has an error below 1e-8.
    """
    guess = x.to(tl.int32, bitcast=True).to(tl.float32) * ULP - 126.957
    d = x * tl.exp2(-guess) - 1.0
    series = 1.0 + d * (-0.5 + d * (0.3333333333333333 - d * 0.25))
    return guess + d * LOG2_E * series


@triton.jit
def _fold(x, highest, total, unit_2):
    """Add a tile to the highest x and the sum of 2^(unit_2 (x - highest)) of each lane."""
    new = tl.maximum(highest, tl.max(x, 0, keep_dims=True))
    total = total * tl.exp2((highest - new) * unit_2)
    total += tl.sum(tl.exp2((x - new) * unit_2), 0, keep_dims=True)
    return new, total


@triton.jit
def divergence_kernel(
    student_ptr,
    student_stride,
    teacher_ptr,
    teacher_stride,
    valid_ptr,
    row_scale_ptr,
    row_scale_stride,
    loss_ptr,
    grad_ptr,
    grad_stride,
    columns,
    beta,
    softcap,
    logit_scale,
    teacher_softcap,
    teacher_scale,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program computes the divergence of one row and, given grad_ptr, its gradient.

    valid_ptr is None if all rows count. Logarithms have base 2 until the end. The divergence needs
    both logsumexps. Its gradient needs the mean slope under the student's probabilities, except
    that of KL(teacher || student), which the second pass writes.
    """
    # torch.compile passes Python floats as float64.
    beta = tl.cast(beta, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    logit_scale = tl.cast(logit_scale, tl.float32)
    teacher_softcap = tl.cast(teacher_softcap, tl.float32)
    teacher_scale = tl.cast(teacher_scale, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    if grad_ptr is not None:
        grad_ptr += row * grad_stride
    column = tl.arange(0, PIECES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if valid_ptr is not None:
        if tl.load(valid_ptr + row) == 0:
            tl.store(loss_ptr + row, 0.0)
            if grad_ptr is not None:
                zeros = tl.zeros((PIECES, BLOCK), grad_ptr.dtype.element_ty)
                for start in range(0, columns, PIECES * BLOCK):
                    tl.store(grad_ptr + start + column, zeros, mask=start + column < columns)
            return

    inner = 2.0 * LOG2_E * logit_scale / softcap if HAS_SOFTCAP else None
    unit = softcap if HAS_SOFTCAP else logit_scale
    teacher_inner = 2.0 * LOG2_E * teacher_scale / teacher_softcap if HAS_TEACHER_SOFTCAP else None
    teacher_unit = teacher_softcap if HAS_TEACHER_SOFTCAP else teacher_scale
    unit_2 = unit * LOG2_E
    teacher_unit_2 = teacher_unit * LOG2_E

    # The maxima start at a finite number, because the difference of two infinite ones is NaN.
    highest = tl.full((1, BLOCK), LOWEST, tl.float32)
    total = tl.zeros((1, BLOCK), tl.float32)
    teacher_highest = tl.full((1, BLOCK), LOWEST, tl.float32)
    teacher_total = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, columns, PIECES * BLOCK):
        at = start + column
        mask = at < columns
        x, y = _inputs(student_ptr, teacher_ptr, at, mask, inner, teacher_inner, "evict_last")
        highest, total = _fold(x, highest, total, unit_2)
        teacher_highest, teacher_total = _fold(y, teacher_highest, teacher_total, teacher_unit_2)
    top = tl.max(highest)
    log_sum = tl.log2(tl.sum(total * tl.exp2((highest - top) * unit_2)))
    teacher_top = tl.max(teacher_highest)
    teacher_fall = tl.exp2((teacher_highest - teacher_top) * teacher_unit_2)
    teacher_log_sum = tl.log2(tl.sum(teacher_total * teacher_fall))

    scale = 0.0
    if grad_ptr is not None:
        scale = tl.load(row_scale_ptr + row * row_scale_stride).to(tl.float32) * logit_scale
    sums = tl.zeros((1, BLOCK), tl.float32)
    slopes = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, columns, PIECES * BLOCK):
        at = start + column
        mask = at < columns
        x, y = _inputs(student_ptr, teacher_ptr, at, mask, inner, teacher_inner, "")
        log_p = (x - top) * unit_2 - log_sum
        log_q = (y - teacher_top) * teacher_unit_2 - teacher_log_sum
        p = tl.exp2(log_p)
        q = tl.exp2(log_q)
        # A class of probability 0 adds nothing, also if its logarithm is -infinity.
        if KIND == FORWARD_KL:
            sums += tl.sum(tl.where(q == 0.0, 0.0, q * (log_q - log_p)), 0, keep_dims=True)
        elif KIND == REVERSE_KL:
            sums += tl.sum(tl.where(p == 0.0, 0.0, p * (log_p - log_q)), 0, keep_dims=True)
        elif KIND == JSD:
            log_m = _log2((1.0 - beta) * p + (beta * q + TINY))
            slopes += tl.sum(p * (tl.maximum(log_p, MIN_LOG) - log_m), 0, keep_dims=True)
            sums += tl.sum(q * (tl.maximum(log_q, MIN_LOG) - log_m), 0, keep_dims=True)
        else:
            sums += tl.sum(0.5 * tl.abs(p - q), 0, keep_dims=True)
            sign = tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0))
            slopes += tl.sum(p * sign, 0, keep_dims=True)
        if (KIND == FORWARD_KL) and (grad_ptr is not None):
            grad = (p - q) * scale
            if HAS_SOFTCAP:
                grad *= 1.0 - x * x
            tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=mask)
    loss = tl.sum(sums)
    slope = tl.sum(slopes)
    if KIND == REVERSE_KL:
        slope = loss
    elif KIND == JSD:
        slope *= 1.0 - beta
        loss = beta * loss + slope
    if KIND == TOTAL_VARIATION:
        tl.store(loss_ptr + row, loss)
    else:
        tl.store(loss_ptr + row, loss * LN_2)
        scale *= LN_2

    if (KIND != FORWARD_KL) and (grad_ptr is not None):
        for start in range(0, columns, PIECES * BLOCK):
            at = start + column
            mask = at < columns
            x, y = _inputs(student_ptr, teacher_ptr, at, mask, inner, teacher_inner, "evict_first")
            log_p = (x - top) * unit_2 - log_sum
            log_q = (y - teacher_top) * teacher_unit_2 - teacher_log_sum
            p = tl.exp2(log_p)
            if KIND == REVERSE_KL:
                own = tl.where(p == 0.0, 0.0, log_p - log_q)
            elif KIND == JSD:
                log_m = _log2((1.0 - beta) * p + (beta * tl.exp2(log_q) + TINY))
                own = (1.0 - beta) * (tl.maximum(log_p, MIN_LOG) - log_m)
            else:
                q = tl.exp2(log_q)
                own = tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0))
            grad = p * (own - slope) * scale
            if HAS_SOFTCAP:
                grad *= 1.0 - x * x
            tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=mask)


def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    valid: Tensor | None,
    grad_output: Tensor | None,
    options: DivergenceOptions,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel for `reference.divergence_rows`."""
    if student.stride(-1) != 1:
        student, in_place = student.contiguous(), False
    if teacher.stride(-1) != 1:
        teacher = teacher.contiguous()
    rows, columns = student.shape
    loss = student.new_empty(rows, dtype=torch.float32)
    grad = None
    if grad_output is not None:
        grad = student if in_place else torch.empty_like(student)
    if rows == 0:
        return loss, grad
    beta, softcap, logit_scale, teacher_softcap, teacher_scale = options
    if beta is None:
        kind = TOTAL_VARIATION
    else:
        kind = FORWARD_KL if beta == 0 else REVERSE_KL if beta == 1 else JSD
    setting = launch(DIVERGENCE, columns)
    divergence_kernel[(rows,)](
        student,
        student.stride(0),
        teacher,
        teacher.stride(0),
        valid,
        grad_output,
        0 if grad_output is None or grad_output.numel() == 1 else grad_output.stride(0),
        loss,
        grad,
        0 if grad is None else grad.stride(0),
        columns,
        0.0 if beta is None else float(beta),
        softcap or 1.0,
        logit_scale,
        teacher_softcap or 1.0,
        teacher_scale,
        KIND=kind.value,
        HAS_SOFTCAP=softcap is not None,
        HAS_TEACHER_SOFTCAP=teacher_softcap is not None,
        PIECES=setting.pieces,
        **keywords(setting),
    )
    return loss, grad
