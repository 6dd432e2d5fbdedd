"""The loss of a projection that is not a plain nn.Linear: its module is called chunk by chunk."""

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels.cross_entropy import row_losses
from ligermodels.kernels.dispatch import compute_dtype
from ligermodels.kernels.linear_cross_entropy import chunk_plan
from ligermodels.kernels.linear_cross_entropy.chunk_plan import gather, scatter, valid_rows
from ligermodels.kernels.loss_options import (
    CrossEntropyOutput,
    LossOptions,
    TokenRequest,
    check_targets,
    checked_token_weights,
    loss_divisor,
    reduce_tokens,
    token_output,
)
from ligermodels.layers.fusion import is_sharded


def replaced_loss(
    proj: nn.Module,
    vocab_size: int,
    hidden: Tensor,
    targets: Tensor,
    options: LossOptions,
) -> CrossEntropyOutput:
    """Compute `linear_cross_entropy` with a projection that is called for each chunk.

    Each chunk runs under `torch.utils.checkpoint`, so backward recomputes its logits. Autograd
    computes and accumulates the projection's gradients. The valid rows of all chunks are
    gathered before the first one.
    """
    class_weights, ignore_index = options.class_weights, options.ignore_index
    shape = hidden.shape[:-1]
    check_targets(targets, shape, vocab_size, class_weights, ignore_index, hidden.device)
    request = options.request_of(targets, vocab_size)
    index, row_targets = valid_rows(targets, options)
    rows = gather(hidden.reshape(-1, hidden.shape[-1]), index)
    chunk_size = options.chunk_size
    if chunk_size is None:
        copied = options.skip_ignored or not hidden.is_contiguous()
        chunk_size = _chunk_size(proj, vocab_size, rows, targets.numel(), copied, request, options)
    alternatives = request.alternatives
    if alternatives is not None and index is not None:
        alternatives = alternatives[index.clamp(max=max(targets.numel() - 1, 0))]

    def chunk_outputs(
        chunk: Tensor,
        chunk_targets: Tensor,
        chunk_alternatives: Tensor | None,
    ) -> tuple[Tensor, ...]:
        asked = request._replace(alternatives=chunk_alternatives)
        return row_losses(proj(chunk), chunk_targets, options, asked)

    # The capture of a CUDA graph may not read the random state, which only dropout needs again.
    keeps_random_state = not _is_captured(rows) or any(map(_drops, proj.modules()))
    made = [
        # Autograd detects in-place changes before backward only in tensors that are arguments
        # of the checkpointed function.
        checkpoint(
            chunk_outputs,
            rows[chunk],
            row_targets[chunk],
            None if alternatives is None else alternatives[chunk],
            use_reentrant=False,
            preserve_rng_state=keeps_random_state,
        )
        for chunk in chunk_plan.chunks(len(rows), chunk_size)
    ]
    loss, z_loss, *stats = (scatter(torch.cat(x), index, targets, ignore_index) for x in zip(*made))
    if options.token_weights is not None:
        weights = checked_token_weights(options.token_weights, targets, ignore_index)
        loss, z_loss = loss * weights, z_loss * weights
    out = token_output(loss, z_loss.detach(), loss, request, stats)
    if options.reduction == "none":
        return out
    return reduce_tokens(out, loss_divisor(targets, options, loss.dtype))


def _drops(module: nn.Module) -> bool:
    """Return whether a module applies dropout to its inputs."""
    # Its public subclasses are Dropout, Dropout1d to 3d, AlphaDropout and FeatureAlphaDropout.
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def _is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph records the operations on x."""
    return (
        not torch.compiler.is_compiling() and x.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def _chunk_size(
    proj: nn.Module,
    vocab_size: int,
    rows: Tensor,
    tokens: int,
    copied: bool,
    request: TokenRequest,
    options: LossOptions,
) -> int:
    """Return how many of the rows (rows, hidden) of all tokens the projection is called with.

    Args: copied: whether the rows are a copy.
    """
    narrow = rows.element_size()
    wide = compute_dtype(rows).itemsize
    copies, row_copies = chunk_plan.wide_copies(rows, request)
    # The larger of two peaks: in backward the logits, their gradient and float32 copies of
    # both; in the loss the logits and the copies that the loss makes.
    logit_bytes = max(2 * narrow + 16, narrow + wide * copies)
    one_row = narrow + wide * (copies + row_copies)
    token_bytes = chunk_plan.TOKEN_BYTES * (1 + options.skip_ignored)
    token_bytes += request.bytes_per_token(chunk_plan.TOKEN_BYTES)
    fixed_bytes = token_bytes * tokens + (rows.numel() * narrow if copied else 0)
    sums = 0
    if torch.is_grad_enabled() and options.max_scratch_bytes is not None:
        # Autograd adds a chunk's parameter gradients to the running sum out of place: the sum,
        # the new gradient and their total exist at the same time.
        sums = sum(3 * _local(p).nbytes for p in proj.parameters() if p.requires_grad)
        if rows.requires_grad:  # Autograd joins the gradients of all chunks' rows.
            fixed_bytes += rows.numel() * narrow
    sizes = chunk_plan.Sizes(
        len(rows),
        vocab_size,
        logit_bytes=logit_bytes,
        accumulator_bytes=sums,
        fixed_bytes=fixed_bytes + max(0, one_row - logit_bytes) * vocab_size,
        vocab_loop=False,
    )
    return chunk_plan.plan_chunks(sizes, options.max_scratch_bytes).chunk_size


def _local(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or this rank's shard of it if it is a DTensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
