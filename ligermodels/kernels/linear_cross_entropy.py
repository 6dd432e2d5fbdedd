"""The loss of a linear head, chunk by chunk: the logits of all tokens never exist together.

Where the loss is one number, its gradients are computed in the forward pass while a chunk's
logits are at hand (three matrix products in all); backward scales them by the upstream gradient.
With reduction "none" the upstream gradient of each token is needed first, so backward computes
the logits again (four products). A budget too small for a float32 sum of the weight gradient costs
one product more: backward makes that gradient in a loop of its own, over the vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.autocast import cast_operands, without_autocast
from ligermodels.kernels.backend import refuse_double_backward, select
from ligermodels.kernels.chunks import TOKEN_BYTES, Plan, Sizes, check_cut, plan_chunks
from ligermodels.kernels.cross_entropy import (
    CrossEntropyOutput,
    check_cross_entropy,
    check_reduction,
    loss_divisor,
    token_upstream,
)
from ligermodels.kernels.head_loops import Head, Upstream, Wants, column_loop, row_loop
from ligermodels.kernels.reference import (
    CrossEntropyOptions,
    TokenStats,
    compute_dtype,
)
from ligermodels.kernels.valid_rows import put_rows, take_targets, valid_rows


class _ReducedLoss(torch.autograd.Function):
    """sum(loss) / divisor, with the gradients made on the way, but for those by columns."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        taken,
        class_weights,
        options,
        plan,
        wants,
        with_stats,
        divisor,
    ):
        # float16 gradients of a mean over many tokens would underflow; there the division waits
        # for backward, where the loss scale of float16 training is at hand.
        late = hidden.dtype == torch.float16
        upstream = None
        if any(wants):
            upstream = Upstream((torch.ones_like(divisor) if late else 1 / divisor).view(1))
        head = Head(hidden, weight, bias, targets, taken, class_weights, options, plan)
        stats = TokenStats.empty(len(targets), hidden) if with_stats else None
        rows = row_loop(head, wants, upstream, stats=stats)
        grads = rows.grad_hidden, rows.grad_weight, rows.grad_bias
        by_columns = plan.columns is not None and wants.weight
        ctx.save_for_backward(
            *grads, divisor, *((*head[:6], rows.lse) if by_columns else [None] * 7)
        )
        ctx.options, ctx.plan, ctx.wants, ctx.late = options, plan, wants, late
        ctx.by_columns = by_columns
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        z_sum = rows.z_loss.sum() / divisor
        ctx.mark_non_differentiable(z_sum, rows.loss, *(stats or ()))
        return rows.loss.sum() / divisor, z_sum, rows.loss, *(stats or ())

    @staticmethod
    def backward(ctx, upstream, *_):
        refuse_double_backward("linear_cross_entropy")
        if upstream is None:
            return (None,) * 11
        *grads, divisor, hidden, weight, bias, targets, taken, class_weights, lse = (
            ctx.saved_tensors
        )
        scale = upstream / divisor if ctx.late else upstream
        # Out of place: backward may run twice over a retained graph.
        scaled = [
            None if grad is None else select(grad).scaled(grad, scale, dtype)
            for grad, dtype in zip(grads, ctx.dtypes)
        ]
        if ctx.by_columns:
            head = Head(hidden, weight, bias, targets, taken, class_weights, ctx.options, ctx.plan)
            row_scale = Upstream((upstream / divisor).view(1))
            with without_autocast(hidden):
                scaled[1:] = column_loop(head, ctx.wants, row_scale, lse)
        return *scaled, *[None] * 8


class _TokenOutputs(torch.autograd.Function):
    """Loss, log-probability and entropy of each row, for any upstream gradient of each.

    Gradients are made in backward, from logits computed again.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, taken, class_weights, options, plan, wants, with_stats
    ):
        head = Head(hidden, weight, bias, targets, taken, class_weights, options, plan)
        stats = TokenStats.empty(len(targets), hidden) if with_stats else None
        rows = row_loop(head, wants, stats=stats)
        entropy = None if stats is None else stats.entropy
        ctx.save_for_backward(*head[:6], rows.lse, entropy)
        ctx.options, ctx.plan, ctx.wants = options, plan, wants
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.z_loss, *(() if stats is None else (stats.correct,)))
        return rows.loss, rows.z_loss, *(stats or ())

    @staticmethod
    def backward(ctx, grad_loss, _, grad_log_probs=None, grad_entropy=None, __=None):
        refuse_double_backward("linear_cross_entropy")
        if grad_loss is None and grad_log_probs is None and grad_entropy is None:
            return (None,) * 10
        hidden, weight, bias, targets, taken, class_weights, lse, entropy = ctx.saved_tensors
        head = Head(hidden, weight, bias, targets, taken, class_weights, ctx.options, ctx.plan)
        upstream = Upstream(*token_upstream(grad_loss, grad_log_probs, grad_entropy, entropy, lse))
        grad_hidden = grad_weight = grad_bias = None
        with without_autocast(hidden):
            by_columns = head.plan.columns is not None and ctx.wants.weight
            if not by_columns or ctx.wants.hidden:
                rows = row_loop(head, ctx.wants, upstream, lse)
                grad_hidden, grad_weight, grad_bias = rows[3:]
            if by_columns:
                grad_weight, grad_bias = column_loop(head, ctx.wants, upstream, lse)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None and bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


class Call(NamedTuple):
    """A head and tokens that fit each other, cast, flattened to rows, and cut into chunks."""

    hidden: Tensor  # (rows, in)
    weight: Tensor
    bias: Tensor | None
    targets: Tensor  # (rows taken)
    taken: Tensor | None  # positions of the rows taken, or all
    class_weights: Tensor | None
    options: CrossEntropyOptions
    plan: Plan
    wants: Wants
    with_stats: bool
    all_targets: Tensor  # (...), as they were given

    def token_outputs(self) -> CrossEntropyOutput:
        """Everything of each token, differentiable for any upstream gradient."""
        with without_autocast(self.hidden):
            loss, *others = map(self.shaped, _TokenOutputs.apply(*self[:-1]))
        return CrossEntropyOutput(loss, others[0], loss, *others[1:])

    def shaped(self, x: Tensor) -> Tensor:
        """Values of each row taken, in the shape of all targets."""
        if self.taken is not None:
            x = put_rows(x, self.taken, self.all_targets.flatten(), self.options.ignore_index)
        return x.view(self.all_targets.shape)


def prepare(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None,
    options: CrossEntropyOptions,
    chunk_size: int | None,
    max_scratch_bytes: int | None,
    skip_ignored: bool,
    num_valid: int | None,
    reduction: str,
    with_stats: bool,
) -> Call:
    """Check what `linear_cross_entropy` and `linear_log_probs` are given, and choose the chunks."""
    vocab, width = weight.shape[0], weight.shape[-1]
    if hidden.shape[-1] != width:
        raise ValueError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)} and weight "
            f"{tuple(weight.shape)} differ in their last dimension"
        )
    check_cross_entropy(targets, hidden.shape[:-1], vocab, options, class_weights)
    if not hidden.is_floating_point():
        raise ValueError(f"linear_cross_entropy: hidden is {hidden.dtype}; expected floating point")
    hidden, weight, bias = cast_operands(hidden, hidden, weight, bias)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"linear_cross_entropy: hidden is {hidden.dtype} and weight {weight.dtype}; cast one, "
            "or run under torch.autocast"
        )
    if bias is not None and (bias.shape != (vocab,) or bias.dtype != weight.dtype):
        raise ValueError(
            f"linear_cross_entropy: bias {tuple(bias.shape)} {bias.dtype} does not fit weight "
            f"{tuple(weight.shape)} {weight.dtype}; expected ({vocab},) {weight.dtype}"
        )
    check_cut(chunk_size, max_scratch_bytes)
    grad = torch.is_grad_enabled()
    wants = Wants(
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    all_targets, targets = targets, targets.flatten()
    taken = valid_rows(targets, options.ignore_index, skip_ignored, num_valid)
    if taken is not None:
        targets = take_targets(targets, taken, options.ignore_index)
    if chunk_size is None:
        # Plain PyTorch holds several wide copies of a chunk, the kernels work in place.
        copies = 0 if select(hidden).__name__.endswith(".triton") else 6 + 3 * with_stats
        wide = compute_dtype(hidden).itemsize
        held = vocab * width * (wide if hidden.dtype == torch.float16 else hidden.element_size())
        if not wants.weight or reduction == "none":
            held = 0
        copied = 0 if taken is None else width * hidden.element_size()
        sizes = Sizes(
            len(targets),
            vocab,
            logit_bytes=hidden.element_size() + wide * copies,
            hidden_bytes=copied + (width * wide if copies else 0),
            accumulator_bytes=vocab * width * wide if wants.weight else 0,
            held_bytes=held,
            wider_bytes=max(0, held - vocab * width * weight.element_size()),
            fixed_bytes=TOKEN_BYTES * all_targets.numel() * (1 + with_stats + skip_ignored)
            + (3 * wide * vocab if wants.bias else 0)
            + (0 if hidden.is_contiguous() else hidden.nbytes),
        )
        plan = plan_chunks(sizes, max_scratch_bytes)
    else:
        plan = Plan(chunk_size)
    return Call(
        hidden.reshape(-1, width),
        weight,
        bias,
        targets,
        taken,
        class_weights,
        options,
        plan,
        wants,
        with_stats,
        all_targets,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weights: Tensor | None = None,
    chunk_size: int | None = None,
    max_scratch_bytes: int | None = None,
    skip_ignored: bool = False,
    num_valid: int | None = None,
    return_token_stats: bool = False,
) -> CrossEntropyOutput:
    """Cross entropy of softcap(logit_scale * (hidden weight^T + bias)) within a scratch budget.

    softcap(x) = c tanh(x / c) (Gemma 2). Label smoothing and class weights follow
    `torch.nn.functional.cross_entropy`. The z-loss, z * logsumexp(logits)^2 a token (PaLM,
    arXiv:2204.02311), is part of the loss.

    Args:
        hidden: (..., in), float.
        weight: (vocab, in), hidden's dtype (autocast casts both).
        targets: (...) int64, aligned with hidden: no shift here.
        bias: (vocab), weight's dtype.
        reduction: "mean" divides the sum by the normalizer, "sum" by nothing, "none" gives a loss
            for each token, 0 where the target is ignored.
        normalizer: number or 0-d tensor for "mean"; default the number of valid targets, or with
            class weights the sum of theirs. Not differentiated.
        ignore_index: the target that counts for nothing.
        class_weights: (vocab), not differentiated.
        chunk_size: rows of logits at a time; overrides the budget.
        max_scratch_bytes: most memory to hold beyond inputs, outputs and gradients, down to a row
            of logits and 64 bytes a token (64 more for return_token_stats, as many for
            skip_ignored). Where it holds no float32 sum of the weight gradient
            (vocab * in * 4 bytes) beside enough rows, that gradient costs one more product.
            Default: that sum and 2^30 bytes of logits, or all logits where they take at most
            twice the sum. The hidden gradient made in forward is kept for backward and counts as
            a gradient; what autocast casts is not counted, a copy of a sliced hidden is.
        skip_ignored: leave rows whose target is ignored out of the matrix products. Finding them
            costs one host synchronisation, and is refused under torch.compile and graph capture,
            unless num_valid is given.
        num_valid: an upper bound on the number of targets that are not ignored, known on the
            host, for skip_ignored; products are made for as many rows. Too small a bound is an
            error on CPU in eager mode; elsewhere the loss is NaN.
        return_token_stats: also give log-probability, entropy and correctness of each token.
    Returns: `CrossEntropyOutput`. With "mean" and "sum" only the loss is differentiable; with
        "none" the log-probabilities and the entropy as well. All targets ignored: loss 0, zero
        gradients. The weight gradient is accumulated in float32.
    Raises:
        ValueError: shapes, dtypes or options that do not fit, a budget too small.
        RuntimeError: skip_ignored without num_valid under torch.compile or graph capture.
        IndexError: a target outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_reduction(reduction, normalizer)
    call = prepare(
        hidden,
        weight,
        targets,
        bias,
        class_weights,
        options,
        chunk_size,
        max_scratch_bytes,
        skip_ignored,
        num_valid,
        reduction,
        return_token_stats,
    )
    if reduction == "none":
        return call.token_outputs()
    dtype = compute_dtype(call.hidden)
    divisor = loss_divisor(targets, reduction, normalizer, class_weights, ignore_index, dtype)
    if num_valid is not None:
        too_many = (targets != ignore_index).sum() > num_valid
        divisor = torch.where(too_many, float("nan"), divisor)
    with without_autocast(hidden):
        loss, z, token_loss, *stats = _ReducedLoss.apply(*call[:-1], divisor)
    return CrossEntropyOutput(loss, z, call.shaped(token_loss), *map(call.shaped, stats))
