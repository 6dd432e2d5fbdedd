"""The two loops of the loss head: over chunks of tokens, and over blocks of the vocabulary.

Both begin a chunk with its logits, and finish it with their gradient. If the vocabulary is split
over ranks, they exchange what depends on all classes in between, while the next chunk's logits are
computed. The gradient of hidden is then this rank's part of a sum over the group.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import outputs_are_stored, select
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.linear_cross_entropy.chunk_plan import ChunkPlan, chunks
from ligermodels.kernels.linear_cross_entropy.valid_rows import gather, zeros_to_scatter_into
from ligermodels.kernels.linear_cross_entropy.vocab_shard import ShardedRows, VocabShard
from ligermodels.kernels.loss_options import (
    CrossEntropyOptions,
    OutputGrads,
    TokenRequest,
    TokenStats,
)


class NeedsGrad(NamedTuple):
    """The gradients that a call needs, or that one loop computes."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


class LossArgs(NamedTuple):
    """The arguments of the loss of a linear head, except hidden, weight and bias."""

    targets: Tensor  # (rows) int64
    row_index: Tensor | None  # (rows) from `valid_rows`: rows of hidden to gather; None takes all
    class_weights: Tensor | None  # (vocab)
    token_weights: Tensor | None  # (rows) factors of the losses of the rows; None if there are none
    divisor: Tensor | None  # scalar that divides the summed loss; None for the loss of each row
    options: CrossEntropyOptions
    plan: ChunkPlan
    needs_grad: NeedsGrad
    request: TokenRequest
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


class Begun(NamedTuple):
    """A chunk of tokens whose logits are computed, and whose gradient is not."""

    hidden: Tensor  # (chunk, in)
    logits: Tensor  # (chunk, classes)
    exchange: ShardedRows | None  # between the ranks that have the vocabulary together


def begin(head: Head, chunk: slice, exchanges: bool, block: slice | None = None) -> Begun:
    """Compute the logits of a chunk of tokens; with block, only those of these classes.

    Args: exchanges: whether the ranks of a split vocabulary compute the losses now.
    """
    _, weight, bias, args = head
    if block is not None:
        weight, bias = weight[block], None if bias is None else bias[block]
    hidden = head.rows(chunk)
    logits = F.linear(hidden, weight, bias)
    exchange = None
    if exchanges and args.shard is not None:
        exchange = ShardedRows(
            logits, args.targets[chunk], args.class_weights, args.options, args.shard
        )
    return Begun(hidden, logits, exchange)


def finish(
    head: Head,
    chunk: slice,
    begun: Begun,
    grad_output: OutputGrads | None = None,
    lse: Tensor | None = None,
    stats: TokenStats | None = None,
    block: slice | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute loss, z-loss, logsumexp and the gradient of the logits of a chunk of tokens.

    Args: grad_output, lse, stats: for the rows of all chunks. If stats is given, this function
        fills it. lse is from an earlier pass. With block, lse must be given.
    Returns: (chunk), (chunk), (chunk, 2) and (chunk, classes); the gradient is None without
        grad_output. If lse is given, the two losses are meaningless.
    """
    hidden, logits, exchange = begun
    args, first_column = head.args, 0 if block is None else block.start
    vocab = len(head.weight)
    if stats is not None:
        stats = stats.rows(chunk)
        stats.fill_likeliest(logits, args.request.top_k)
    lse = None if lse is None else lse[chunk]
    losses = None
    if args.shard is not None:
        vocab, first_column = args.shard.vocab, args.shard.first + first_column
    if exchange is not None:
        losses = exchange.losses(logits, stats)
        if grad_output is None:
            return *losses, None
        lse, stats = losses[2], None
    made = select("cross_entropy", hidden).cross_entropy_rows(
        logits,
        args.targets[chunk],
        None if grad_output is None else grad_output.rows(chunk),
        lse,
        args.class_weights,
        args.options,
        not outputs_are_stored(),
        stats=stats,
        first_column=first_column,
        vocab=vocab,
    )
    return made if losses is None else (*losses, made[3])


class GradSums:
    """The gradients of a linear head: each chunk of tokens adds its own.

    A gradient that is not needed stays None. The weight gradient of a single chunk has the weight's
    dtype (float32 for float16); several chunks give a float32 sum. That of the bias is in float32.
    (Both are in float64 for float64.)
    """

    def __init__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        row_index: Tensor | None,
        needs_grad: NeedsGrad,
        one_chunk: bool,
    ) -> None:
        self.head_weight, self.row_index = head_weight, row_index
        self.needs_weight, self.positions = needs_grad.weight, len(hidden)
        # Only backward divides a float16 gradient, so its sum over tokens could overflow.
        self.narrow = one_chunk and hidden.dtype != torch.float16
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if needs_grad.hidden and row_index is None:
            self.hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        elif needs_grad.hidden:
            self.hidden = zeros_to_scatter_into(hidden)
        if needs_grad.bias:
            self.bias = head_weight.new_zeros(len(head_weight), dtype=compute_dtype(hidden))

    def add(self, chunk: slice, chunk_hidden: Tensor, grad_logits: Tensor) -> None:
        """Add the gradients of a chunk, given its hidden states and the gradient of its logits."""
        if self.hidden is not None and self.row_index is None:
            _product_into(self.hidden, chunk, grad_logits, self.head_weight)
        elif self.hidden is not None and self.row_index is not None:
            self.hidden.index_copy_(0, self.row_index[chunk], grad_logits @ self.head_weight)
        if self.needs_weight and self.narrow:
            self.weight = grad_logits.t() @ chunk_hidden
        elif self.needs_weight:
            self.weight = add_product(self.weight, grad_logits.t(), chunk_hidden)
        if self.bias is not None:
            self.bias = self.bias + grad_logits.sum(0, dtype=self.bias.dtype)

    def of_hidden(self) -> Tensor | None:
        """Return the gradient of all hidden states, without the row for padding."""
        return None if self.hidden is None else self.hidden[: self.positions]


def token_loop(
    head: Head,
    needs_grad: NeedsGrad,
    grad_output: OutputGrads | None = None,
    lse: Tensor | None = None,
    stats: TokenStats | None = None,
) -> TokenLoss:
    """Compute the loss and, given grad_output, the needed gradients, one chunk of tokens at a time.

    If lse of an earlier pass is given, the two losses are meaningless. If stats is given, this
    function fills it. `GradSums` says which dtypes the gradients have.
    """
    hidden, weight, _, args = head
    if grad_output is None or not any(needs_grad):
        grad_output, needs_grad = None, NeedsGrad()
    pieces = chunks(len(args.targets), args.plan.chunk_size)
    grads = GradSums(hidden, weight, args.row_index, needs_grad, len(pieces) == 1)
    exchanges = args.shard is not None and lse is None
    made, begun = [], []
    ahead = int(exchanges)  # the ranks exchange while the next chunk's logits are computed
    for number in range(len(pieces) + ahead):
        if number < len(pieces):
            begun.append(begin(head, pieces[number], exchanges))
        if number < ahead:
            continue
        chunk, current = pieces[number - ahead], begun.pop(0)
        *losses, grad = finish(head, chunk, current, grad_output, lse, stats)
        made.append(losses)
        if grad is not None:
            grads.add(chunk, current.hidden, grad)
        del current, grad  # free them before more logits are computed
    loss, z_loss, lse = made[0] if len(made) == 1 else map(torch.cat, zip(*made))
    return TokenLoss(loss, z_loss, lse, grads.of_hidden(), grads.weight, grads.bias)


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
            begun = begin(head, chunk, False, block)
            *_, grad = finish(head, chunk, begun, grad_output, lse, block=block)
            assert grad is not None
            if chunk_size >= rows:
                _product_into(grad_weight, block, grad.t(), begun.hidden)
            else:
                total = add_product(total, grad.t(), begun.hidden)
            if grad_bias is not None:
                chunk_bias = grad.sum(0, dtype=dtype)
                bias_total = chunk_bias if bias_total is None else bias_total + chunk_bias
            del begun, grad  # free them before the next block's logits
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
