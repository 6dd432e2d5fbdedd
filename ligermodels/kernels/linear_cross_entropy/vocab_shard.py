"""The loss of rows of logits whose classes are split over the ranks of a process group.

Each rank computes the logits of its own classes, and a kernel computes their logsumexp. One
all-gather of a few numbers for each row gives the loss over all classes, the same on all ranks. It
overlaps with the matrix product of the next chunk's logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype, select
from ligermodels.kernels.loss_options import CrossEntropyOptions, TokenStats

# torch renames these two, and warns of the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class VocabShard:
    """The classes of a head that this rank has.

    Attributes:
        group: the ranks that have all classes together.
        first: the first class of this rank.
        vocab: the number of classes of all ranks. All have as many, the last ones may have fewer.
    """

    group: Any
    first: int
    vocab: int

    @property
    def most_classes(self) -> int:
        """The classes of the rank that has most of them."""
        return -(-self.vocab // dist.get_world_size(self.group))


class ShardedRows:
    """The losses of rows of logits, of which each rank has its own classes.

    The constructor starts the exchange between the ranks, and `losses` waits for it, so the
    computation in between overlaps with it. All ranks make these in the same order, and
    call `losses` in the same order.
    """

    def __init__(
        self,
        logits: Tensor,
        targets: Tensor,
        class_weights: Tensor | None,
        options: CrossEntropyOptions,
        shard: VocabShard,
    ) -> None:
        """Begin with logits (rows, classes of this rank), targets (rows) and class_weights (vocab).

        Targets and class_weights are of all classes.
        """
        self.targets, self.class_weights = targets, class_weights
        self.options, self.shard = options, shard
        ops, dtype = select("cross_entropy", logits), compute_dtype(logits)
        columns = logits.shape[1]
        here = targets - shard.first
        self.valid = targets != options.ignore_index
        mine = self.valid & (here >= 0) & (here < columns)
        index = torch.where(mine, here, 0)

        # Ignored rows get the default mark here: ignore_index may be the number of a rank's class.
        alone = CrossEntropyOptions(softcap=options.softcap, logit_scale=options.logit_scale)
        own_targets = torch.where(self.valid, index, alone.ignore_index)
        own_lse = ops.cross_entropy_rows(logits, own_targets, None, None, None, alone, False)[2]
        own_top, own_sum = ops.natural_lse(own_lse, alone)
        own_raw = cast(logits.gather(1, index[:, None])[:, 0], dtype)
        parts = [own_top, own_sum, torch.where(mine, own_raw, 0.0)]
        if options.label_smoothing:
            t = _capped(cast(logits, dtype), options) - own_top[:, None]
            if class_weights is not None:
                weights = cast(class_weights[shard.first : shard.first + columns], dtype)
                parts += [(t * weights).sum(-1), weights.sum().expand_as(own_top)]
            else:
                parts += [t.sum(-1), torch.full_like(own_top, columns)]
        self.sent = torch.stack(parts)
        self.received, self.work = _begin_gathering(self.sent, shard)

    def losses(self, logits: Tensor, stats: TokenStats | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss (rows), z-loss (rows) and lse (rows, 2), as `cross_entropy_rows` does.

        Args: logits: the same as before; they are not changed; stats: the tensors to fill, or None.
        """
        if self.work is not None:
            self.work.wait()  # on a GPU, the stream waits, and not the host
        smoothing, z_loss = self.options.label_smoothing, self.options.z_loss
        targets, valid, shard = self.targets, self.valid, self.shard
        inside = (targets >= 0) & (targets < shard.vocab)
        tops, sums, raws, *smooth = self.received.unbind(1)
        top = tops.amax(0)
        shift = torch.where(top == -torch.inf, 0.0, top)
        log_sum = torch.exp(tops - shift + sums).sum(0).log()
        target_raw = raws.sum(0)
        log_p = _capped(target_raw, self.options) - top - log_sum
        target_weight = torch.full_like(log_p, 1 - smoothing)
        if self.class_weights is not None:
            target_weight = target_weight * self.class_weights[torch.where(inside, targets, 0)]
        loss = -target_weight * log_p
        if smoothing:
            away, weight_sums = smooth
            # The sum over classes of weight * (logsumexp - t).
            total = (weight_sums * (top + log_sum - tops) - away).sum(0)
            loss = loss + smoothing / shard.vocab * total
        lse = top + log_sum
        z = z_loss * lse.square()
        nan = torch.where(inside, 0.0, torch.nan)
        if stats is not None:
            own_t = _capped(cast(logits, lse.dtype), self.options)
            own_log_p = own_t - top[:, None] - log_sum[:, None]
            del own_t
            _fill(stats, logits, own_log_p, log_p, lse, valid, nan, targets, target_raw, shard)
        loss, z = (torch.where(valid, x + nan, 0.0).to(lse.dtype) for x in (loss + z, z))
        return loss, z, select("cross_entropy", logits).kernel_lse(top, log_sum, self.options)


def _capped(logits: Tensor, options: CrossEntropyOptions) -> Tensor:
    t = logits * options.logit_scale
    return t if options.softcap is None else options.softcap * torch.tanh(t / options.softcap)


def _fill(
    stats: TokenStats,
    logits: Tensor,
    own_log_p: Tensor,
    log_p: Tensor,
    lse: Tensor,
    valid: Tensor,
    nan: Tensor,
    targets: Tensor,
    target_raw: Tensor,
    shard: VocabShard,
) -> None:
    """Fill the requested per-token statistics; see `TokenStats`.

    Args: own_log_p: the log-probabilities of this rank's classes; log_p: of the targets; nan: NaN
        for the rows of targets outside the vocabulary, else 0; target_raw: the targets' logits.
    """
    columns = logits.shape[1]

    def fill(out: Tensor | None, own: Callable[[], Tensor]) -> None:
        """Fill a statistic that is a sum over classes, from this rank's part of it."""
        if out is not None:
            out.copy_(torch.where(valid, _gathered(own(), shard).sum(0) + nan, 0.0))

    p = torch.exp(own_log_p)
    if stats.log_probs is not None:
        stats.log_probs.copy_(torch.where(valid, log_p + nan, 0.0))
    fill(stats.entropy, lambda: -torch.where(p == 0, 0.0, p * own_log_p).sum(-1))
    fill(stats.sum_sq_probs, lambda: p.square().sum(-1))
    fill(stats.mean_logits, lambda: (own_log_p + lse[:, None]).sum(-1) / shard.vocab)
    if stats.correct is not None:
        # Compare before the softcap, because it may round different logits to one value.
        raw = cast(logits, log_p.dtype)
        classes = torch.arange(columns, device=logits.device) + shard.first
        ties = (raw == target_raw[:, None]) & (classes < targets[:, None])
        beaten = ((raw > target_raw[:, None]) | ties).any(-1) | target_raw.isnan()
        most = _gathered(beaten.to(log_p.dtype), shard).amax(0)
        stats.correct.copy_(valid & ~nan.isnan() & (most == 0))


def _begin_gathering(values: Tensor, shard: VocabShard) -> tuple[Tensor, Any]:
    """Return (ranks, *values.shape) for the values of each rank, and a handle to wait for them.

    Contiguous values must exist until then. Without a handle (None), the values are there.
    """
    ranks = dist.get_world_size(shard.group)
    out = values.new_empty(ranks * values.shape[0], *values.shape[1:])
    # torch.compile can only trace collectives that wait.
    later = not torch.compiler.is_compiling()
    work = all_gather(out, values, group=shard.group, async_op=later)
    return out.view(ranks, *values.shape), work if later else None


def _gathered(values: Tensor, shard: VocabShard) -> Tensor:
    """Return (ranks, *values.shape): the values of each rank."""
    out, work = _begin_gathering(values.contiguous(), shard)
    if work is not None:
        work.wait()
    return out


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *args: Any
    ) -> Tensor:
        ctx.back, ctx.args = back, args
        return there(x, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, *ctx.args), *[None] * (2 + len(ctx.args))


def exchanged(
    x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *args: Any
) -> Tensor:
    """Return there(x, *args), an exchange between ranks; its gradient takes the way `back`.

    Args: back: maps the gradient of the result, and args, to the gradient of x.
    """
    return _Exchanged.apply(x, there, back, *args)


def summed(x: Tensor, group: Any) -> Tensor:
    """Return the sum of a tensor over the ranks of a group, as a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    if not x.is_meta:  # a simulation has one process
        dist.all_reduce(x, group=group)
    return x


def sum_gradient(x: Tensor, group: Any) -> Tensor:
    """Return x, which all ranks of a group have. Its gradient is summed over them."""
    return exchanged(x, lambda x, group: x.view_as(x), summed, group)


def gather_classes(logits: Tensor, shard: VocabShard) -> Tensor:
    """Return (..., vocab) for each rank's (..., classes), which takes its part of the gradient."""
    return exchanged(logits, _all_classes, _own_classes, shard)


def _all_classes(logits: Tensor, shard: VocabShard) -> Tensor:
    padded = torch.nn.functional.pad(logits, (0, shard.most_classes - logits.shape[-1]))
    every = _gathered(padded, shard).movedim(0, -2).flatten(-2)
    return every[..., : shard.vocab].contiguous()


def _own_classes(grad: Tensor, shard: VocabShard) -> Tensor:
    return grad[..., shard.first : shard.first + shard.most_classes]
