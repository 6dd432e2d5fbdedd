"""The loss of a linear head, chunk by chunk: no more logits exist at once than a budget holds.

Where the loss is one number, its gradients are computed in the forward pass while a chunk's
logits are at hand (three matrix products in all); backward scales them by the upstream gradient.
Of few tokens forward keeps the gradient of the logits instead, smaller than the weight's, and
backward makes the two products.
With reduction "none" the upstream gradient of each token is needed first, so backward computes
the logits again (four products). A budget too small for a float32 sum of the weight gradient costs
one product more: backward makes that gradient in a loop of its own, over the vocabulary. One too
small for the hidden gradient, which forward would keep for backward, costs another.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.autocast import cast_operands, without_autocast
from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.cross_entropy import (
    CrossEntropyOutput,
    check_options,
    check_targets,
    loss_divisor,
    token_upstream,
)
from ligermodels.kernels.dispatch import choose, refuse_double_backward, select
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.linear_cross_entropy.chunk_plan import (
    TOKEN_BYTES,
    Plan,
    Sizes,
    check_cut,
    plan_chunks,
)
from ligermodels.kernels.linear_cross_entropy.loops import (
    Head,
    Task,
    Upstream,
    Wants,
    column_loop,
    held_gradients,
    parts,
    row_loop,
)
from ligermodels.kernels.linear_cross_entropy.valid_rows import put_rows, take_targets, valid_rows
from ligermodels.kernels.loss_options import CrossEntropyOptions, TokenStats
from ligermodels.kernels.target_weights import target_weights


class _Kept(NamedTuple):
    """What forward keeps for backward, by name: autograd takes and gives a flat row of tensors."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    targets: Tensor | None = None
    taken: Tensor | None = None
    class_weights: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    divisor: Tensor | None = None
    made_over: Tensor | None = None
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None
    grad_logits: Tensor | None = None


def _of_head(head: Head, lse: Tensor, entropy: Tensor | None = None) -> _Kept:
    """What backward makes logits from again, and then their gradients."""
    hidden, weight, bias, task = head
    return _Kept(hidden, weight, bias, task.targets, task.taken, task.class_weights, lse, entropy)


def _keep(ctx, task: Task, kept: _Kept) -> None:
    # Without task's tensors, which autograd is to watch over and to let go of after backward.
    ctx.save_for_backward(*kept)
    ctx.options, ctx.plan, ctx.wants = task.options, task.plan, task.wants
    ctx.set_materialize_grads(False)


def _kept_head(ctx, kept: _Kept) -> Head:
    assert kept.hidden is not None and kept.weight is not None and kept.targets is not None
    task = Task(kept.targets, kept.taken, kept.class_weights, ctx.options, ctx.plan, ctx.wants)
    return Head(kept.hidden, kept.weight, kept.bias, task)


def _empty_stats(head: Head) -> TokenStats | None:
    task = head.task
    return TokenStats.empty(len(task.targets), head.hidden) if task.with_stats else None


def _cast(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if grad is None else grad.to(dtype)


def _scaled(grad: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Out of place: backward may run twice over a retained graph."""
    return None if grad is None else select("cross_entropy", grad).scaled(grad, scale, dtype)


def _gradient_bound(task: Task, like: Tensor) -> Tensor:
    """About the largest gradient of a row's loss with respect to its logits, a scalar like `like`.

    It is near the scale of the logits, times a class weight where there are some.
    """
    _, label_smoothing, _, _, logit_scale = task.options
    bound = torch.full_like(like, logit_scale)
    if task.class_weights is None or len(task.targets) == 0:
        return bound
    weights = task.class_weights.to(like.dtype).abs()
    largest = target_weights(task.targets, weights, task.options.ignore_index).amax()
    bound = bound * ((1 - label_smoothing) * largest + label_smoothing * weights.mean())
    return torch.where(bound == 0, 1.0, bound)


# In both Functions hidden, weight and bias get gradients; the task, and the divisor, get none.


class _ReducedLoss(torch.autograd.Function):
    """sum(loss) / divisor, with the gradients made on the way, but for those by columns."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, task, divisor):
        head = Head(hidden, weight, bias, task)
        # float16 gradients of a mean over many tokens would underflow; there they are made near
        # 1, and backward divides, where the loss scale of float16 training is at hand.
        late = hidden.dtype == torch.float16 and any(task.wants)
        made_over = _gradient_bound(task, divisor) if late else divisor
        ctx.dtype = hidden.dtype
        upstream = Upstream((1 / made_over).view(1)) if any(task.wants) else None
        stats = _empty_stats(head)
        rows = row_loop(head, upstream, stats=stats, hold_logits=task.holds_logits())
        kept = _Kept()
        if task.by_columns():
            kept = _of_head(head, rows.lse)
        elif task.holds_logits():
            kept = _Kept(hidden, weight if task.wants.hidden else None, taken=task.taken)
        kept = kept._replace(
            divisor=divisor,
            made_over=made_over if late else None,
            grad_hidden=rows.grad_hidden,
            grad_weight=rows.grad_weight,
            grad_bias=rows.grad_bias,
            grad_logits=rows.grad_logits,
        )
        _keep(ctx, task, kept)
        loss, z_loss, _ = select("cross_entropy", hidden).mean_loss(rows.loss, rows.z_loss, divisor)
        ctx.mark_non_differentiable(z_loss, rows.loss, *(stats or ()))
        return loss, z_loss, rows.loss, *(stats or ())

    @staticmethod
    def backward(ctx, upstream, *_):
        refuse_double_backward("loss head")
        if upstream is None:
            return None, None, None, None, None
        kept = _Kept(*ctx.saved_tensors)
        scale = upstream
        if kept.made_over is not None:
            scale = upstream * (kept.made_over / kept.divisor)
        if kept.grad_logits is not None:
            assert kept.hidden is not None
            with without_autocast(kept.hidden):
                made = held_gradients(
                    kept.grad_logits, scale, kept.hidden, kept.taken, kept.weight, ctx.wants.bias
                )
            return *made, None, None
        grad_hidden = _scaled(kept.grad_hidden, scale, ctx.dtype)
        grad_weight = _scaled(kept.grad_weight, scale, ctx.dtype)
        grad_bias = _scaled(kept.grad_bias, scale, ctx.dtype)
        if kept.lse is not None:  # weight and bias wait for the loop by columns
            row_scale = Upstream((upstream / kept.divisor).view(1))
            with without_autocast(kept.hidden):
                grad_weight, grad_bias = column_loop(_kept_head(ctx, kept), row_scale, kept.lse)
        return grad_hidden, grad_weight, grad_bias, None, None


class _TokenOutputs(torch.autograd.Function):
    """Loss, log-probability and entropy of each row, for any upstream gradient of each.

    Gradients are made in backward, from logits computed again.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, task):
        head = Head(hidden, weight, bias, task)
        stats = _empty_stats(head)
        rows = row_loop(head, stats=stats)
        _keep(ctx, task, _of_head(head, rows.lse, None if stats is None else stats.entropy))
        ctx.mark_non_differentiable(rows.z_loss, *(() if stats is None else (stats.correct,)))
        return rows.loss, rows.z_loss, *(stats or ())

    @staticmethod
    def backward(ctx, grad_loss, _, grad_log_probs=None, grad_entropy=None, __=None):
        refuse_double_backward("loss head")
        if grad_loss is None and grad_log_probs is None and grad_entropy is None:
            return None, None, None, None
        kept = _Kept(*ctx.saved_tensors)
        head = _kept_head(ctx, kept)
        row_scale, stats_scale = token_upstream(
            grad_loss, grad_log_probs, grad_entropy, kept.entropy, kept.lse
        )
        upstream = Upstream(row_scale, stats_scale)
        grad_hidden = grad_weight = grad_bias = None
        with without_autocast(head.hidden):
            by_columns = head.task.by_columns()
            if not by_columns or ctx.wants.hidden:
                rows = row_loop(head, upstream, kept.lse)
                grad_hidden = rows.grad_hidden
                grad_weight = _cast(rows.grad_weight, head.weight.dtype)
                grad_bias = _cast(rows.grad_bias, head.weight.dtype)
            if by_columns:
                grad_weight, grad_bias = column_loop(head, upstream, kept.lse)
        return grad_hidden, grad_weight, grad_bias, None


class Call(NamedTuple):
    """A head and tokens that fit each other: cast, flattened to rows, and cut into chunks."""

    head: Head
    targets: Tensor  # (...), as they were given

    def reduced(self, divisor: Tensor) -> CrossEntropyOutput:
        """The loss of all tokens over divisor, alone differentiable."""
        if not self.head.task.plan.in_forward:
            return summed(self.token_outputs(), divisor)
        hidden, weight, bias, task = self.head
        with without_autocast(hidden):
            loss, z_loss, *tokens = _ReducedLoss.apply(hidden, weight, bias, task, divisor)
        return CrossEntropyOutput(loss, z_loss, *map(self.shaped, tokens))

    def token_outputs(self) -> CrossEntropyOutput:
        """Everything of each token, differentiable for any upstream gradient."""
        hidden, weight, bias, task = self.head
        with without_autocast(hidden):
            tokens = _TokenOutputs.apply(hidden, weight, bias, task)
            loss, z_loss, *stats = map(self.shaped, tokens)
        return CrossEntropyOutput(loss, z_loss, loss, *stats)

    def shaped(self, x: Tensor) -> Tensor:
        """Values of each row taken, in the shape of the targets."""
        task = self.head.task
        if task.taken is not None:
            x = put_rows(x, task.taken, self.targets.flatten(), task.options.ignore_index)
        return x.view(self.targets.shape)


def summed(tokens: CrossEntropyOutput, divisor: Tensor) -> CrossEntropyOutput:
    """What there is of each token as one loss, sum(loss) / divisor, alone differentiable."""
    loss, z_loss, _, *stats = tokens
    detached = [None if x is None else x.detach() for x in stats]
    loss_sum, z_loss_sum = loss.sum() / divisor, z_loss.sum() / divisor
    return CrossEntropyOutput(loss_sum, z_loss_sum, loss.detach(), *detached)


def wide_copies(hidden: Tensor, with_stats: bool) -> int:
    """Copies of a chunk's logits in `compute_dtype` that exist at the peak beside the logits."""
    if choose(hidden.device, hidden.dtype)[0] == "triton":
        return 0  # the kernels work in place
    return 7 + 2 * with_stats  # with every option set


def prepare(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None,
    options: CrossEntropyOptions,
    *,
    chunk_size: int | None,
    max_scratch_bytes: int | None,
    skip_ignored: bool,
    max_valid: int | None,
    gradients_in_forward: bool,
    with_stats: bool,
) -> Call:
    """Check what `linear_cross_entropy` and `linear_log_probs` are given, and choose the chunks.

    Args: as there; gradients_in_forward, whether they may be made there and held until backward;
        with_stats, whether log-probabilities, entropy and correctness are asked for.
    Raises: as there, of a "loss head" or "cross entropy", but for `check_options`.
    """
    if hidden.dim() == 0 or weight.dim() != 2:
        raise ValueError(
            f"loss head: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}; expected "
            "(..., in) and (vocab, in)"
        )
    vocab, width = weight.shape
    if hidden.shape[-1] != width or width == 0:
        raise ValueError(
            f"loss head: hidden {tuple(hidden.shape)} and weight "
            f"{tuple(weight.shape)}; expected the same last dimension, of 1 or more"
        )
    rows = hidden.shape[:-1]
    check_targets(targets, rows, vocab, class_weights, options.ignore_index, hidden.device)
    check_floating("loss head", "hidden", hidden)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.device != hidden.device:
            raise ValueError(
                f"loss head: {name} is on {parameter.device}, hidden on {hidden.device}; move one"
            )
    hidden, weight, bias = cast_operands(hidden, hidden, weight, bias)
    if hidden.dtype != weight.dtype:
        # autocast leaves float64 alone
        way = "" if torch.float64 in (hidden.dtype, weight.dtype) else ", or run under autocast"
        raise ValueError(
            f"loss head: hidden is {hidden.dtype} and weight {weight.dtype}; cast one{way}"
        )
    if bias is not None and (bias.shape != (vocab,) or bias.dtype != weight.dtype):
        raise ValueError(
            f"loss head: bias {tuple(bias.shape)} {bias.dtype} does not fit weight "
            f"{tuple(weight.shape)} {weight.dtype}; expected ({vocab},) {weight.dtype}"
        )
    chunk_size, max_scratch_bytes = check_cut(chunk_size, max_scratch_bytes)
    grad = torch.is_grad_enabled()
    wants = Wants(
        hidden=grad and hidden.requires_grad,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )
    row_targets = targets.flatten()
    taken = valid_rows(row_targets, options.ignore_index, skip_ignored, max_valid)
    if taken is not None:
        row_targets = take_targets(row_targets, taken, options.ignore_index)
    # Neither logits nor hidden then take more than the weight: forward had better hold those.
    few_rows = wants.weight and gradients_in_forward and len(row_targets) <= min(width, vocab)
    if chunk_size is None:
        wide = compute_dtype(hidden).itemsize
        copies = wide_copies(hidden, with_stats)
        # What forward makes is held until backward hands out scaled copies. (Not hidden.nbytes:
        # torch.compile has none for a number of rows that is a symbol.)
        kept = (hidden.numel() + width) * hidden.element_size()  # a row to spare for padding
        held = beside = 0
        if wants.weight and hidden.dtype == torch.float16:
            beside = vocab * width * wide  # its weight gradient comes in float32
        elif few_rows:
            beside = len(row_targets) * width * hidden.element_size()  # scaled
        elif wants.weight and gradients_in_forward:
            held = vocab * width * hidden.element_size()
        copied = 0 if taken is None else width * hidden.element_size()
        sizes = Sizes(
            len(row_targets),
            vocab,
            logit_bytes=hidden.element_size() + wide * copies,
            hidden_bytes=copied + (width * wide if copies else 0),
            accumulator_bytes=vocab * width * wide if wants.weight else 0,
            whole_bytes=beside,
            held_bytes=held,
            kept_bytes=kept if wants.hidden and gradients_in_forward else 0,
            fixed_bytes=TOKEN_BYTES * targets.numel() * (1 + with_stats + skip_ignored)
            + (3 * wide * vocab if wants.bias else 0)
            + (0 if hidden.is_contiguous() else hidden.numel() * hidden.element_size()),
        )
        plan = plan_chunks(sizes, max_scratch_bytes)
    else:
        plan = Plan(chunk_size)
    if torch.compiler.is_compiling():
        # A last chunk of one row makes the length a constant. torch 2.11 traces that only where
        # it shows before the Function whose outputs have the length.
        last = parts(len(row_targets), plan.rows)[-1]
        if last.stop - last.start == 1:
            pass  # to ask is enough
    task = Task(row_targets, taken, class_weights, options, plan, wants, with_stats, few_rows)
    return Call(Head(hidden.reshape(-1, width), weight, bias, task), targets)


def check_loss_options(
    vocab: int,
    *,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    class_weights: Tensor | None = None,
    chunk_size: int | None = None,
    max_scratch_bytes: int | None = None,
    skip_ignored: bool = False,
    max_valid: int | None = None,
    return_token_stats: bool = False,
    **options: Any,
) -> None:
    """Raise ValueError for options that `linear_cross_entropy` would refuse whatever the tokens.

    But for a budget too small, which depends on how many tokens there are.
    """
    given = CrossEntropyOptions(**options)
    check_options(
        given,
        reduction,
        normalizer,
        skip_ignored=skip_ignored,
        return_token_stats=return_token_stats,
    )
    device = None if class_weights is None else class_weights.device
    none = torch.empty(0, dtype=torch.int64, device=device)
    check_targets(none, none.shape, vocab, class_weights, given.ignore_index, none.device)
    check_cut(chunk_size, max_scratch_bytes)
    valid_rows(none, given.ignore_index, skip_ignored, max_valid)


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
    max_valid: int | None = None,
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
        normalizer: a number >= 0 (0 counts as 1) or a 0-d tensor for "mean"; default the number of
            valid targets, or with class weights the sum of theirs. Not differentiated.
        ignore_index: the target that counts for nothing.
        class_weights: (vocab), not differentiated.
        chunk_size: rows of logits at a time; overrides the budget.
        max_scratch_bytes: most memory to hold beyond inputs, outputs and gradients, down to a row
            of logits and 64 bytes a token (64 more for return_token_stats, as many for
            skip_ignored). Where it holds no float32 sum of the weight gradient
            (vocab * in * 4 bytes) beside enough rows, that gradient costs one more product; below
            twice the hidden gradient, which forward would keep for backward, that one, too.
            Default: that sum and 2^30 bytes of logits, or all logits where they take at most
            twice the sum, and the gradients that forward keeps. What autocast casts is not
            counted, nor what autograd copies for a transposed leaf; a copy of a sliced hidden is.
            On a CPU plain PyTorch makes several wide copies of a row of logits, which count, too.
        skip_ignored: leave rows whose target is ignored out of the matrix products. Finding them
            costs one host synchronisation, and is refused under torch.compile and graph capture,
            unless max_valid is given.
        max_valid: an upper bound on the number of targets that are not ignored, known on the
            host, for skip_ignored; products are made for as many rows. Too small a bound is an
            error on CPU in eager mode; elsewhere the loss is NaN.
        return_token_stats: also give log-probability, entropy and correctness of each token.
    Returns: `CrossEntropyOutput`. With "mean" and "sum" only the loss is differentiable; with
        "none" the log-probabilities and the entropy as well. All targets ignored: loss 0, zero
        gradients. The weight gradient is accumulated in float32.
    Raises:
        ValueError: shapes, dtypes or options that do not fit, a budget too small.
        RuntimeError: skip_ignored without max_valid under torch.compile or graph capture.
        IndexError: a target outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_options(
        options,
        reduction,
        normalizer,
        skip_ignored=skip_ignored,
        return_token_stats=return_token_stats,
    )
    call = prepare(
        hidden,
        weight,
        targets,
        bias,
        class_weights,
        options,
        chunk_size=chunk_size,
        max_scratch_bytes=max_scratch_bytes,
        skip_ignored=skip_ignored,
        max_valid=max_valid,
        gradients_in_forward=reduction != "none",
        with_stats=return_token_stats,
    )
    if reduction == "none":
        return call.token_outputs()
    dtype = compute_dtype(call.head.hidden)
    divisor = loss_divisor(targets, reduction, normalizer, class_weights, ignore_index, dtype)
    if max_valid is not None:
        too_many = (targets != ignore_index).sum() > min(max_valid, targets.numel())
        divisor = torch.where(too_many, float("nan"), divisor)
    return call.reduced(divisor)
