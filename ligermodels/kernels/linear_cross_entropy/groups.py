"""A loss of the log-probabilities of whole sequences, for three matrix products instead of four.

Preference and policy losses depend on all tokens of a sequence, or of a pair or group of sequences.
If the logits of complete groups fit into the budget, the gradient of the loss is known while they
exist.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ligermodels.kernels.checks import check_count, misfit
from ligermodels.kernels.dispatch import (
    compute_dtype,
    refuse_double_backward,
    select,
    without_autocast,
)
from ligermodels.kernels.linear_cross_entropy.autograd import GradSums, Head, LossArgs, scaled_grad
from ligermodels.kernels.linear_cross_entropy.chunk_plan import scatter
from ligermodels.kernels.linear_cross_entropy.functions import linear_loss, make_head, token_outputs
from ligermodels.kernels.linear_cross_entropy.vocab_shard import VocabShard
from ligermodels.kernels.loss_options import (
    LOG_PROB_OPTIONS,
    CrossEntropyOutput,
    LossKeywords,
    LossOptions,
    TokenStats,
    check_known,
    output_grads,
    token_output,
)

GROUP_OPTIONS = LOG_PROB_OPTIONS | {"return_token_stats", "alternatives"}

GroupLoss = Callable[[CrossEntropyOutput, slice], Tensor]
"""A function of the token outputs (sequences, seq) of some sequences, and of which they are."""


def linear_group_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_function: GroupLoss,
    bias: Tensor | None = None,
    *,
    group_size: int = 1,
    vocab_shard: VocabShard | None = None,
    **options: Unpack[LossKeywords],
) -> Tensor:
    """Sum a loss over groups of sequences, each computed from the log-probabilities of its tokens.

    loss_function(tokens, sequences) returns a scalar: the part of the loss of these sequences, a
    slice of the batch. tokens is a `CrossEntropyOutput` whose fields that were asked for are
    (sequences, seq), 0 at ignored targets. The slice holds whole groups. The parts of several calls
    are added up, so a mean must be divided by the number of all groups. The function runs in the
    forward pass, and its tensors of other sequences than the slice must not be used. Other
    tensors that it reads get no gradient.

    If whole groups fit into the budget or chunk_size, forward and backward take three matrix
    products. Otherwise, with max_valid or vocab_shard, for float16, and under torch.compile,
    loss_function is called once for all sequences, and they take four, as `linear_log_probs`.

    Args:
        hidden: (batch, seq, in), floating point. Groups are group_size neighbours in the batch.
        weight: (vocab, in). bias: (vocab). targets: (batch, seq) int64, aligned with hidden.
        return_token_stats, alternatives: the statistics for loss_function, as in
            `linear_cross_entropy`, by default ("log_probs",).
        skip_ignored: whether the matrix products skip ignored targets. It costs two host
            synchronisations.
        options: the others are those of `linear_cross_entropy`.
    Returns: the sum, a scalar.
    Raises:
        ValueError: a shape, dtype or option is wrong, or loss_function does not return a scalar.
        IndexError: a target is outside the vocabulary, on CPU in eager mode.
    """
    check_known("linear_group_loss", options, GROUP_OPTIONS)
    given = group_options(**options)
    group_size = checked_group_size(hidden, group_size)
    if torch.compiler.is_compiling() or given.max_valid is not None or vocab_shard is not None:
        tokens = linear_loss(hidden, weight, targets, bias, given, vocab_shard)
        return checked_loss(loss_function(tokens, slice(0, len(targets))))
    head = make_head(
        *(hidden, weight, targets, bias, given), one_loss=True, may_save_logits_grad=False
    )
    pieces = None if head.hidden.dtype == torch.float16 else _pieces(head, targets, group_size)
    if pieces is None:
        everything = slice(0, len(targets))
        return checked_loss(loss_function(token_outputs(head, targets), everything))
    with without_autocast(head.hidden):
        return _GroupGradsInForward.apply(*head, targets, pieces, loss_function)


def group_options(**options: Unpack[LossKeywords]) -> LossOptions:
    """Return the options of `linear_group_loss`, as those of a loss."""
    options.setdefault("return_token_stats", ("log_probs",))
    options["reduction"] = "none"
    return LossOptions.of(**options)


def checked_group_size(hidden: Tensor, group_size: int) -> int:
    """Return group_size as an int; raise ValueError unless hidden consists of whole groups."""
    group_size = check_count("loss head", "group_size", group_size, 1)
    if hidden.dim() != 3 or len(hidden) % group_size:
        expected = f"(batch, seq, in), with a batch of whole groups of group_size={group_size}"
        raise misfit("loss head", expected, hidden=hidden)
    return group_size


def _pieces(head: Head, targets: Tensor, group_size: int) -> list[tuple[slice, slice]] | None:
    """Return the sequences and the rows of each chunk; None if the budget holds no whole group."""
    args = head.args
    if args.plan.vocab_block is not None or not args.plan.grads_in_forward or not targets.numel():
        return None
    if args.row_index is None:
        counts = [group_size * targets.shape[1]] * (len(targets) // group_size)
    else:
        valid = targets != args.options.ignore_index
        counts = valid.view(len(targets) // group_size, -1).sum(1).tolist()
    if max(counts) > args.plan.chunk_size:
        return None
    pieces, first, start, rows = [], 0, 0, 0
    for group, count in enumerate([*counts, args.plan.chunk_size + 1]):
        if rows + count > args.plan.chunk_size and group > first:
            sequences = slice(first * group_size, group * group_size)
            pieces.append((sequences, slice(start, start + rows)))
            first, start, rows = group, start + rows, 0
        rows += count
    return pieces


class _GroupGradsInForward(torch.autograd.Function):
    """Compute the loss of each chunk of groups, and at once all gradients; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        args: LossArgs,
        targets: Tensor,
        pieces: list[tuple[slice, slice]],
        loss_function: GroupLoss,
    ) -> Tensor:
        head = Head(hidden, weight, bias, args)
        ops = select("cross_entropy", hidden)
        grads = GradSums(hidden, weight, args.row_index, args.needs_grad, len(pieces) == 1)
        total = hidden.new_zeros((), dtype=compute_dtype(hidden))
        for sequences, chunk in pieces:
            chunk_hidden = head.rows(chunk)
            logits = F.linear(chunk_hidden, weight, bias)
            request = args.request
            if request.alternatives is not None:
                request = request._replace(alternatives=request.alternatives[chunk])
            stats = TokenStats.empty(len(logits), logits, request) or TokenStats()
            row_targets, found = args.targets[chunk], None
            losses, _, lse, _ = ops.cross_entropy_rows(
                logits, row_targets, None, None, None, args.options, False, stats=stats
            )
            with torch.enable_grad():
                fixed = {id(x) for x in stats.without_gradient()}
                leaves = [
                    x.detach().requires_grad_(id(x) not in fixed)
                    for x in (losses, *stats.tensors())
                ]
                loss, *others = (_placed(x, args, chunk, targets, sequences) for x in leaves)
                tokens = token_output(loss, torch.zeros_like(loss), loss, request, others)
                part = checked_loss(loss_function(tokens, sequences))
                total += part.detach()
                if any(args.needs_grad) and part.requires_grad:
                    wanted = [x for x in leaves if x.requires_grad]
                    found = iter(torch.autograd.grad(part, wanted, allow_unused=True))
            if any(args.needs_grad):
                upstream = [next(found) if found and x.requires_grad else None for x in leaves]
                of_loss = torch.zeros_like(losses) if upstream[0] is None else upstream[0]
                grad_output = output_grads(of_loss, request.names, upstream[1:], stats, lse)
                *_, grad_logits = ops.cross_entropy_rows(
                    logits, row_targets, grad_output, lse, None, args.options, True
                )
                grads.add(chunk, chunk_hidden, grad_logits)
                del grad_logits
            del chunk_hidden, logits  # free them before the next chunk's logits
        ctx.save_for_backward(grads.of_hidden(), grads.weight, grads.bias)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("loss head")
        grads = (scaled_grad(grad, grad_output, ctx.dtype) for grad in ctx.saved_tensors)
        return *grads, *[None] * 4


def _placed(
    values: Tensor, args: LossArgs, chunk: slice, targets: Tensor, sequences: slice
) -> Tensor:
    """Put the values of the rows of a chunk into the shape (sequences, seq) of its targets."""
    index = args.row_index
    if index is not None:
        index = index[chunk] - sequences.start * targets.shape[1]
    return scatter(values, index, targets[sequences], args.options.ignore_index)


def checked_loss(loss: object) -> Tensor:
    """Return what a loss_function returned; raise ValueError unless it is a scalar tensor."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise misfit("loss head", "a scalar tensor from loss_function", result=loss)
    return loss
