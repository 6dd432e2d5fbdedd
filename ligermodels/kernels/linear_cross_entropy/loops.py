"""The loops of the loss head: over rows of tokens, and over columns of the vocabulary."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import select
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.linear_cross_entropy.chunk_plan import Plan
from ligermodels.kernels.linear_cross_entropy.valid_rows import take_rows
from ligermodels.kernels.loss_options import CrossEntropyOptions, StatsScale, TokenStats


class Wants(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class Task(NamedTuple):
    """What a head is asked and how it goes about it: all that gets no gradient."""

    targets: Tensor  # (rows) int64
    taken: Tensor | None  # (rows) positions of the rows taken, or all; see `valid_rows`
    class_weights: Tensor | None  # (vocab)
    options: CrossEntropyOptions
    plan: Plan
    wants: Wants
    with_stats: bool = False
    few_rows: bool = False  # whether the gradient of all logits is smaller than one that is wanted

    def holds_logits(self) -> bool:
        """Whether forward keeps the gradient of the logits, and backward makes the others of it."""
        return self.few_rows and self.plan.columns is None and len(self.targets) <= self.plan.rows

    def by_columns(self) -> bool:
        """Whether the gradients of weight and bias are left to `column_loop`."""
        return self.plan.columns is not None and self.wants.weight


class Head(NamedTuple):
    """A linear head, the hidden states it is given, and its task."""

    hidden: Tensor  # (positions, in)
    weight: Tensor  # (vocab, in)
    bias: Tensor | None  # (vocab)
    task: Task

    def rows(self, part: slice) -> Tensor:
        """The hidden states of some rows."""
        if self.task.taken is None:
            return self.hidden[part]
        return take_rows(self.hidden, self.task.taken[part])

    def logits(self, hidden: Tensor, columns: slice) -> Tensor:
        """The logits of some rows of hidden for some classes."""
        bias = None if self.bias is None else self.bias[columns]
        return F.linear(hidden, self.weight[columns], bias)


class Upstream(NamedTuple):
    """Gradients with respect to what the head says of each row; `loss` may be one for all."""

    loss: Tensor  # (rows) or (1,)
    stats: StatsScale | None = None

    def part(self, rows: slice) -> "Upstream":
        """Those of some rows."""
        loss = self.loss if self.loss.numel() == 1 else self.loss[rows]
        if self.stats is None:
            return Upstream(loss)
        return Upstream(loss, StatsScale(*(None if x is None else x[rows] for x in self.stats)))


class Rows(NamedTuple):
    """What the row loop makes; each gradient is None unless it is wanted and made there."""

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None
    grad_logits: Tensor | None = None


def parts(rows: int, chunk: int) -> list[slice]:
    """The chunks of rows, at least one; compiled, one graph for all `rows` of as many chunks."""
    starts = [i * chunk for i in range(max(1, -(-rows // chunk)))]  # a range to `rows` would fix it
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows])]


def row_loop(
    head: Head,
    upstream: Upstream | None = None,
    lse: Tensor | None = None,
    stats: TokenStats | None = None,
    hold_logits: bool = False,
) -> Rows:
    """Chunk of rows by chunk of rows: the loss and, given upstream, the gradients wanted.

    With hold_logits, for a single chunk, the gradient of the logits and no other.

    With an lse from an earlier pass the losses may be anything. The weight gradient comes in the
    weight's dtype from a single chunk (float32 where that is float16) and as a float32 sum from
    several; where the plan has columns, it and the bias's are left to `column_loop`. stats is
    filled where given.
    """
    hidden, weight, _, task = head
    targets, taken, chunk = task.targets, task.taken, task.plan.rows
    rows, everything = len(targets), slice(None)
    ops, dtype = select("cross_entropy", hidden), compute_dtype(hidden)
    wants = task.wants
    if upstream is None or hold_logits:
        wants = Wants(hidden=False, weight=False, bias=False)
    elif task.plan.columns is not None:
        wants = Wants(wants.hidden, weight=False, bias=False)
    if not (any(wants) or hold_logits):
        upstream = None
    grad_hidden = grad_weight = grad_bias = grad_logits = None
    if wants.hidden and taken is None:
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    elif wants.hidden:
        grad_hidden = _padded_zeros(hidden)
    if wants.bias:
        grad_bias = torch.zeros(len(weight), dtype=dtype, device=weight.device)
    losses, z_losses, lses = [], [], []
    for part in parts(rows, chunk):
        part_hidden = head.rows(part)
        logits = head.logits(part_hidden, everything)
        scale = None if upstream is None else upstream.part(part)
        loss, z_loss, part_lse, grad = ops.cross_entropy_rows(
            logits,
            targets[part],
            None if scale is None else scale.loss,
            None if lse is None else lse[part],
            task.class_weights,
            task.options,
            True,
            stats=None if stats is None else TokenStats(*(x[part] for x in stats)),
            stats_scale=None if scale is None else scale.stats,
        )
        losses.append(loss)
        z_losses.append(z_loss)
        lses.append(part_lse)
        if grad is not None:
            if grad_hidden is not None and taken is None:
                _product_into(grad_hidden, part, grad, weight)
            elif grad_hidden is not None and taken is not None:
                grad_hidden.index_copy_(0, taken[part], grad @ weight)
            # A float16 sum over the tokens, divided only in backward, could overflow.
            if wants.weight and chunk >= rows and hidden.dtype != torch.float16:
                grad_weight = grad.t() @ part_hidden
            elif wants.weight:
                grad_weight = add_product(grad_weight, grad.t(), part_hidden)
            if grad_bias is not None:
                grad_bias = grad_bias + grad.sum(0, dtype=dtype)
            if hold_logits:
                grad_logits = grad
        del part_hidden, logits, grad  # before the next chunk's logits are made

    def join(made: list[Tensor]) -> Tensor:
        return made[0] if len(made) == 1 else torch.cat(made)

    if grad_hidden is not None:
        grad_hidden = grad_hidden[: len(hidden)]
    made = grad_hidden, grad_weight, grad_bias, grad_logits
    return Rows(join(losses), join(z_losses), join(lses), *made)


def _padded_zeros(hidden: Tensor) -> Tensor:
    """Room for the gradient of hidden, and of the padding among the rows taken behind it."""
    return hidden.new_zeros(len(hidden) + 1, hidden.shape[1])


def held_gradients(
    grad_logits: Tensor,
    scale: Tensor,
    hidden: Tensor,
    taken: Tensor | None,
    weight: Tensor | None,
    want_bias: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Gradients of hidden, weight and bias from that of all logits, times a scale.

    Nothing of the weight's size is scaled, but the rows of hidden before the product. In float16
    they could overflow or vanish: there it is the product, made in float32.

    Args: grad_logits (rows, vocab); scale of one element; hidden (positions, in); taken, see
        `Task`; weight (vocab, in), or None where the gradient of hidden is not wanted.
    """
    ops, dtype = select("cross_entropy", hidden), hidden.dtype
    rows = hidden if taken is None else take_rows(hidden, taken)
    grad_hidden = grad_bias = None
    if dtype == torch.float16:
        grad_weight = ops.scaled(add_product(None, grad_logits.t(), rows), scale, dtype)
    else:
        grad_weight = grad_logits.t() @ ops.scaled(rows, scale, dtype)
    del rows
    if weight is not None:
        grad_hidden = ops.scaled(grad_logits @ weight, scale, dtype)
        if taken is not None:
            padded = _padded_zeros(hidden).index_copy_(0, taken, grad_hidden)
            grad_hidden = padded[: len(hidden)]
    if want_bias:
        grad_bias = ops.scaled(grad_logits.sum(0, dtype=compute_dtype(hidden)), scale, dtype)
    return grad_hidden, grad_weight, grad_bias


def column_loop(head: Head, upstream: Upstream, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Block of classes by block of classes: the gradients of weight and bias, in their dtypes.

    The logits are made once more. No accumulator of the weight's size: a block is finished before
    the next begins.
    """
    hidden, weight, bias, task = head
    targets, columns, chunk = task.targets, task.plan.columns, task.plan.column_rows
    rows, vocab = len(targets), len(weight)
    assert columns is not None, "the plan has no column loop"
    ops, dtype = select("cross_entropy", hidden), compute_dtype(hidden)
    grad_weight = torch.empty_like(weight)  # in its layout: autograd would copy any other
    grad_bias = None
    if task.wants.bias and bias is not None:
        grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    for first in range(0, vocab, columns):
        block = slice(first, min(first + columns, vocab))
        total = bias_total = None
        for part in parts(rows, chunk):
            part_hidden = head.rows(part)
            logits = head.logits(part_hidden, block)
            scale = upstream.part(part)
            *_, grad = ops.cross_entropy_rows(
                logits,
                targets[part],
                scale.loss,
                lse[part],
                task.class_weights,
                task.options,
                True,
                stats_scale=scale.stats,
                first_column=first,
                vocab=vocab,
            )
            if chunk >= rows:
                _product_into(grad_weight, block, grad.t(), part_hidden)
            else:
                total = add_product(total, grad.t(), part_hidden)
            if grad_bias is not None:
                part_bias = grad.sum(0, dtype=dtype)
                bias_total = part_bias if bias_total is None else bias_total + part_bias
            del part_hidden, logits, grad  # before the next block's logits are made
        if total is not None:
            grad_weight[block] = total
        if grad_bias is not None and bias_total is not None:
            grad_bias[block] = bias_total
    return grad_weight, grad_bias


def _product_into(out: Tensor, rows: slice, a: Tensor, b: Tensor) -> None:
    """out[rows] = a @ b without a copy of the product, which eager PyTorch would keep beside it."""
    if torch.compiler.is_compiling():
        out[rows] = a @ b
    else:
        torch.mm(a, b, out=out[rows])


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, in place, or the product alone; summed in float32 (float64 for float64)."""
    if total is None:
        return _wide_product(a, b)
    _accumulate_product(total, a, b)
    return total


# Registered ops because torch.compile cannot trace products with an `out_dtype`.


@torch.library.custom_op("ligermodels::wide_product", mutates_args=())
def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, the products of low-precision a and b summed and kept in float32."""
    dtype = compute_dtype(a)
    if a.dtype != dtype and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


@_wide_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=compute_dtype(a))


@torch.library.custom_op("ligermodels::accumulate_product", mutates_args=("total",))
def _accumulate_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the products of low-precision a and b summed in total's dtype."""
    if a.dtype != total.dtype and total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
