"""Cross entropy of given logits. Forward and backward together pass three times over them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ligermodels.kernels.autocast import without_autocast
from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.loss_options import (
    LOGIT_OPTIONS,
    CrossEntropyOptions,
    LossKeywords,
    LossOptions,
    OutputGrads,
    TokenRequest,
    TokenStats,
    check_classes,
    check_known,
    given_divisor,
    output_grads,
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
    sum_sq_probs: Tensor | None = None  # (...) sum of softmax(logits)^2, 0 if ignored
    mean_logits: Tensor | None = None  # (...) mean of the logits over the classes, 0 if ignored
    alternative_log_probs: Tensor | None = None  # (..., k) log softmax(logits) at `alternatives`
    top_ids: Tensor | None = None  # (..., top_k) int64, the classes with the highest logits
    top_log_probs: Tensor | None = None  # (..., top_k) log softmax(logits) at top_ids


def token_output(
    loss: Tensor,
    z_loss: Tensor,
    token_loss: Tensor,
    request: TokenRequest,
    stats: Iterable[Tensor],
) -> CrossEntropyOutput:
    """Return the output with the statistics that were asked for, given in the request's order."""
    made = dict(zip(request.names, stats))
    given = request.num_picked - request.top_k
    picked, log_probs = made.pop("picked", None), made.pop("picked_log_probs", None)
    if log_probs is not None and request.alternatives is not None:
        made["alternative_log_probs"] = log_probs[..., :given].clone()  # FSDP2 warns of views
    if picked is not None and log_probs is not None and request.top_k:
        made["top_ids"] = picked[..., given:]
        made["top_log_probs"] = log_probs[..., given:].clone()
    return CrossEntropyOutput(loss, z_loss, token_loss, **made)


def reduce_tokens(tokens: CrossEntropyOutput, divisor: Tensor) -> CrossEntropyOutput:
    """Turn the output of reduction "none" into that of "mean", with loss = sum(loss) / divisor.

    Only this loss is differentiable. It is for losses whose backward takes a gradient for each
    token; otherwise `mean_loss` of the kernels is faster, because it is one launch.
    """
    loss, z_loss, _, *stats = tokens
    detached = [None if x is None else x.detach() for x in stats]
    loss_sum, z_loss_sum = loss.sum() / divisor, z_loss.sum() / divisor
    return CrossEntropyOutput(loss_sum, z_loss_sum, loss.detach(), *detached)


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
    if given.reduction == "none":
        rows = token_values(logits, targets, given)
        loss, z, *stats = (x.view(targets.shape + x.shape[1:]) for x in rows)
        return token_output(loss, z, loss, given.request, stats)
    dtype = compute_dtype(logits)
    divisor = given_divisor(given.reduction, given.normalizer, logits.device, dtype)
    mean, z, *tokens = _values(logits, targets, divisor, True, given)
    token_loss, *stats = (x.view(targets.shape + x.shape[1:]) for x in tokens)
    return token_output(mean, z, token_loss, given.request, stats)


def token_values(logits: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, ...]:
    """Return loss, z-loss and the requested statistics of rows, as `token_output` takes them."""
    return _values(logits, targets, None, False, options)


def _values(
    logits: Tensor, targets: Tensor, divisor: Tensor | None, mean: bool, options: LossOptions
) -> tuple[Tensor, ...]:
    """Check the tensors; return what `_CrossEntropy` does for them as rows."""
    if logits.dim() == 0:
        raise ValueError("cross entropy: logits are 0-dimensional; expected (..., vocab)")
    check_floating("cross entropy", "logits", logits)
    class_weights, formula = options.class_weights, options.formula
    *shape, vocab = logits.shape
    check_targets(
        targets, torch.Size(shape), vocab, class_weights, options.ignore_index, logits.device
    )
    request = check_request(options.request, targets, vocab)
    rows = logits if logits.dim() == 2 else logits.reshape(-1, vocab)
    with without_autocast(logits):
        return _CrossEntropy.apply(
            rows, targets.flatten(), class_weights, divisor, mean, formula, request
        )


def check_request(request: TokenRequest, targets: Tensor, vocab: int) -> TokenRequest:
    """Check a request of per-token statistics; return it with alternatives as (rows, k).

    Raises:
        ValueError: top_k is larger than the vocabulary, or alternatives do not fit the targets.
        IndexError: an alternative is outside the vocabulary, on CPU in eager mode.
    """
    if request.top_k > vocab:
        raise ValueError(
            f"cross entropy: top_k={request.top_k}; expected at most the vocabulary, {vocab}"
        )
    classes = request.alternatives
    if classes is None:
        return request
    if classes.dim() == 0 or classes.shape[:-1] != targets.shape or classes.shape[-1] == 0:
        raise ValueError(
            f"cross entropy: alternatives {tuple(classes.shape)} do not fit targets "
            f"{tuple(targets.shape)}; expected their shape and one more dimension, of 1 or more"
        )
    if classes.dtype != torch.int64 or classes.device != targets.device:
        raise ValueError(
            f"cross entropy: alternatives are {classes.dtype} on {classes.device}; expected "
            f"torch.int64 on {targets.device}, like the targets"
        )
    if classes.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = classes >= vocab
        if wrong.any():
            raise IndexError(
                f"cross entropy: alternative {int(classes[wrong][0])} is outside the vocabulary of "
                f"{vocab}"
            )
    return request._replace(alternatives=classes.reshape(targets.numel(), classes.shape[-1]))


def checked_token_weights(token_weights: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the weights of tokens, 0 at ignored targets; raise if they do not fit the targets."""
    if token_weights.shape != targets.shape or token_weights.device != targets.device:
        raise ValueError(
            f"loss head: token_weights {tuple(token_weights.shape)} on {token_weights.device} do "
            f"not fit targets {tuple(targets.shape)} on {targets.device}; expected the same shape "
            "and device"
        )
    return token_weights.detach().masked_fill(targets == ignore_index, 0)


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
