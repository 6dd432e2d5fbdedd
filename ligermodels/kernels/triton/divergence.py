"""The divergence of rows of logits: two passes over both, and one more for most gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, launch
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


@triton.jit
def _capped(logits, inner, mask, HAS_SOFTCAP: tl.constexpr):
    """Return the logits, or with a softcap tanh(logits * inner / (2 log2(e))); -inf outside."""
    x = logits.to(tl.float32)
    if HAS_SOFTCAP:
        x = 1.0 - 2.0 / (1.0 + tl.exp2(x * inner))
        x = tl.where(mask, x, -float("inf"))
    return x


@triton.jit
def _fold(x, highest, total, unit_2):
    """Add a tile to the highest x and the sum of 2^(unit_2 (x - highest)) of each lane."""
    new = tl.maximum(highest, tl.max(x, 0, keep_dims=True))
    shift = tl.where(new == -float("inf"), 0.0, new)
    total = total * tl.exp2((highest - shift) * unit_2)
    total += tl.sum(tl.exp2((x - shift) * unit_2), 0, keep_dims=True)
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
    infinity = float("inf")
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

    inner, unit = 2.0 * LOG2_E * logit_scale / softcap, logit_scale
    if HAS_SOFTCAP:
        unit = softcap
    teacher_inner, teacher_unit = 2.0 * LOG2_E * teacher_scale / teacher_softcap, teacher_scale
    if HAS_TEACHER_SOFTCAP:
        teacher_unit = teacher_softcap
    unit_2 = unit * LOG2_E
    teacher_unit_2 = teacher_unit * LOG2_E

    highest = tl.full((1, BLOCK), -infinity, tl.float32)
    total = tl.zeros((1, BLOCK), tl.float32)
    teacher_highest = tl.full((1, BLOCK), -infinity, tl.float32)
    teacher_total = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, columns, PIECES * BLOCK):
        at = start + column
        mask = at < columns
        logits = tl.load(student_ptr + at, mask=mask, other=-infinity, eviction_policy="evict_last")
        x = _capped(logits, inner, mask, HAS_SOFTCAP)
        highest, total = _fold(x, highest, total, unit_2)
        logits = tl.load(teacher_ptr + at, mask=mask, other=-infinity, eviction_policy="evict_last")
        y = _capped(logits, teacher_inner, mask, HAS_TEACHER_SOFTCAP)
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
        logits = tl.load(student_ptr + at, mask=mask, other=-infinity)
        x = _capped(logits, inner, mask, HAS_SOFTCAP)
        logits = tl.load(teacher_ptr + at, mask=mask, other=-infinity)
        y = _capped(logits, teacher_inner, mask, HAS_TEACHER_SOFTCAP)
        log_p = (x - top) * unit_2 - log_sum
        log_q = (y - teacher_top) * teacher_unit_2 - teacher_log_sum
        p = tl.exp2(log_p)
        q = tl.exp2(log_q)
        # A class of probability 0 adds nothing, also if its logarithm is -infinity.
        if KIND == FORWARD_KL:
            values = tl.where(q > 0.0, q * (log_q - log_p), 0.0)
        elif KIND == REVERSE_KL:
            values = tl.where(p > 0.0, p * (log_p - log_q), 0.0)
        elif KIND == JSD:
            log_m = tl.log2((1.0 - beta) * p + beta * q)
            of_p = tl.where(p > 0.0, p * (log_p - log_m), 0.0)
            of_q = tl.where(q > 0.0, q * (log_q - log_m), 0.0)
            values = beta * of_q + (1.0 - beta) * of_p
            slopes += tl.sum((1.0 - beta) * of_p, 0, keep_dims=True)
        else:
            values = 0.5 * tl.abs(p - q)
            sign = tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0))
            slopes += tl.sum(p * sign, 0, keep_dims=True)
        sums += tl.sum(values, 0, keep_dims=True)
        if (KIND == FORWARD_KL) and (grad_ptr is not None):
            grad = (p - q) * scale
            if HAS_SOFTCAP:
                grad *= 1.0 - x * x
            tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=mask)
    loss = tl.sum(sums)
    slope = tl.sum(slopes)
    if KIND == REVERSE_KL:
        slope = loss
    if KIND == TOTAL_VARIATION:
        tl.store(loss_ptr + row, loss)
    else:
        tl.store(loss_ptr + row, loss * LN_2)
        scale *= LN_2

    if (KIND != FORWARD_KL) and (grad_ptr is not None):
        for start in range(0, columns, PIECES * BLOCK):
            at = start + column
            mask = at < columns
            logits = tl.load(
                student_ptr + at, mask=mask, other=-infinity, eviction_policy="evict_first"
            )
            x = _capped(logits, inner, mask, HAS_SOFTCAP)
            logits = tl.load(
                teacher_ptr + at, mask=mask, other=-infinity, eviction_policy="evict_first"
            )
            y = _capped(logits, teacher_inner, mask, HAS_TEACHER_SOFTCAP)
            log_p = (x - top) * unit_2 - log_sum
            log_q = (y - teacher_top) * teacher_unit_2 - teacher_log_sum
            p = tl.exp2(log_p)
            if KIND == REVERSE_KL:
                own = log_p - log_q
            elif KIND == JSD:
                log_m = tl.log2((1.0 - beta) * p + beta * tl.exp2(log_q))
                own = (1.0 - beta) * (log_p - log_m)
            else:
                q = tl.exp2(log_q)
                own = tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0))
            grad = tl.where(p > 0.0, p * (own - slope), 0.0) * scale
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
        BLOCK=setting.block,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return loss, grad
