"""Plain PyTorch: cross entropy of rows of logits and its gradient."""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype, real_device
from ligermodels.kernels.loss_options import CrossEntropyOptions, OutputGrads, TokenStats


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
        grad_output: float32 upstream gradients of the loss and of statistics; None for no gradient
            of the logits.
        lse: (rows, 2) from an earlier call, to save a pass over the logits.
        class_weights: (vocab).
        in_place: whether to overwrite logits with their gradient.
        stats: if given, this function fills it, except `picked`, the classes of which it gives the
            log-probabilities. Do not pass it together with lse.
        first_column, vocab: logits are (rows, columns), of the classes first_column, first_column +
            1, ... of `vocab` classes. Requires lse.
    Returns: loss (rows), which includes the z-loss; z-loss (rows); lse (rows, 2); gradient (rows,
        vocab) or None. All except the gradient are float32, or float64 for float64 logits. If lse
        is given, loss and z-loss are meaningless. lse is the largest t and log(sum(exp(t -
        largest))). Their sum, the logsumexp, would lose digits if the largest t is large. The
        caller only passes lse back to this function: an implementation may store it in other
        units, and any value for an ignored row.
    """
    rows, per_block = len(logits), _rows_per_block(logits)
    if per_block >= rows:
        loss, z, lse, grad = _block(
            logits, targets, grad_output, lse, class_weights, options, stats, first_column, vocab
        )
        return loss, z, lse, logits.copy_(grad) if in_place and grad is not None else grad

    out = None
    if grad_output is not None:
        out = logits if in_place else torch.empty_like(logits)
    made = []
    for start in range(0, rows, per_block):
        block = slice(start, start + per_block)
        *losses, grad = _block(
            logits[block],
            targets[block],
            None if grad_output is None else grad_output.rows(block),
            None if lse is None else lse[block],
            class_weights,
            options,
            None if stats is None else stats.rows(block),
            first_column,
            vocab,
        )
        made.append(losses)
        if out is not None and grad is not None:
            out[block] = grad
    loss, z, lse = map(torch.cat, zip(*made))
    return loss, z, lse, out


def _rows_per_block(logits: Tensor) -> int:
    """Return how many rows of logits are computed at a time, so that a CPU's caches hold them.

    A block takes 2^17 elements of each thread's cache, and at most a sixteenth of the rows, so that
    all of a block's temporary tensors together are smaller than the logits in `compute_dtype`.
    """
    rows, columns = logits.shape
    if real_device(logits.device).type != "cpu" or torch.compiler.is_compiling():
        return max(rows, 1)
    in_cache = torch.get_num_threads() * 2**17 // max(columns, 1)
    return max(1, min(in_cache, rows // 16))


def _block(
    logits: Tensor,
    targets: Tensor,
    grad_output: OutputGrads | None,
    lse: Tensor | None,
    class_weights: Tensor | None,
    options: CrossEntropyOptions,
    stats: TokenStats | None,
    first_column: int,
    vocab: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`cross_entropy_rows` of some rows, out of place."""
    ignore_index, label_smoothing, z_loss, softcap, logit_scale = options
    columns = logits.shape[-1]
    vocab = columns if vocab is None else vocab
    scaled = cast(logits, compute_dtype(logits))
    if logit_scale != 1:
        scaled = scaled * logit_scale
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
        # The softmax is exp / exp_sum.
        exp, exp_sum = torch.exp(t - top[:, None] - log_sum[:, None]), torch.ones_like(top)
    else:
        top = t.amax(-1)
        exp = torch.exp(t - top[:, None])
        exp_sum = exp.sum(-1)
        log_sum = exp_sum.log()
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

            def fill(out: Tensor | None, values: Tensor) -> None:
                if out is not None:
                    out.copy_(torch.where(valid, values + nan, 0.0))

            fill(stats.log_probs, target_log_p)
            if stats.entropy is not None:
                p = torch.exp(log_p)
                fill(stats.entropy, -torch.where(p == 0, 0.0, p * log_p).sum(-1))
            if stats.correct is not None:
                # Compare before the softcap, because it may round different logits to one value.
                best = scaled.gather(-1, index[:, None])
                before = torch.arange(columns, device=t.device) < index[:, None]
                beaten = ((scaled > best) | ((scaled == best) & before)).any(-1)
                stats.correct.copy_(valid & inside & ~(beaten | best[:, 0].isnan()))
            if stats.sum_sq_probs is not None:
                fill(stats.sum_sq_probs, torch.exp(2 * log_p).sum(-1))
            if stats.mean_logits is not None:
                fill(stats.mean_logits, t.mean(-1))
            if stats.picked is not None and stats.picked_log_probs is not None:
                at, wrong = picked_index(stats.picked, vocab, t.dtype)
                skipped = ~valid[:, None] | (stats.picked < 0)
                found = log_p.gather(-1, at) + wrong + nan[:, None]
                stats.picked_log_probs.copy_(torch.where(skipped, 0.0, found))
    if grad_output is None:
        return loss, z, lse, None

    scale = torch.where(valid, cast(grad_output.loss, t.dtype) + nan, 0.0)
    at_target = -target_weight * scale
    factor = (target_weight + smooth * weights.sum() + 2 * z_loss * (top + log_sum)) * scale
    grads, values = grad_output.stats, grad_output.values
    if grads.log_probs is not None:
        at_target = at_target + grads.log_probs
        factor = factor - grads.log_probs
    picked_grad = None
    if grads.picked_log_probs is not None:
        assert values.picked is not None
        picked, wrong = picked_index(values.picked, vocab, t.dtype)
        picked_grad = torch.where(values.picked < 0, 0.0, grads.picked_log_probs + wrong)
        factor = factor - picked_grad.sum(-1)
    of_entropy = None  # what is subtracted from the gradient of each logit
    if grads.entropy is not None:
        assert values.entropy is not None
        p = exp / exp_sum[:, None]
        log_p = t - top[:, None] - (log_sum - values.entropy)[:, None]
        # p log p is 0 if p is 0, also if log p is -infinity.
        of_entropy = grads.entropy[:, None] * torch.where(p == 0, 0.0, p * log_p)
    grad = exp.mul_((factor / exp_sum)[:, None])  # nothing reads `exp` after this
    here = index - first_column
    mine = (here >= 0) & (here < columns)
    grad.scatter_add_(
        -1, torch.where(mine, here, 0)[:, None], torch.where(mine, at_target, 0.0)[:, None]
    )
    if label_smoothing:
        grad = grad - (smooth * scale)[:, None] * weights[first_column : first_column + columns]
    if picked_grad is not None:
        here = picked - first_column
        mine = (here >= 0) & (here < columns)
        grad.scatter_add_(-1, torch.where(mine, here, 0), torch.where(mine, picked_grad, 0.0))
    if of_entropy is not None:
        grad = grad - of_entropy
    if tanh is not None:
        grad = grad * (1 - tanh * tanh)
    if logit_scale != 1:
        grad = grad * logit_scale
    if not _known_to_hold(valid):
        # An ignored row gets exact zeros even if its logits are not finite.
        grad = torch.where(valid[:, None], grad, 0.0)
    return loss, z, lse, cast(grad, logits.dtype)


def picked_index(picked: Tensor, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return picked with 0 in place of classes outside the vocabulary, and NaN there, else 0."""
    inside = (picked >= 0) & (picked < vocab)
    return torch.where(inside, picked, 0), cast(torch.where(inside, 0.0, float("nan")), dtype)


def _known_to_hold(condition: Tensor) -> bool:
    """Return whether all elements are True and the host can tell without waiting for a device."""
    if condition.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool(condition.all())


def natural_lse(lse: Tensor, options: CrossEntropyOptions) -> tuple[Tensor, Tensor]:
    """Return the largest t and log(sum(exp(t - largest))) of an lse that this module returned."""
    top, log_sum = lse.unbind(-1)
    return top, log_sum


def kernel_lse(top: Tensor, log_sum: Tensor, options: CrossEntropyOptions) -> Tensor:
    """Return the lse (rows, 2) for `cross_entropy_rows`, from what `natural_lse` returns."""
    return torch.stack((top, log_sum), -1)


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * scale in dtype. scale has one element, and the product is in float32 or wider.

    A scale rounded to the low precision of x would put the same relative error on all elements.
    """
    scale = cast(scale, compute_dtype(x)).view([1] * x.ndim)
    if torch.compiler.is_compiling():
        return cast(x * scale, dtype)
    # Write directly in dtype, so that no float32 product takes memory.
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))
