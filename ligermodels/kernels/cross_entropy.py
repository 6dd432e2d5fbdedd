"""Cross entropy of given logits. Forward and backward together pass three times over them."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import (
    compute_dtype,
    refuse_double_backward,
    select,
    without_autocast,
)
from ligermodels.kernels.loss_options import (
    LOGIT_OPTIONS,
    CrossEntropyOptions,
    CrossEntropyOutput,
    LossKeywords,
    LossOptions,
    OutputGrads,
    TokenRequest,
    TokenStats,
    check_known,
    check_targets,
    given_divisor,
    output_grads,
    token_output,
)


class _CrossEntropy(torch.autograd.Function):
    """Compute the loss of each row and its statistics, or with `mean` sum(loss) / divisor.

    Only the mean is differentiable then; it is one node, because sum and division as nodes are
    slower. Without it, backward takes any upstream gradients. divisor None is the sum of the
    weights of the targets.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        class_weights: Tensor | None,
        divisor: Tensor | None,
        mean: bool,
        options: CrossEntropyOptions,
        request: TokenRequest,
    ) -> tuple[Tensor, ...]:
        ctx.ops, ctx.mean, ctx.options = select("cross_entropy", logits), mean, options
        ctx.names = request.names
        stats = TokenStats.empty(len(targets), logits, request)
        if stats is not None:
            stats.fill_likeliest(logits, request.top_k)
        loss, z_loss, lse, _ = ctx.ops.cross_entropy_rows(
            logits, targets, None, None, class_weights, options, False, stats=stats
        )
        stats = TokenStats() if stats is None else stats
        made = stats.tensors()
        ctx.set_materialize_grads(False)
        if not mean:
            values = stats.entropy, stats.sum_sq_probs, stats.picked
            ctx.save_for_backward(logits, targets, lse, class_weights, *values)
            ctx.mark_non_differentiable(z_loss, *stats.without_gradient())
            return loss, z_loss, *made
        loss_mean, z_mean, divisor = ctx.ops.mean_loss(
            loss, z_loss, divisor, targets, class_weights, options.ignore_index
        )
        ctx.save_for_backward(logits, targets, lse, class_weights, divisor)
        ctx.mark_non_differentiable(z_mean, loss, *made)
        return loss_mean, z_mean, loss, *made

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor | None, _: None, *grad_stats: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("cross_entropy")
        logits, targets, lse, class_weights, *others = ctx.saved_tensors
        grads = None
        if not ctx.mean:
            values = TokenStats(entropy=others[0], sum_sq_probs=others[1], picked=others[2])
            grads = output_grads(grad_loss, ctx.names, grad_stats, values, lse)
        elif grad_loss is not None:
            grads = OutputGrads((grad_loss / others[0]).view(1))
        if grads is None:
            return (None,) * 7
        *_, grad = ctx.ops.cross_entropy_rows(
            logits, targets, grads, lse, class_weights, ctx.options, False
        )
        return grad, *[None] * 6


def cross_entropy(
    logits: Tensor, targets: Tensor, **options: Unpack[LossKeywords]
) -> CrossEntropyOutput:
    """Compute the cross entropy of softcap(logit_scale * logits), including the z-loss.

    Args: logits: (..., vocab), not modified; targets: (...) int64; options: reduction, normalizer,
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature, class_weights,
        return_token_stats, alternatives and top_k, as in `linear_cross_entropy`.
    Returns: `CrossEntropyOutput`. The same outputs are differentiable as in
        `linear_cross_entropy`.
    Raises:
        TypeError: an option is unknown.
        ValueError: a shape, dtype or option is wrong.
        IndexError: a target is outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    check_known("cross_entropy", options, LOGIT_OPTIONS)
    given = LossOptions.of(**options)
    if logits.dim() == 0:
        raise ValueError("cross entropy: logits are 0-dimensional; expected (..., vocab)")
    check_floating("cross entropy", "logits", logits)
    shape, vocab, device = logits.shape[:-1], logits.shape[-1], logits.device
    check_targets(targets, shape, vocab, given.class_weights, given.ignore_index, device)
    request = given.request_of(targets, vocab)
    rows = logits if logits.dim() == 2 else logits.reshape(-1, vocab)
    mean = given.reduction != "none"
    divisor = given_divisor(given.reduction, given.normalizer, device, compute_dtype(logits))
    loss, z, *tokens = row_losses(rows, targets.flatten(), given, request, mean, divisor)
    if mean:
        token_loss, *stats = (x.view(shape + x.shape[1:]) for x in tokens)
        return token_output(loss, z, token_loss, request, stats)
    loss, z, *stats = (x.view(shape + x.shape[1:]) for x in (loss, z, *tokens))
    return token_output(loss, z, loss, request, stats)


def row_losses(
    logits: Tensor,
    targets: Tensor,
    options: LossOptions,
    request: TokenRequest,
    mean: bool = False,
    divisor: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return what `_CrossEntropy` does for logits (rows, vocab) and targets that are checked."""
    with without_autocast(logits):
        return _CrossEntropy.apply(
            logits, targets, options.class_weights, divisor, mean, options.formula, request
        )
