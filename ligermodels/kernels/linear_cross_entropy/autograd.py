"""The loss of a linear head and its gradients, computed chunk by chunk.

Each autograd Function here is one of (hidden, weight, bias, args). They differ in the pass that
computes the gradients, and in what is saved for it. `linear_loss` in functions.py chooses one.
`token_loop` goes over chunks of tokens: it computes the logits of a chunk, their losses and their
gradient, which `GradSums` turns into those of hidden, weight and bias. `vocab_loop` does so for
blocks of the vocabulary, where the budget cannot hold a float32 sum of the weight gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import (
    compute_dtype,
    outputs_are_stored,
    refuse_double_backward,
    select,
    without_autocast,
)
from ligermodels.kernels.linear_cross_entropy.chunk_plan import (
    ChunkPlan,
    chunks,
    gather,
    zeros_to_scatter_into,
)
from ligermodels.kernels.linear_cross_entropy.vocab_shard import ShardedRows, VocabShard
from ligermodels.kernels.loss_options import (
    CrossEntropyOptions,
    OutputGrads,
    TokenRequest,
    TokenStats,
    output_grads,
    target_weights,
)


class NeedsGrad(NamedTuple):
    """The gradients that a call needs, or that one loop computes."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "NeedsGrad":
        """Return which of the tensors get a gradient."""
        grad = torch.is_grad_enabled()
        return cls(
            hidden=grad and hidden.requires_grad,
            weight=grad and weight.requires_grad,
            bias=grad and bias is not None and bias.requires_grad,
        )


class LossArgs(NamedTuple):
    """The arguments of the loss of a linear head, except hidden, weight and bias."""

    targets: Tensor  # (rows) int64
    row_index: Tensor | None  # (rows) the rows of hidden to gather; None takes all
    class_weights: Tensor | None  # (vocab)
    token_weights: Tensor | None  # (rows) factors of the losses of the rows; None if there are none
    divisor: Tensor | None  # scalar that divides the summed loss; None for the loss of each row
    options: CrossEntropyOptions
    plan: ChunkPlan
    needs_grad: NeedsGrad
    request: TokenRequest
    shard: VocabShard | None = None  # if the vocabulary is split over ranks: weight is a slice

    @property
    def one_chunk(self) -> bool:
        """Whether all rows are one chunk."""
        return len(self.targets) <= self.plan.chunk_size


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


class GradsInForward(torch.autograd.Function):
    """Return sum(loss) / divisor. Forward computes the gradients; backward scales them.

    Both passes together take three matrix products. If the plan has blocks of the vocabulary,
    `vocab_loop` in backward computes the gradients of weight and bias, and they take four.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: LossArgs
    ) -> tuple[Tensor, ...]:
        head = Head(hidden, weight, bias, args)
        ctx.later = args.plan.vocab_block is not None
        needs_grad = NeedsGrad(hidden=args.needs_grad.hidden) if ctx.later else args.needs_grad
        grad_output, late_scale = _forward_scale(head)
        stats = TokenStats.empty(len(args.targets), hidden, args.request)
        grads = GradSums(hidden, weight, args.row_index, needs_grad, args.one_chunk)
        add = grads.add if any(needs_grad) else None
        loss, z_loss, lse = token_loop(head, grad_output, add, stats=stats)
        if ctx.later:
            _save_head(ctx, head, lse, grads.of_hidden(), late_scale)
        else:
            grad_weight = grads.weight
            if grad_weight is not None and args.plan.round_weight_grad:
                grad_weight = grad_weight.to(weight.dtype)
            ctx.save_for_backward(grads.of_hidden(), grad_weight, grads.bias, late_scale)
            ctx.dtype = hidden.dtype
        return _mean(ctx, head, loss, z_loss, stats)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("loss head")
        if grad_output is None:
            return (None,) * 4
        if not ctx.later:
            *grads, late_scale = ctx.saved_tensors
            scale = grad_output if late_scale is None else grad_output * late_scale
            return *(scaled_grad(grad, scale, ctx.dtype) for grad in grads), None
        head, lse, grad_hidden, late_scale = _saved_head(ctx)
        scale = grad_output if late_scale is None else grad_output * late_scale
        grad_hidden = scaled_grad(grad_hidden, scale, head.hidden.dtype)
        with without_autocast(head.hidden):
            upstream = OutputGrads(_weighted((grad_output / head.args.divisor).view(1), head.args))
            return grad_hidden, *vocab_loop(head, upstream, lse), None


class LogitsGradInForward(torch.autograd.Function):
    """Return sum(loss) / divisor. Forward saves the gradient of the logits, for backward.

    This is for a single chunk. On a GPU the chunk has at most min(in, vocab) tokens, whose logits
    take no more memory than the weight. Both passes together take three matrix products, and no
    tensor of the weight's size is scaled.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: LossArgs
    ) -> tuple[Tensor, ...]:
        head = Head(hidden, weight, bias, args)
        grad_output, late_scale = _forward_scale(head)
        stats = TokenStats.empty(len(args.targets), hidden, args.request)
        grads: list[Tensor] = []
        loss, z_loss, _ = token_loop(
            head, grad_output, lambda chunk, rows, grad: grads.append(grad), stats=stats
        )
        needed_weight = weight if args.needs_grad.hidden else None
        ctx.save_for_backward(hidden, needed_weight, args.row_index, *grads, late_scale)
        ctx.needs_bias = args.needs_grad.bias
        return _mean(ctx, head, loss, z_loss, stats)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("loss head")
        if grad_output is None:
            return (None,) * 4
        hidden, weight, index, grad_logits, late_scale = ctx.saved_tensors
        scale = grad_output if late_scale is None else grad_output * late_scale
        ops, dtype = select("cross_entropy", hidden), hidden.dtype
        grad_hidden = grad_bias = None
        with without_autocast(hidden):
            rows = gather(hidden, index)
            if dtype == torch.float16:
                # Scaled float16 rows could overflow or underflow, so scale the float32 product.
                grad_weight = ops.scaled(add_product(None, grad_logits.t(), rows), scale, dtype)
            else:
                grad_weight = grad_logits.t() @ ops.scaled(rows, scale, dtype)
            del rows
            if weight is not None:
                grad_hidden = ops.scaled(grad_logits @ weight, scale, dtype)
                if index is not None:
                    padded = zeros_to_scatter_into(hidden).index_copy_(0, index, grad_hidden)
                    grad_hidden = padded[: len(hidden)]
            if ctx.needs_bias:
                bias_sum = grad_logits.sum(0, dtype=compute_dtype(hidden))
                grad_bias = ops.scaled(bias_sum, scale, dtype)
        return grad_hidden, grad_weight, grad_bias, None


class RecomputeInBackward(torch.autograd.Function):
    """Return the loss and the statistics of each token, for any upstream gradients.

    Backward recomputes the logits and computes all gradients. Both passes together take four matrix
    products, or five if `vocab_loop` computes the weight gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: LossArgs
    ) -> tuple[Tensor, ...]:
        head = Head(hidden, weight, bias, args)
        stats = TokenStats.empty(len(args.targets), hidden, args.request)
        loss, z_loss, lse = token_loop(head, stats=stats)
        stats = TokenStats() if stats is None else stats
        _save_head(ctx, head, lse, stats.entropy, stats.picked)
        ctx.names = args.request.names
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(z_loss, *stats.without_gradient())
        return loss, z_loss, *stats.tensors()

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor | None, _: None, *grad_stats: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("loss head")
        if grad_loss is None and all(grad is None for grad in grad_stats):
            return (None,) * 4
        head, lse, entropy, picked = _saved_head(ctx)
        values = TokenStats(entropy=entropy, picked=picked)
        grad_output = output_grads(grad_loss, ctx.names, grad_stats, values, lse)
        assert grad_output is not None, "some output has a gradient"
        hidden, weight, _, args = head
        blocks, needs_grad = args.plan.vocab_block is not None, args.needs_grad
        if blocks:
            needs_grad = NeedsGrad(hidden=needs_grad.hidden)
        grads = GradSums(hidden, weight, args.row_index, needs_grad, args.one_chunk)
        with without_autocast(hidden):
            if any(needs_grad):
                token_loop(head, grad_output, grads.add, lse)
            if blocks:
                return grads.of_hidden(), *vocab_loop(head, grad_output, lse), None
        return *grads.in_dtype(weight.dtype), None


def token_loop(
    head: Head,
    grad_output: OutputGrads | None = None,
    add: Callable[[slice, Tensor, Tensor], object] | None = None,
    lse: Tensor | None = None,
    stats: TokenStats | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses and the gradients of the logits, one chunk of tokens at a time.

    If the vocabulary is split over ranks, they exchange what depends on all classes while the next
    chunk's logits are computed. The gradient of hidden is then this rank's part of a sum.

    Args:
        grad_output, add: the upstream gradients, and what is called with each chunk, its hidden
            states (chunk, in) and the gradient of its logits (chunk, vocab), if it is needed.
        lse: from an earlier pass.
        stats: this function fills it.
    Returns: loss (rows), z-loss (rows) and lse (rows, 2), see `reference.cross_entropy_rows`. If
        lse is given, the two losses are meaningless.
    """
    _, weight, bias, args = head
    if add is None:
        grad_output = None
    pieces = chunks(len(args.targets), args.plan.chunk_size)
    exchanging = args.shard is not None and lse is None
    made: list[tuple[Tensor, ...]] = []
    begun: list[tuple[Tensor, Tensor, ShardedRows | None]] = []
    ahead = int(exchanging)
    for number in range(len(pieces) + ahead):
        if number < len(pieces):
            chunk = pieces[number]
            rows = head.rows(chunk)
            logits = F.linear(rows, weight, bias)
            exchange = None
            if exchanging and args.shard is not None:
                exchange = ShardedRows(
                    logits, args.targets[chunk], args.class_weights, args.options, args.shard
                )
            begun.append((rows, logits, exchange))
        if number < ahead:
            continue
        chunk = pieces[number - ahead]
        rows, logits, exchange = begun.pop(0)
        chunk_lse = None if lse is None else lse[chunk]
        chunk_stats = None if stats is None else stats.rows(chunk)
        if chunk_stats is not None:
            chunk_stats.fill_likeliest(logits, args.request.top_k)
        if exchange is None:
            *losses, grad = _loss_of_logits(
                head, chunk, logits, grad_output, chunk_lse, chunk_stats
            )
        else:
            losses, grad = list(exchange.losses(logits, chunk_stats)), None
            if grad_output is not None:
                *_, grad = _loss_of_logits(head, chunk, logits, grad_output, losses[2])
        made.append(tuple(losses))
        if add is not None and grad is not None:
            add(chunk, rows, grad)
        del rows, logits, exchange, grad  # free them before more logits are computed
    loss, z_loss, lse = made[0] if len(made) == 1 else map(torch.cat, zip(*made))
    return loss, z_loss, lse


def _loss_of_logits(
    head: Head,
    chunk: slice,
    logits: Tensor,
    grad_output: OutputGrads | None,
    lse: Tensor | None,
    stats: TokenStats | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return what `reference.cross_entropy_rows` does for the logits of a chunk of tokens.

    Args: grad_output is of the rows of all chunks, lse and stats of this one's. first is the first
        of the weight's classes that has logits.
    """
    args, vocab = head.args, len(head.weight)
    if args.shard is not None:
        first, vocab = args.shard.first + first, args.shard.vocab
    return select("cross_entropy", head.hidden).cross_entropy_rows(
        logits,
        args.targets[chunk],
        None if grad_output is None else grad_output.rows(chunk),
        lse,
        args.class_weights,
        args.options,
        not outputs_are_stored(),
        stats=stats,
        first_column=first,
        vocab=vocab,
    )


def vocab_loop(head: Head, grad_output: OutputGrads, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of weight and bias, in their dtypes, one block of classes at a time.

    This recomputes the logits. It needs no accumulator of the weight's size, because it finishes
    each block before the next.
    """
    hidden, weight, bias, args = head
    vocab_block, chunk_size = args.plan.vocab_block, args.plan.block_chunk_size
    assert vocab_block is not None, "the plan has no blocks of the vocabulary"
    total_rows, vocab, dtype = len(args.targets), len(weight), compute_dtype(hidden)
    grad_weight = torch.empty_like(weight)  # autograd copies a gradient that has another layout
    grad_bias = None
    if args.needs_grad.bias and bias is not None:
        grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    for first in range(0, vocab, vocab_block):
        block = slice(first, min(first + vocab_block, vocab))
        total = bias_total = None
        for chunk in chunks(total_rows, chunk_size):
            rows = head.rows(chunk)
            logits = F.linear(rows, weight[block], None if bias is None else bias[block])
            *_, grad = _loss_of_logits(head, chunk, logits, grad_output, lse[chunk], first=first)
            assert grad is not None
            if chunk_size >= total_rows:
                _product_into(grad_weight, block, grad.t(), rows)
            else:
                total = add_product(total, grad.t(), rows)
            if grad_bias is not None:
                chunk_bias = grad.sum(0, dtype=dtype)
                bias_total = chunk_bias if bias_total is None else bias_total + chunk_bias
            del rows, logits, grad  # free them before the next block's logits
        if total is not None:
            grad_weight[block] = total
        if grad_bias is not None and bias_total is not None:
            grad_bias[block] = bias_total
    return grad_weight, grad_bias


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

    def in_dtype(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias in the dtype of the parameters."""
        made = self.of_hidden(), self.weight, self.bias
        return tuple(None if x is None else x.to(dtype) for x in made)


def _mean(
    ctx: Any, head: Head, loss: Tensor, z_loss: Tensor, stats: TokenStats | None
) -> tuple[Tensor, ...]:
    """Return the outputs of a strategy with one loss. Only this loss is differentiable."""
    loss, z_loss = _weighted(loss, head.args), _weighted(z_loss, head.args)
    divisor = head.args.divisor
    assert divisor is not None, "a strategy with one loss has a divisor"
    mean, z_mean = loss.sum() / divisor, z_loss.sum() / divisor
    made = [] if stats is None else stats.tensors()
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(z_mean, loss, *made)
    return mean, z_mean, loss, *made


def _weighted(x: Tensor, args: LossArgs) -> Tensor:
    """Multiply a number of each row, or one of all rows, by the rows' weights, if there are any."""
    return x if args.token_weights is None else x * args.token_weights


def _save_head(ctx: Any, head: Head, *others: Tensor | None) -> None:
    """Save the inputs of the logits, and other tensors, for `_saved_head` in backward."""
    # Autograd checks that saved tensors were not modified, and frees them after backward.
    hidden, weight, bias, args = head
    *tensors, options, plan, needs_grad, request, shard = args
    ctx.settings = (options, plan, needs_grad, request._replace(alternatives=None), shard)
    ctx.save_for_backward(hidden, weight, bias, *tensors, *others)


def _saved_head(ctx: Any) -> tuple[Any, ...]:
    hidden, weight, bias, targets, index, weights, factors, divisor, *others = ctx.saved_tensors
    args = LossArgs(targets, index, weights, factors, divisor, *ctx.settings)
    return Head(hidden, weight, bias, args), *others


def scaled_grad(grad: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Scale out of place, because backward may run twice over a retained graph."""
    return None if grad is None else select("cross_entropy", grad).scaled(grad, scale, dtype)


def _forward_scale(head: Head) -> tuple[OutputGrads | None, Tensor | None]:
    """Return the scale of the gradients in forward, and the factor that is left for backward.

    Forward scales with 1 / divisor and leaves no factor (None), except for float16, where gradients
    of a mean over many tokens would underflow. There forward keeps them near 1, and backward
    multiplies with the rest, together with the loss scale of float16 training.
    """
    divisor = head.args.divisor
    assert divisor is not None, "a strategy with one loss has a divisor"
    if not any(head.args.needs_grad):
        return None, None
    if head.hidden.dtype != torch.float16:
        return OutputGrads(_weighted((1 / divisor).view(1), head.args)), None
    bound = _gradient_bound(head.args, divisor)
    return OutputGrads(_weighted((1 / bound).view(1), head.args)), bound / divisor


def _gradient_bound(args: LossArgs, like: Tensor) -> Tensor:
    """Estimate the largest gradient of a row's loss with respect to its logits.

    It is about the logit scale, times a class weight if there are class weights. The result is a
    scalar with the dtype and device of `like`.
    """
    _, label_smoothing, _, _, logit_scale = args.options
    bound = torch.full_like(like, logit_scale)
    if len(args.targets) == 0:
        return bound
    if args.token_weights is not None:
        bound = bound * args.token_weights.abs().amax()
    if args.class_weights is None:
        return torch.where(bound == 0, 1.0, bound)
    weights = args.class_weights.to(like.dtype).abs()
    largest = target_weights(args.targets, weights, args.options.ignore_index).amax()
    bound = bound * ((1 - label_smoothing) * largest + label_smoothing * weights.mean())
    return torch.where(bound == 0, 1.0, bound)


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
