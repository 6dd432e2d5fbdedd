"""The two loops of the loss head: over chunks of tokens, and over blocks of the vocabulary.

Both call `chunk_logits_grad` for a chunk's logits and their gradient. If the vocabulary is split
over ranks, that function reduces what depends on all classes, and the gradient of hidden is this
rank's part of a sum over the group.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import select
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.linear_cross_entropy.chunk_plan import ChunkPlan, chunks
from ligermodels.kernels.linear_cross_entropy.valid_rows import gather, zeros_to_scatter_into
from ligermodels.kernels.linear_cross_entropy.vocab_shard import VocabShard, sharded_rows
from ligermodels.kernels.loss_options import CrossEntropyOptions, OutputGrads, TokenStats


class NeedsGrad(NamedTuple):
    """Which gradients a call needs, or one loop computes."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


class LossArgs(NamedTuple):
    """The arguments of the loss of a linear head, except hidden, weight and bias."""

    targets: Tensor  # (rows) int64
    row_index: Tensor | None  # (rows) from `valid_rows`: rows of hidden to gather; None takes all
    class_weights: Tensor | None  # (vocab)
    divisor: Tensor | None  # scalar that divides the summed loss; None for the loss of each row
    options: CrossEntropyOptions
    plan: ChunkPlan
    needs_grad: NeedsGrad
    with_stats: bool
    shard: VocabShard | None = None  # if the vocabulary is split over ranks: weight is a slice


class Head(NamedTuple):
    """A linear head, its input and the arguments of its loss."""

    hidden: Tensor  # (positions, in)
    weight: Tensor  # (vocab, in)
    bias: Tensor | None  # (vocab)
    args: LossArgs

    def rows(self, chunk: slice) -> Tensor:
        """Gather the hidden states of a chunk of tokens."""
        index = self.args.row_index
        return self.hidden[chunk] if index is None else gather(self.hidden, index[chunk])


class TokenLoss(NamedTuple):
    """The output of `token_loop`. Gradients that it did not compute are None."""

    loss: Tensor  # (rows)
    z_loss: Tensor  # (rows)
    lse: Tensor  # (rows, 2), see `reference.cross_entropy_rows`
    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


def chunk_logits_grad(
    head: Head,
    hidden: Tensor,
    chunk: slice,
    grad_output: OutputGrads | None = None,
    lse: Tensor | None = None,
    stats: TokenStats | None = None,
    block: slice | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute loss, z-loss, logsumexp and the gradient of the logits of a chunk of tokens.

    Args: hidden: the rows of the chunk; grad_output, lse, stats: for the rows of all chunks. If
        stats is given, this function fills it. lse is from an earlier pass. With block, only the
        logits of these classes are computed, and lse must be given.
    Returns: (chunk), (chunk), (chunk, 2) and (chunk, classes); the gradient is None without
        grad_output. If lse is given, the two losses are meaningless.
    """
    _, weight, bias, args = head
    vocab, first_column = len(head.weight), 0 if block is None else block.start
    if block is not None:
        weight, bias = weight[block], None if bias is None else bias[block]
    logits, targets = F.linear(hidden, weight, bias), args.targets[chunk]
    chunk_lse = None if lse is None else lse[chunk]
    chunk_stats = None if stats is None else TokenStats(*(x[chunk] for x in stats))
    losses = None
    if args.shard is not None:
        vocab, first_column = args.shard.vocab, args.shard.first + first_column
        if chunk_lse is None:
            losses = sharded_rows(
                logits, targets, args.class_weights, args.options, args.shard, chunk_stats
            )
            if grad_output is None:
                return *losses, None
            chunk_lse, chunk_stats = losses[2], None
    made = select("cross_entropy", hidden).cross_entropy_rows(
        logits,
        targets,
        None if grad_output is None else grad_output.rows(chunk),
        chunk_lse,
        args.class_weights,
        args.options,
        True,
        stats=chunk_stats,
        first_column=first_column,
        vocab=vocab,
    )
    return made if losses is None else (*losses, made[3])


def token_loop(
    head: Head,
    needs_grad: NeedsGrad,
    grad_output: OutputGrads | None = None,
    lse: Tensor | None = None,
    stats: TokenStats | None = None,
) -> TokenLoss:
    """Compute the loss and, given grad_output, the needed gradients, one chunk of tokens at a time.

    If lse of an earlier pass is given, the two losses are meaningless. If stats is given, this
    function fills it. The weight gradient of a single chunk has the weight's dtype (float32 for
    float16); several chunks give a float32 sum.
    """
    hidden, weight, _, args = head
    index, chunk_size = args.row_index, args.plan.chunk_size
    rows, dtype = len(args.targets), compute_dtype(hidden)
    if grad_output is None or not any(needs_grad):
        grad_output, needs_grad = None, NeedsGrad()
    grad_hidden = grad_weight = grad_bias = None
    if needs_grad.hidden and index is None:
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    elif needs_grad.hidden:
        grad_hidden = zeros_to_scatter_into(hidden)
    if needs_grad.bias:
        grad_bias = torch.zeros(len(weight), dtype=dtype, device=weight.device)
    made = []
    for chunk in chunks(rows, chunk_size):
        chunk_hidden = head.rows(chunk)
        *losses, grad = chunk_logits_grad(head, chunk_hidden, chunk, grad_output, lse, stats)
        made.append(losses)
        if grad is not None:
            if grad_hidden is not None and index is None:
                _product_into(grad_hidden, chunk, grad, weight)
            elif grad_hidden is not None and index is not None:
                grad_hidden.index_copy_(0, index[chunk], grad @ weight)
            # Only backward divides a float16 gradient, so its sum over tokens could overflow.
            if needs_grad.weight and chunk_size >= rows and hidden.dtype != torch.float16:
                grad_weight = grad.t() @ chunk_hidden
            elif needs_grad.weight:
                grad_weight = add_product(grad_weight, grad.t(), chunk_hidden)
            if grad_bias is not None:
                grad_bias = grad_bias + grad.sum(0, dtype=dtype)
        del chunk_hidden, grad  # free them before the next chunk's logits
    if grad_hidden is not None:
        grad_hidden = grad_hidden[: len(hidden)]
    loss, z_loss, lse = made[0] if len(made) == 1 else map(torch.cat, zip(*made))
    return TokenLoss(loss, z_loss, lse, grad_hidden, grad_weight, grad_bias)


def vocab_loop(head: Head, grad_output: OutputGrads, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of weight and bias, in their dtypes, one block of classes at a time.

    This recomputes the logits. It needs no accumulator of the weight's size, because it finishes
    each block before the next.
    """
    hidden, weight, bias, args = head
    vocab_block, chunk_size = args.plan.vocab_block, args.plan.block_chunk_size
    assert vocab_block is not None, "the plan has no blocks of the vocabulary"
    rows, vocab, dtype = len(args.targets), len(weight), compute_dtype(hidden)
    grad_weight = torch.empty_like(weight)  # autograd copies a gradient that has another layout
    grad_bias = None
    if args.needs_grad.bias and bias is not None:
        grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    for first in range(0, vocab, vocab_block):
        block = slice(first, min(first + vocab_block, vocab))
        total = bias_total = None
        for chunk in chunks(rows, chunk_size):
            chunk_hidden = head.rows(chunk)
            *_, grad = chunk_logits_grad(head, chunk_hidden, chunk, grad_output, lse, block=block)
            assert grad is not None
            if chunk_size >= rows:
                _product_into(grad_weight, block, grad.t(), chunk_hidden)
            else:
                total = add_product(total, grad.t(), chunk_hidden)
            if grad_bias is not None:
                chunk_bias = grad.sum(0, dtype=dtype)
                bias_total = chunk_bias if bias_total is None else bias_total + chunk_bias
            del chunk_hidden, grad  # free them before the next block's logits
        if total is not None:
            grad_weight[block] = total
        if grad_bias is not None and bias_total is not None:
            grad_bias[block] = bias_total
    return grad_weight, grad_bias


def _product_into(out: Tensor, rows: slice, a: Tensor, b: Tensor) -> None:
    """Compute out[rows] = a @ b. In eager mode the product needs no temporary tensor."""
    if torch.compiler.is_compiling():
        out[rows] = a @ b
    else:
        torch.mm(a, b, out=out[rows])


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to total in place, or return a @ b if total is None.

    The sum is in float32 (float64 for float64).
    """
    if total is None:
        return _wide_product(a, b)
    _accumulate_product(total, a, b)
    return total


# These are registered ops because torch.compile cannot trace a product with `out_dtype`.


@torch.library.custom_op("ligermodels::wide_product", mutates_args=())
def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, summed and returned in float32 even if a and b have low precision."""
    dtype = compute_dtype(a)
    if a.dtype != dtype and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


@_wide_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=compute_dtype(a))


@torch.library.custom_op("ligermodels::accumulate_product", mutates_args=("total",))
def _accumulate_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total, summed in total's dtype even if a and b have low precision."""
    if a.dtype != total.dtype and total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
