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
    TokenRequest,
    TokenStats,
    check_known,
    check_targets,
    loss_divisor,
    output_grads,
    reduce_tokens,
    token_output,
)


class _CrossEntropy(torch.autograd.Function):
    """Compute the loss of each row and its statistics, for any upstream gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        class_weights: Tensor | None,
        options: CrossEntropyOptions,
        request: TokenRequest,
    ) -> tuple[Tensor, ...]:
        ctx.ops, ctx.options = select("cross_entropy", logits), options
        ctx.names = request.names
        stats = TokenStats.empty(len(targets), logits, request)
        if stats is not None:
            stats.fill_likeliest(logits, request.top_k)
        loss, z_loss, lse, _ = ctx.ops.cross_entropy_rows(
            logits, targets, None, None, class_weights, options, False, stats=stats
        )
        stats = TokenStats() if stats is None else stats
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, lse, class_weights, stats.entropy, stats.picked)
        ctx.mark_non_differentiable(z_loss, *stats.without_gradient())
        return loss, z_loss, *stats.tensors()

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor | None, _: None, *grad_stats: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("cross_entropy")
        logits, targets, lse, class_weights, entropy, picked = ctx.saved_tensors
        values = TokenStats(entropy=entropy, picked=picked)
        grads = output_grads(grad_loss, ctx.names, grad_stats, values, lse)
        if grads is None:
            return (None,) * 5
        *_, grad = ctx.ops.cross_entropy_rows(
            logits, targets, grads, lse, class_weights, ctx.options, False
        )
        return grad, *[None] * 4


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
    made = row_losses(rows, targets.flatten(), given, request)
    loss, z_loss, *stats = (x.view(shape + x.shape[1:]) for x in made)
    out = token_output(loss, z_loss, loss, request, stats)
    if given.reduction == "none":
        return out
    return reduce_tokens(out, loss_divisor(targets, given, compute_dtype(logits)))


def row_losses(
    logits: Tensor, targets: Tensor, options: LossOptions, request: TokenRequest
) -> tuple[Tensor, ...]:
    """Return what `_CrossEntropy` does for logits (rows, vocab) and targets that are checked."""
    with without_autocast(logits):
        return _CrossEntropy.apply(logits, targets, options.class_weights, options.formula, request)
