"""The divergence of a student's next-token distribution from a teacher's, chunk by chunk.

A chunk has the student's logits, which their gradient overwrites, and the teacher's of a third of
its tokens at a time. If all tokens are one chunk, the memory of the teacher's logits is free again
before the weight gradient is made, so the divergence takes as much as `linear_cross_entropy`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ligermodels.kernels.checks import check_number, misfit
from ligermodels.kernels.dispatch import (
    choose,
    compute_dtype,
    real_device,
    refuse_double_backward,
    select,
    without_autocast,
)
from ligermodels.kernels.linear_cross_entropy import chunk_plan
from ligermodels.kernels.linear_cross_entropy.autograd import GradSums, NeedsGrad, scaled_grad
from ligermodels.kernels.loss_options import (
    DivergenceOptions,
    LossKeywords,
    LossOptions,
    check_known,
    checked_linear,
    given_divisor,
)

DIVERGENCE_OPTIONS = frozenset(
    "token_weights reduction normalizer temperature softcap logit_scale chunk_size "
    "max_scratch_bytes".split()
)

PIECES = 3
"""The teacher's logits exist for this part of a chunk. More parts would make shorter products."""


class _Teacher(NamedTuple):
    """The teacher's head and its input, which get no gradient."""

    hidden: Tensor  # (rows, in)
    weight: Tensor  # (vocab, in)
    bias: Tensor | None  # (vocab)


class _Args(NamedTuple):
    teacher: _Teacher
    valid: Tensor | None  # (rows) bool
    scale: Tensor  # (rows) or (1,): what multiplies the divergence of each row in the loss
    options: DivergenceOptions
    chunk_size: int
    needs_grad: NeedsGrad


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float | None = 0.5,
    mask: Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_scale: float = 1.0,
    **options: Unpack[LossKeywords],
) -> Tensor:
    """Compute how far a student's distribution p of each token is from a teacher's, q.

    With m = (1 - beta) p + beta q, it is the generalized Jensen-Shannon divergence beta KL(q || m)
    + (1 - beta) KL(p || m) (arXiv:2306.13649). beta = 0 gives the forward KL(q || p), beta = 1 the
    reverse KL(p || q), and beta None the total variation distance sum |p - q| / 2. Forward and
    backward take four matrix products, one of them the teacher's; with reduction "none" six.

    Args:
        hidden: (..., in), floating point. weight: (vocab, in), bias: (vocab), in hidden's dtype.
        teacher_hidden: (..., teacher's in), teacher_weight: (vocab, teacher's in), teacher_bias:
            (vocab). They get no gradient, and may have another dtype than the student's.
        mask: (...) bool, which tokens count. By default all do.
        token_weights: (...) factors of the tokens, without a gradient.
        reduction: "mean" divides the sum over tokens by the normalizer, "sum" does not, and "none"
            returns the divergence of each token.
        normalizer: a number >= 0 (0 counts as 1) or a 0-d tensor, only for "mean". By default it is
            the number of tokens that count.
        temperature: divides the logits of both. The result is not multiplied with its square.
        softcap, logit_scale, teacher_softcap, teacher_scale: of the logits of each, as in
            `linear_cross_entropy`.
        chunk_size, max_scratch_bytes: as in `linear_cross_entropy`. The budget must hold a float32
            sum of the weight gradient and one row of both logits.
    Returns: a scalar, or (...) for "none", in float32 (float64 for float64 inputs).
    Raises:
        ValueError: a shape, dtype or option is wrong, or the budget is too small.
    """
    check_known("linear_divergence", options, DIVERGENCE_OPTIONS)
    student = LossOptions.of(**options)
    temperature, token_weights = options.get("temperature", 1.0), student.token_weights
    teacher_options = LossOptions.of(
        temperature=temperature, softcap=teacher_softcap, logit_scale=teacher_scale
    )
    if beta is not None and check_number("divergence", "beta", beta) > 1:
        raise misfit("divergence", "a number in [0, 1], or None", beta=beta)
    formula = DivergenceOptions(beta, *student.formula[3:], *teacher_options.formula[3:])
    shape = hidden.shape[:-1]
    hidden, weight, bias = checked_linear("divergence", hidden, weight, bias)
    of_teacher = checked_linear(
        "divergence", teacher_hidden, teacher_weight, teacher_bias, "teacher_"
    )
    teacher = _Teacher(*(None if x is None else x.detach() for x in of_teacher))  # type: ignore[arg-type]
    if teacher_hidden.shape[:-1] != shape or len(weight) != len(teacher.weight):
        expected = "the same tokens and the same vocabulary"
        teachers = {"teacher_hidden": teacher.hidden, "teacher_weight": teacher.weight}
        raise misfit("divergence", expected, hidden=hidden, weight=weight, **teachers)
    for name, given in (("mask", mask), ("token_weights", token_weights)):
        if given is not None and given.shape != shape:
            raise misfit("divergence", f"the shape {tuple(shape)} of the tokens", **{name: given})
    if mask is not None and mask.dtype != torch.bool:
        raise misfit("divergence", "torch.bool", mask=mask)
    needs_grad = NeedsGrad.of(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    teacher = teacher._replace(hidden=teacher.hidden.reshape(-1, teacher.hidden.shape[-1]))
    # float16 gradients of a mean would underflow: only backward knows how training scales the loss.
    one_loss = student.reduction != "none" and hidden.dtype != torch.float16
    chunk = student.chunk_size
    if chunk is None:
        sizes = _sizes(rows, weight, teacher, needs_grad, one_loss)
        plan = chunk_plan.plan_chunks(sizes, student.max_scratch_bytes)
        chunk, one_loss = plan.chunk_size, one_loss and plan.grads_in_forward
    dtype = compute_dtype(hidden)
    valid = None if mask is None else mask.flatten()
    scale = torch.ones(1, dtype=dtype, device=hidden.device)
    if student.reduction != "none":
        divisor = given_divisor(student.reduction, student.normalizer, hidden.device, dtype)
        if divisor is None and valid is None:
            divisor = torch.full((), max(len(rows), 1), dtype=dtype, device=hidden.device)
        elif divisor is None and valid is not None:
            divisor = valid.sum().clamp(min=1).to(dtype)
        assert divisor is not None
        scale = scale / divisor
    if token_weights is not None:
        weights = token_weights.detach().flatten().to(dtype)
        scale = scale * (weights if valid is None else torch.where(valid, weights, 0.0))
    args = _Args(teacher, valid, scale, formula, chunk, needs_grad)
    with without_autocast(hidden):
        if one_loss:
            return _GradsInForward.apply(rows, weight, bias, args)
        tokens = _RecomputeInBackward.apply(rows, weight, bias, args) * scale
    return tokens.view(shape) if student.reduction == "none" else tokens.sum()


def _sizes(
    rows: Tensor, weight: Tensor, teacher: _Teacher, needs_grad: NeedsGrad, one_loss: bool
) -> chunk_plan.Sizes:
    """Return the sizes for the chunk plan. A chunk holds the logits of both heads."""
    vocab, width = weight.shape
    narrow, wide = rows.element_size(), compute_dtype(rows).itemsize
    copies = 0 if choose(rows.device, rows.dtype)[0] == "triton" else 12
    of_piece = teacher.hidden.element_size() + wide * copies
    saved = one_loss and needs_grad.weight
    in_float32 = needs_grad.weight and rows.dtype == torch.float16
    return chunk_plan.Sizes(
        len(rows),
        vocab,
        logit_bytes=narrow - (-of_piece // PIECES),
        hidden_bytes=width * wide if copies and real_device(rows.device).type == "cpu" else 0,
        accumulator_bytes=vocab * width * wide if needs_grad.weight else 0,
        single_chunk_bytes=vocab * width * wide if in_float32 else 0,
        saved_weight_bytes=vocab * width * narrow if saved and not in_float32 else 0,
        rounded_weight_bytes=vocab * width * narrow if needs_grad.weight else 0,
        saved_hidden_bytes=rows.numel() * narrow if one_loss and needs_grad.hidden else 0,
        fixed_bytes=chunk_plan.TOKEN_BYTES * len(rows)
        + vocab * of_piece  # a piece has at least one row
        + (3 * wide * vocab if needs_grad.bias else 0)
        + (0 if rows.is_contiguous() else rows.numel() * narrow),
        vocab_loop=False,
    )


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, args: _Args, scale: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield each chunk, the divergence of its rows and, given scale, the gradient of its logits."""
    ops, teacher = select("divergence", hidden), args.teacher
    longest = max(1, min(args.chunk_size, len(hidden)))
    piece_size = chunk_plan.balanced(longest, max(1, longest // PIECES))
    for chunk in chunk_plan.chunks(len(hidden), args.chunk_size):
        rows, teacher_rows = hidden[chunk], teacher.hidden[chunk]
        valid = None if args.valid is None else args.valid[chunk]
        scales = scale if scale is None or scale.numel() == 1 else scale[chunk]
        logits = rows.new_empty(len(rows), len(weight))
        teacher_logits = teacher_rows.new_empty(piece_size, len(weight))
        losses = []
        for piece in chunk_plan.chunks(len(rows), piece_size):
            # Products of one shape round alike: equal models have a divergence of exactly 0.
            of_teacher = teacher_logits[: len(rows[piece])]
            _linear_into(logits[piece], rows[piece], weight, bias)
            _linear_into(of_teacher, teacher_rows[piece], teacher.weight, teacher.bias)
            made = ops.divergence_rows(
                logits[piece],
                of_teacher,
                None if valid is None else valid[piece],
                scales if scales is None or scales.numel() == 1 else scales[piece],
                args.options,
                True,
            )
            losses.append(made[0])
        del made, of_teacher, teacher_logits  # made has a view of the logits
        yield chunk, torch.cat(losses), None if scale is None else logits
        del logits  # free them before the next chunk's


def _linear_into(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compute out = F.linear(hidden, weight, bias). In eager mode it needs no temporary tensor."""
    if torch.compiler.is_compiling():
        out.copy_(F.linear(hidden, weight, bias))
    elif bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def _all_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, args: _Args, scale: Tensor | None
) -> tuple[Tensor, GradSums]:
    """Return the divergence of all rows, and the gradients, given the upstream ones of rows."""
    needs_grad = NeedsGrad() if scale is None else args.needs_grad
    grads = GradSums(hidden, weight, None, needs_grad, args.chunk_size >= len(hidden))
    losses = []
    for chunk, loss, grad in _chunks(hidden, weight, bias, args, scale):
        losses.append(loss)
        if grad is not None:
            grads.add(chunk, hidden[chunk], grad)
        del loss, grad
    return torch.cat(losses), grads


class _GradsInForward(torch.autograd.Function):
    """Compute the sum of scale * divergence and all its gradients; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: _Args
    ) -> Tensor:
        ctx.dtype = hidden.dtype
        scale = args.scale if any(args.needs_grad) else None
        losses, grads = _all_rows(hidden, weight, bias, args, scale)
        ctx.save_for_backward(grads.of_hidden(), grads.weight, grads.bias)
        return (losses * args.scale).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("divergence")
        return *(scaled_grad(x, grad_output, ctx.dtype) for x in ctx.saved_tensors), None


class _RecomputeInBackward(torch.autograd.Function):
    """Compute the divergence of each row; backward computes the logits of both heads again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: _Args
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, *args.teacher, args.valid, args.scale)
        ctx.settings = args[3:]
        return _all_rows(hidden, weight, bias, args, None)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("divergence")
        hidden, weight, bias, *teacher, valid, scale = ctx.saved_tensors
        args = _Args(_Teacher(*teacher), valid, scale, *ctx.settings)
        with without_autocast(hidden):
            _, grads = _all_rows(hidden, weight, bias, args, grad_output.contiguous())
        return *grads.in_dtype(weight.dtype), None
