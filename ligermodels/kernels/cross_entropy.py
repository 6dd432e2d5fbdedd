"""Cross entropy on logits that exist: three passes over them, forward and backward together."""

from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.autocast import without_autocast
from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.loss_options import CrossEntropyOptions, StatsScale, TokenStats
from ligermodels.kernels.target_weights import target_weight_sum

REDUCTIONS = ("none", "sum", "mean")


class CrossEntropyOutput(NamedTuple):
    """What the cross entropy ops return: float32, or float64 for float64 inputs."""

    loss: Tensor  # scalar, or the targets' shape with reduction "none"; z-loss included
    z_loss: Tensor  # the z-loss within it, not differentiable
    token_loss: Tensor  # the loss of each token (...); with reduction "none" the loss itself
    log_probs: Tensor | None = None  # log softmax(logits) at the target (...), 0 where ignored
    entropy: Tensor | None = None  # of softmax(logits) in nats (...), 0 where ignored
    # (...) bool: no class has a higher logit, nor an equal one and a lower index
    correct: Tensor | None = None


def token_upstream(
    loss: Tensor | None,
    log_probs: Tensor | None,
    entropy: Tensor | None,
    entropy_value: Tensor | None,
    lse: Tensor,
) -> tuple[Tensor, StatsScale | None]:
    """row_scale and stats_scale of `reference.cross_entropy_rows` for what upstream there is."""
    row_scale = lse.new_zeros(1) if loss is None else loss.contiguous()
    if log_probs is None and entropy is None:
        return row_scale, None
    return row_scale, StatsScale(log_probs, entropy, entropy_value)


class _ReducedCrossEntropy(torch.autograd.Function):
    """sum(loss) / divisor, in one node: autograd's own sum and division take longer to launch."""

    @staticmethod
    def forward(ctx, logits, targets, class_weights, divisor, options, with_stats):
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
    def backward(ctx, upstream, *_):
        refuse_double_backward("cross_entropy")
        if upstream is None:
            return (None,) * 6
        logits, targets, lse, class_weights, divisor = ctx.saved_tensors
        row_scale = (upstream / divisor).view(1)
        *_, grad = ctx.ops.cross_entropy_rows(
            logits, targets, row_scale, lse, class_weights, ctx.options, False
        )
        return grad, *[None] * 5


class _CrossEntropyRows(torch.autograd.Function):
    """Loss, log-probability and entropy of each row, for any upstream gradient of each."""

    @staticmethod
    def forward(ctx, logits, targets, class_weights, options, with_stats):
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
    def backward(ctx, grad_loss, _, grad_log_probs=None, grad_entropy=None, __=None):
        refuse_double_backward("cross_entropy")
        if grad_loss is None and grad_log_probs is None and grad_entropy is None:
            return (None,) * 5
        logits, targets, lse, class_weights, entropy = ctx.saved_tensors
        row_scale, stats_scale = token_upstream(
            grad_loss, grad_log_probs, grad_entropy, entropy, lse
        )
        *_, grad = ctx.ops.cross_entropy_rows(
            logits,
            targets,
            row_scale,
            lse,
            class_weights,
            ctx.options,
            False,
            stats_scale=stats_scale,
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
    """Cross entropy of softcap(logit_scale * logits), and the z-loss within it.

    Args: logits (..., vocab); targets (...) int64; class_weights (vocab); the options as in
        `linear_cross_entropy`.
    Returns: `CrossEntropyOutput`, of which the same is differentiable as there. logits are left
        intact.
    Raises:
        ValueError: shapes or options that do not fit.
        IndexError: a target outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_options(options, reduction, normalizer, return_token_stats=return_token_stats)
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
    """`cross_entropy` with reduction "none", for options that were checked before."""
    rows = _rows(logits, targets, class_weights, options.ignore_index)
    with without_autocast(logits):
        tokens = _CrossEntropyRows.apply(*rows, class_weights, options, with_stats)
    loss, z, *stats = (x.view(targets.shape) for x in tokens)
    return CrossEntropyOutput(loss, z, loss, *stats)


def _rows(
    logits: Tensor, targets: Tensor, class_weights: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """logits (rows, vocab) and targets (rows), checked."""
    if logits.dim() == 0:
        raise ValueError("cross entropy: logits are 0-dimensional; expected (..., vocab)")
    check_floating("cross entropy", "logits", logits)
    *shape, vocab = logits.shape
    check_targets(targets, torch.Size(shape), vocab, class_weights, ignore_index, logits.device)
    return logits if logits.dim() == 2 else logits.reshape(-1, vocab), targets.flatten()


def check_options(
    options: CrossEntropyOptions,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    **switches: bool,
) -> None:
    """Raise ValueError, naming the option, for a value that fits no call."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"cross entropy: {name}={value!r}; expected True or False")
    ignore_index, label_smoothing, z_loss, softcap, logit_scale = options
    whole = isinstance(ignore_index, int) and not isinstance(ignore_index, bool)
    if not whole or not -(2**63) <= ignore_index < 2**63:
        raise ValueError(
            f"cross entropy: ignore_index={ignore_index!r}; expected an integer of 64 bits"
        )
    _check_number("label_smoothing", label_smoothing)
    _check_number("z_loss", z_loss)
    _check_number("logit_scale", logit_scale)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cross entropy: label_smoothing={label_smoothing} not in [0, 1]")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"cross entropy: z_loss={z_loss} must not be negative")
    if not 0 < logit_scale < float("inf"):
        raise ValueError(f"cross entropy: logit_scale={logit_scale} must be positive")
    if softcap is not None:
        _check_number("softcap", softcap)
        if not 0 < softcap < float("inf"):
            raise ValueError(f"cross entropy: softcap={softcap} must be positive or None")
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross entropy: reduction={reduction!r}; expected one of {REDUCTIONS}")
    if normalizer is None:
        return
    if reduction != "mean":
        raise ValueError(
            f"cross entropy: a normalizer divides only with reduction='mean', not {reduction!r}"
        )
    if isinstance(normalizer, Tensor):
        if normalizer.dim() != 0 or normalizer.is_complex():
            raise ValueError(
                f"cross entropy: normalizer {tuple(normalizer.shape)} {normalizer.dtype}; expected "
                "a number or a real 0-d tensor"
            )
    elif (
        isinstance(normalizer, bool)
        or not isinstance(normalizer, Real)  # numpy's numbers, too
        or not 0 <= normalizer < float("inf")
    ):
        raise ValueError(
            f"cross entropy: normalizer={normalizer!r}; expected a number >= 0 (0 counts as 1)"
        )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        raise ValueError(
            f"cross entropy: {name} is a tensor; expected a number. To learn a scale of the "
            "logits, multiply hidden by it"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"cross entropy: {name}={value!r}; expected a number")


def loss_divisor(
    targets: Tensor,
    reduction: str,
    normalizer: float | Tensor | None,
    class_weights: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    """What the summed loss is divided by, as a scalar tensor on the targets' device."""
    divisor = given_divisor(reduction, normalizer, targets.device, dtype)
    if divisor is None:
        return target_weight_sum(targets, class_weights, ignore_index, dtype)
    return divisor


def given_divisor(
    reduction: str, normalizer: float | Tensor | None, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """The divisor as a scalar tensor, or None where it is the sum of the targets' weights."""
    if isinstance(normalizer, Tensor):
        total = normalizer.detach().to(device, dtype, non_blocking=True)
        # With every target ignored in all batches of the normalizer, the loss is 0 / 1.
        return torch.where(total == 0, 1.0, total)
    if reduction == "sum" or normalizer is not None:
        # Filled on the device: a copy from the host would wait for it.
        return torch.full((), normalizer or 1.0, dtype=dtype, device=device)
    return None


def check_targets(
    targets: Tensor,
    shape: torch.Size,
    vocab: int,
    class_weights: Tensor | None,
    ignore_index: int,
    device: torch.device,
) -> None:
    """Raise for targets or class weights that do not fit logits of (*shape, vocab) on device.

    Targets outside the vocabulary are looked for on CPU in eager mode alone.
    """
    if targets.shape != shape:
        raise ValueError(
            f"cross entropy: targets {tuple(targets.shape)} do not fit {tuple(shape)} rows"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"cross entropy: targets are {targets.dtype}; expected torch.int64")
    if vocab == 0:
        raise ValueError("cross entropy: a vocabulary of 0; expected 1 or more classes")
    if targets.device != device:
        raise ValueError(
            f"cross entropy: targets are on {targets.device}; expected {device}, as the rest"
        )
    if class_weights is not None:
        if class_weights.shape != (vocab,):
            raise ValueError(
                f"cross entropy: class_weights {tuple(class_weights.shape)}; expected ({vocab},)"
            )
        if class_weights.is_complex():
            raise ValueError(f"cross entropy: class_weights are {class_weights.dtype}")
        if class_weights.device != device:
            raise ValueError(
                f"cross entropy: class_weights are on {class_weights.device}; expected {device}, "
                "as the rest"
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
