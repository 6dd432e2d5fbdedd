"""The loss of a linear head, chunk by chunk: the logits of all tokens never exist together.

Where the loss is one number, its gradients are computed in the forward pass while a chunk's
logits are at hand (three matrix products in all); backward scales them by the upstream gradient.
With reduction "none" the upstream gradient of each token is needed first, so backward computes
the logits again (four products).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.autocast import cast_operands, without_autocast
from ligermodels.kernels.backend import refuse_double_backward, select
from ligermodels.kernels.cross_entropy import (
    check_cross_entropy,
    check_reduction,
    loss_divisor,
)
from ligermodels.kernels.reference import CrossEntropyOptions, compute_dtype

DEFAULT_LOGITS_BYTES = 2**30
"""Default scratch for logits; the float32 accumulator of the weight gradient comes on top."""


def choose_chunk(
    rows: int, bytes_per_row: int, accumulator_bytes: int, max_scratch_bytes: int | None
) -> int:
    """Rows per chunk: all where that fits the budget, else what fits beside the accumulator.

    A single chunk needs no accumulator. Chunks are multiples of 128 rows where the budget allows.

    Raises:
        ValueError: the budget does not hold the accumulator and one row; says what would.
    """
    fixed = 64 * rows  # float32 and int64 values per token: loss, z-loss, logsumexp, masks
    if max_scratch_bytes is None:
        budget = accumulator_bytes + DEFAULT_LOGITS_BYTES + fixed
    else:
        budget = max_scratch_bytes
    if rows * bytes_per_row + fixed <= budget:
        return max(rows, 1)
    chunk = (budget - accumulator_bytes - fixed) // bytes_per_row
    if chunk < 1:
        if max_scratch_bytes is None:
            return 1
        raise ValueError(
            f"linear_cross_entropy: max_scratch_bytes={max_scratch_bytes} is too small for "
            f"{rows} tokens; it must hold the float32 weight gradient ({accumulator_bytes} bytes), "
            f"64 bytes a token and one row of logits: at least "
            f"{accumulator_bytes + fixed + bytes_per_row}"
        )
    return chunk if chunk < 128 else chunk - chunk % 128


@torch.library.custom_op("ligermodels::accumulate_product", mutates_args=("total",))
def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the products of low-precision a and b summed in total's dtype.

    A registered op because torch.compile cannot trace `addmm` with an `out_dtype`.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _product_into(out: Tensor, rows: slice, a: Tensor, b: Tensor) -> None:
    """out[rows] = a @ b without a copy of the product, which eager PyTorch would keep beside it."""
    if torch.compiler.is_compiling():
        out[rows] = a @ b
    else:
        torch.mm(a, b, out=out[rows])


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_scale: Tensor | None,
    lse: Tensor | None,
    class_weights: Tensor | None,
    options: CrossEntropyOptions,
    chunk: int,
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Loss, z-loss and logsumexp of each row and the gradients of sum(row_scale * loss).

    wants says which of hidden, weight and bias need one. The weight's comes in weight's dtype
    from a single chunk and as a float32 sum from several.
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    ops = select(hidden)
    dtype = compute_dtype(hidden)
    several = chunk < rows
    losses, z_losses, lses = [], [], []
    grad_hidden = grad_weight = grad_bias = None
    if wants[0]:
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if wants[1] and (several or rows == 0):
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    if wants[2]:
        grad_bias = torch.zeros(vocab, dtype=dtype, device=weight.device)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        part_hidden = hidden[part]
        part_scale = row_scale
        if row_scale is not None and row_scale.numel() > 1:
            part_scale = row_scale[part]
        logits = F.linear(part_hidden, weight, bias)
        loss, z_loss, part_lse, grad = ops.cross_entropy_rows(
            logits,
            targets[part],
            part_scale,
            None if lse is None else lse[part],
            class_weights,
            options,
            True,
        )
        losses.append(loss)
        z_losses.append(z_loss)
        lses.append(part_lse)
        if grad is not None:
            if grad_hidden is not None:
                _product_into(grad_hidden, part, grad, weight)
            if wants[1]:
                if several and grad_weight is not None:
                    _accumulate(grad_weight, grad.t(), part_hidden)
                else:
                    grad_weight = grad.t() @ part_hidden
            if wants[2]:
                grad_bias = grad_bias + grad.sum(0, dtype=dtype)
        del logits, grad  # before the next chunk's logits are made

    def join(parts: list[Tensor]) -> Tensor:
        if not parts:
            return torch.zeros(0, dtype=dtype, device=hidden.device)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return join(losses), join(z_losses), join(lses), (grad_hidden, grad_weight, grad_bias)


def _scaled(grad: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """grad * scale in dtype, out of place: backward may run twice over a retained graph.

    The product is float32 (a scale of one dimension or more takes part in the promotion), else
    bfloat16 would round the scale and with it all gradients alike.
    """
    if grad is None:
        return None
    scale = scale.view([1] * grad.ndim)
    if torch.compiler.is_compiling():
        return (grad * scale).to(dtype)
    # Straight into dtype: a scaled float32 weight gradient is never held beside its accumulator.
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


class _ReducedLoss(torch.autograd.Function):
    """sum(loss) / divisor, with the gradients made on the way."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, divisor, class_weights, options, chunk, wants):
        # float16 gradients of a mean over many tokens would underflow; there the division waits
        # for backward, where the loss scale of float16 training is at hand.
        late = hidden.dtype == torch.float16
        row_scale = None
        if any(wants):
            row_scale = (torch.ones_like(divisor) if late else 1 / divisor).view(1)
        loss, z_loss, _, grads = _chunks(
            hidden, weight, bias, targets, row_scale, None, class_weights, options, chunk, wants
        )
        ctx.save_for_backward(*grads, divisor)
        ctx.late = late
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        z_sum = z_loss.sum() / divisor
        ctx.mark_non_differentiable(z_sum, loss)
        return loss.sum() / divisor, z_sum, loss

    @staticmethod
    def backward(ctx, upstream, *_):
        refuse_double_backward("linear_cross_entropy")
        if upstream is None:
            return (None,) * 9
        *grads, divisor = ctx.saved_tensors
        scale = upstream / divisor if ctx.late else upstream
        scaled = [_scaled(grad, scale, dtype) for grad, dtype in zip(grads, ctx.dtypes)]
        return *scaled, *[None] * 6


class _TokenLoss(torch.autograd.Function):
    """The loss of each row; gradients are made in backward from the upstream gradient of each."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, class_weights, options, chunk, wants):
        loss, z_loss, lse, _ = _chunks(
            hidden, weight, bias, targets, None, None, class_weights, options, chunk, wants
        )
        ctx.save_for_backward(hidden, weight, bias, targets, class_weights, lse)
        ctx.options = options, chunk, wants
        ctx.mark_non_differentiable(z_loss)
        return loss, z_loss

    @staticmethod
    def backward(ctx, upstream, _):
        refuse_double_backward("linear_cross_entropy")
        hidden, weight, bias, targets, class_weights, lse = ctx.saved_tensors
        options, chunk, wants = ctx.options
        with without_autocast(hidden):
            *_, grads = _chunks(
                hidden,
                weight,
                bias,
                targets,
                upstream.contiguous(),
                lse,
                class_weights,
                options,
                chunk,
                wants,
            )
        grad_hidden, grad_weight, grad_bias = grads
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None and bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 5


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of softcap(logit_scale * (hidden weight^T + bias)) within a scratch budget.

    softcap(x) = c tanh(x / c) (Gemma 2). Label smoothing and class weights follow
    `torch.nn.functional.cross_entropy`. The z-loss, z * logsumexp(logits)^2 a token (PaLM,
    arXiv:2204.02311), is part of the loss.

    Args:
        hidden: (..., in), float.
        weight: (vocab, in), hidden's dtype (autocast casts both).
        targets: (...) int64, aligned with hidden: no shift here.
        bias: (vocab).
        reduction: "mean" divides the sum by the normalizer, "sum" by nothing, "none" gives a loss
            for each token, 0 where the target is ignored.
        normalizer: number or 0-d tensor for "mean"; default the number of valid targets, or with
            class weights the sum of theirs. Not differentiated.
        ignore_index: the target that counts for nothing.
        chunk_size: rows of logits at a time; overrides the budget.
        max_scratch_bytes: most memory to hold beyond inputs, outputs and gradients; default
            2^30 bytes of logits plus the float32 accumulator of the weight gradient (vocab * in
            * 4 bytes), which is needed only where several chunks are. The hidden gradient made in
            forward is kept for backward and counts as a gradient.
    Returns: loss, z-loss within it, loss of each token (...): float32, only the first
        differentiable (with reduction "none" the first and the last are the same). All targets
        ignored: loss 0, zero gradients. The weight gradient is accumulated in float32.
    Raises:
        ValueError: shapes, dtypes or options that do not fit, a budget too small.
        IndexError: a target outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    vocab = weight.shape[0]
    if hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)} and weight "
            f"{tuple(weight.shape)} differ in their last dimension"
        )
    check_cross_entropy(targets, hidden.shape[:-1], vocab, options, class_weights)
    check_reduction(reduction, normalizer)
    hidden, weight, bias = cast_operands(hidden, hidden, weight, bias)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"linear_cross_entropy: hidden is {hidden.dtype} and weight {weight.dtype}; cast one, "
            "or run under torch.autocast"
        )
    grad = torch.is_grad_enabled()
    wants = (
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    rows = targets.numel()
    if chunk_size is None:
        accumulates = wants[1] and not compute_dtype(hidden) == torch.float64
        # Plain PyTorch holds several float32 copies of a chunk, the kernels work in place.
        copies = 0 if select(hidden).__name__.endswith(".triton") else 6
        chunk_size = choose_chunk(
            rows,
            vocab * (hidden.element_size() + 4 * copies),
            vocab * hidden.shape[-1] * 4 if accumulates else 0,
            max_scratch_bytes,
        )
    elif not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"linear_cross_entropy: chunk_size={chunk_size!r} must be 1 or more rows")
    rows_hidden, rows_targets = hidden.reshape(-1, hidden.shape[-1]), targets.flatten()
    with without_autocast(hidden):
        if reduction == "none":
            loss, z = _TokenLoss.apply(
                rows_hidden, weight, bias, rows_targets, class_weights, options, chunk_size, wants
            )
            loss = loss.view(targets.shape)
            return loss, z.view(targets.shape), loss
        dtype = compute_dtype(hidden)
        divisor = loss_divisor(targets, reduction, normalizer, class_weights, ignore_index, dtype)
        loss, z, token_loss = _ReducedLoss.apply(
            rows_hidden,
            weight,
            bias,
            rows_targets,
            divisor,
            class_weights,
            options,
            chunk_size,
            wants,
        )
    return loss, z, token_loss.view(targets.shape)
