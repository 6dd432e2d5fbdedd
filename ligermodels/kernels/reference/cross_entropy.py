"""Plain PyTorch: cross entropy of rows of logits, its mean and its gradient."""

import torch
from torch import Tensor

from ligermodels.kernels.dtypes import cast, compute_dtype
from ligermodels.kernels.loss_options import (
    CrossEntropyOptions,
    OutputGrads,
    TokenStats,
    target_weight_sum,
)


def cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    grad_output: OutputGrads | None,
    lse: Tensor | None,
    class_weights: Tensor | None,
    options: CrossEntropyOptions,
    in_place: bool,
    stats: TokenStats | None = None,
    first_column: int = 0,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the loss of each row and, given grad_output, the gradient of the logits.

    t = softcap * tanh(logit_scale * logits / softcap). The loss is the cross entropy of t, with
    class weights and label smoothing as in `torch.nn.functional.cross_entropy`, plus
    z_loss * logsumexp(t)^2. If a target is not ignore_index and is outside the vocabulary, its row
    gets NaN.

    Args:
        logits: (rows, vocab).
        targets: (rows) int64.
        grad_output: float32 upstream gradients of loss, log_probs and entropy; None for no gradient
            of the logits.
        lse: (rows, 2) from an earlier call, to save a pass over the logits.
        class_weights: (vocab).
        in_place: whether to overwrite logits with their gradient.
        stats: if given, this function fills it. Do not pass it together with lse.
        first_column, vocab: logits are (rows, columns), of the classes first_column, first_column +
            1, ... of `vocab` classes. Requires lse.
    Returns: loss (rows), which includes the z-loss; z-loss (rows); lse (rows, 2); gradient (rows,
        vocab) or None. All except the gradient are float32, or float64 for float64 logits. If lse
        is given, loss and z-loss are meaningless. lse is the largest t and log(sum(exp(t -
        largest))). Their sum, the logsumexp, would lose digits if the largest t is large. The
        caller only passes lse back to this function: an implementation may store it in other
        units, and any value for an ignored row.
    """
    ignore_index, label_smoothing, z_loss, softcap, logit_scale = options
    columns = logits.shape[-1]
    vocab = columns if vocab is None else vocab
    scaled = cast(logits, compute_dtype(logits)) * logit_scale
    t, tanh = scaled, None
    if softcap is not None:
        tanh = torch.tanh(scaled / softcap)
        t = softcap * tanh
    valid = targets != ignore_index
    inside = (targets >= 0) & (targets < vocab)
    index = torch.where(inside, targets, 0)
    ones = t.new_ones(1).expand(vocab)  # takes no memory
    weights = ones if class_weights is None else cast(class_weights, t.dtype)
    target_weight = weights[index] * (1 - label_smoothing)
    smooth = label_smoothing / vocab
    nan = cast(torch.where(inside, 0.0, float("nan")), t.dtype)
    if lse is not None:
        loss = z = lse
        top, log_sum = lse.unbind(-1)
    else:
        top = t.amax(-1)
        log_sum = torch.exp(t - top[:, None]).sum(-1).log()
        lse = torch.stack((top, log_sum), -1)
        target_t = t.gather(-1, index[:, None])[:, 0]
        target_log_p = target_t - top - log_sum
        loss = -target_weight * target_log_p
        if label_smoothing:
            # Subtract the target logit first: sums of large logits would round differences away.
            anchor = torch.where(target_t == -torch.inf, 0.0, target_t)
            above = top - anchor + log_sum
            weighted = ((t - anchor[:, None]) * weights).sum(-1)
            loss = loss + smooth * (above * weights.sum() - weighted)
        z = z_loss * (top + log_sum) * (top + log_sum)
        loss = torch.where(valid, loss + z + nan, 0.0)
        z = torch.where(valid, z + nan, 0.0)
        if stats is not None:
            log_p = t - top[:, None] - log_sum[:, None]
            p = torch.exp(log_p)
            entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
            # Compare before the softcap, because it may round different logits to the same value.
            best = scaled.gather(-1, index[:, None])
            before = torch.arange(columns, device=t.device) < index[:, None]
            beaten = ((scaled > best) | ((scaled == best) & before)).any(-1) | best[:, 0].isnan()
            stats.log_probs.copy_(torch.where(valid, target_log_p + nan, 0.0))
            stats.entropy.copy_(torch.where(valid, entropy + nan, 0.0))
            stats.correct.copy_(valid & inside & ~beaten)
    if grad_output is None:
        return loss, z, lse, None

    scale = torch.where(valid, cast(grad_output.loss, t.dtype) + nan, 0.0)
    at_target = -target_weight * scale
    factor = (target_weight + smooth * weights.sum() + 2 * z_loss * (top + log_sum)) * scale
    if grad_output.log_probs is not None:
        at_target = at_target + grad_output.log_probs
        factor = factor - grad_output.log_probs
    p = torch.exp(t - top[:, None] - log_sum[:, None])
    grad = p * factor[:, None]
    here = index - first_column
    mine = (here >= 0) & (here < columns)
    grad = grad.scatter_add(
        -1, torch.where(mine, here, 0)[:, None], torch.where(mine, at_target, 0.0)[:, None]
    )
    if label_smoothing:
        block = weights[first_column : first_column + columns]
        grad = grad - (smooth * scale)[:, None] * block
    if grad_output.entropy is not None:
        assert grad_output.entropy_value is not None
        # p log p is 0 if p is 0, also if log p is -infinity.
        log_p = t - top[:, None] - (log_sum - grad_output.entropy_value)[:, None]
        grad = grad - grad_output.entropy[:, None] * torch.where(p == 0, 0.0, p * log_p)
    if tanh is not None:
        grad = grad * (1 - tanh * tanh)
    # An ignored row gets exact zeros even if its logits are not finite.
    grad = cast(torch.where(valid[:, None], grad * logit_scale, 0.0), logits.dtype)
    return loss, z, lse, logits.copy_(grad) if in_place else grad


def mean_loss(
    loss: Tensor,
    z_loss: Tensor,
    divisor: Tensor | None,
    targets: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum(loss) / divisor, sum(z_loss) / divisor and the divisor, as scalars.

    loss and z_loss are (rows). If divisor is None, it is `target_weight_sum` of the targets, and
    targets must be given.
    """
    if divisor is None:
        assert targets is not None
        divisor = target_weight_sum(targets, class_weights, ignore_index, loss.dtype)
    return loss.sum() / divisor, z_loss.sum() / divisor, divisor


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * scale in dtype. scale has one element, and the product is in float32 or wider.

    A scale rounded to the low precision of x would put the same relative error on all elements.
    """
    scale = cast(scale, compute_dtype(x)).view([1] * x.ndim)
    if torch.compiler.is_compiling():
        return cast(x * scale, dtype)
    # Write directly in dtype, so that no float32 product takes memory.
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))
