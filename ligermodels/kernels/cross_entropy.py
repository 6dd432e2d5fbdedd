"""Cross entropy of given logits. Forward and backward together pass three times over them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.autocast import without_autocast
from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.loss_options import (
    CrossEntropyOptions,
    OutputGrads,
    TokenStats,
    check_classes,
    check_options,
    given_divisor,
)


class CrossEntropyOutput(NamedTuple):
    """The output of the cross entropy ops, in float32, or in float64 for float64 inputs."""

    loss: Tensor  # scalar, or (...) with reduction "none"; it includes the z-loss
    z_loss: Tensor  # the part of loss that is the z-loss, not differentiable
    token_loss: Tensor  # (...) the loss of each token; with reduction "none" the same as loss
    log_probs: Tensor | None = None  # (...) log softmax(logits) at the target, 0 if ignored
    entropy: Tensor | None = None  # (...) entropy of softmax(logits) in nats, 0 if ignored
    # (...) bool: the target has the highest logit, and the lowest index among equal logits.
    correct: Tensor | None = None


def reduce_tokens(tokens: CrossEntropyOutput, divisor: Tensor) -> CrossEntropyOutput:
    """Turn the output of reduction "none" into that of "mean", with loss = sum(loss) / divisor.

    Only this loss is differentiable. It is for losses whose backward takes a gradient for each
    token; otherwise `mean_loss` of the kernels is faster, because it is one launch.
    """
    loss, z_loss, _, *stats = tokens
    detached = [None if x is None else x.detach() for x in stats]
    loss_sum, z_loss_sum = loss.sum() / divisor, z_loss.sum() / divisor
    return CrossEntropyOutput(loss_sum, z_loss_sum, loss.detach(), *detached)


def output_grads(
    grad_loss: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    lse: Tensor,
) -> OutputGrads:
    """Pack the upstream gradients of each row for `cross_entropy_rows`."""
    loss = lse.new_zeros(1) if grad_loss is None else grad_loss.contiguous()
    if grad_log_probs is None and grad_entropy is None:
        return OutputGrads(loss)
    return OutputGrads(loss, grad_log_probs, grad_entropy, entropy)


class _ReducedCrossEntropy(torch.autograd.Function):
    """Compute sum(loss) / divisor in one autograd node; sum and division as nodes are slower."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        class_weights: Tensor | None,
        divisor: Tensor | None,
        options: CrossEntropyOptions,
        with_stats: bool,
    ) -> tuple[Tensor, ...]:
        ctx.ops = select("cross_entropy", logits)
        stats = TokenStats.empty(len(targets), logits) if with_stats else None
        loss, z_loss, lse, _ = ctx.ops.cross_entropy_rows(
            logits, targets, None, None, class_weights, options, False, stats=stats
        )
        mean, z_mean, divisor = ctx.ops.mean_loss(
            loss, z_loss, divisor, targets, class_weights, options.ignore_index
        )
        ctx.save_for_backward(logits, targets, lse, class_weights, divisor)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(z_mean, loss, *(stats or ()))
        return mean, z_mean, loss, *(stats or ())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("cross_entropy")
        if grad_output is None:
            return (None,) * 6
        logits, targets, lse, class_weights, divisor = ctx.saved_tensors
        grads = OutputGrads((grad_output / divisor).view(1))
        *_, grad = ctx.ops.cross_entropy_rows(
            logits, targets, grads, lse, class_weights, ctx.options, False
        )
        return grad, *[None] * 5


class _CrossEntropyRows(torch.autograd.Function):
    """Compute loss, log-probability and entropy of each row, for any upstream gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        class_weights: Tensor | None,
        options: CrossEntropyOptions,
        with_stats: bool,
    ) -> tuple[Tensor, ...]:
        ctx.ops = select("cross_entropy", logits)
        stats = TokenStats.empty(len(targets), logits) if with_stats else None
        loss, z_loss, lse, _ = ctx.ops.cross_entropy_rows(
            logits, targets, None, None, class_weights, options, False, stats=stats
        )
        entropy = None if stats is None else stats.entropy
        ctx.save_for_backward(logits, targets, lse, class_weights, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(z_loss, *(() if stats is None else (stats.correct,)))
        return loss, z_loss, *(stats or ())

    @staticmethod
    def backward(
        ctx: Any,
        grad_loss: Tensor | None,
        _: None,
        grad_log_probs: Tensor | None = None,
        grad_entropy: Tensor | None = None,
        __: None = None,
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("cross_entropy")
        if grad_loss is None and grad_log_probs is None and grad_entropy is None:
            return (None,) * 5
        logits, targets, lse, class_weights, entropy = ctx.saved_tensors
        grads = output_grads(grad_loss, grad_log_probs, grad_entropy, entropy, lse)
        *_, grad = ctx.ops.cross_entropy_rows(
            logits, targets, grads, lse, class_weights, ctx.options, False
        )
        return grad, *[None] * 4


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weights: Tensor | None = None,
    return_token_stats: bool = False,
) -> CrossEntropyOutput:
    """Compute the cross entropy of softcap(logit_scale * logits), including the z-loss.

    Args: logits: (..., vocab), not modified; targets: (...) int64; class_weights: (vocab); for the
        other options see `linear_cross_entropy`.
    Returns: `CrossEntropyOutput`. The same outputs are differentiable as in
        `linear_cross_entropy`.
    Raises:
        ValueError: a shape, dtype or option is wrong.
        IndexError: a target is outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    options = check_options(options, reduction, normalizer, return_token_stats=return_token_stats)
    if reduction == "none":
        return token_cross_entropy(logits, targets, class_weights, options, return_token_stats)
    row_logits, row_targets = _rows(logits, targets, class_weights, options.ignore_index)
    divisor = given_divisor(reduction, normalizer, logits.device, compute_dtype(logits))
    with without_autocast(logits):
        loss, z, *tokens = _ReducedCrossEntropy.apply(
            row_logits, row_targets, class_weights, divisor, options, return_token_stats
        )
    return CrossEntropyOutput(loss, z, *(x.view(targets.shape) for x in tokens))


def token_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
    options: CrossEntropyOptions,
    with_stats: bool,
) -> CrossEntropyOutput:
    """Compute `cross_entropy` with reduction "none", from options that are already checked."""
    rows = _rows(logits, targets, class_weights, options.ignore_index)
    with without_autocast(logits):
        tokens = _CrossEntropyRows.apply(*rows, class_weights, options, with_stats)
    loss, z, *stats = (x.view(targets.shape) for x in tokens)
    return CrossEntropyOutput(loss, z, loss, *stats)


def _rows(
    logits: Tensor, targets: Tensor, class_weights: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Check the tensors; return logits as (rows, vocab) and targets as (rows)."""
    if logits.dim() == 0:
        raise ValueError("cross entropy: logits are 0-dimensional; expected (..., vocab)")
    check_floating("cross entropy", "logits", logits)
    *shape, vocab = logits.shape
    check_targets(targets, torch.Size(shape), vocab, class_weights, ignore_index, logits.device)
    return logits if logits.dim() == 2 else logits.reshape(-1, vocab), targets.flatten()


def check_targets(
    targets: Tensor,
    shape: torch.Size,
    vocab: int,
    class_weights: Tensor | None,
    ignore_index: int,
    device: torch.device,
) -> None:
    """Raise if targets or class weights do not fit logits of (*shape, vocab) on device.

    Only CPU eager mode looks for targets outside the vocabulary.
    """
    if targets.shape != shape:
        raise ValueError(
            f"cross entropy: targets {tuple(targets.shape)} do not fit the input; expected "
            f"{tuple(shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"cross entropy: targets are {targets.dtype}; expected torch.int64")
    if targets.device != device:
        raise ValueError(
            f"cross entropy: targets are on {targets.device}; expected {device}, like the input"
        )
    check_classes(vocab, class_weights)
    if class_weights is not None and class_weights.device != device:
        raise ValueError(
            f"cross entropy: class_weights are on {class_weights.device}; expected {device}, "
            "like the input"
        )
    if targets.device.type == "cpu" and not torch.compiler.is_compiling() and targets.numel():
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
        if wrong.any():
            position = int(wrong.flatten().nonzero()[0])
            raise IndexError(
                f"cross entropy: target {int(targets.flatten()[position])} at flat position "
                f"{position} is outside the vocabulary of {vocab} and is not "
                f"ignore_index={ignore_index}"
            )
