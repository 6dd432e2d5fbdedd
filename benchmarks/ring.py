"""Ring attention (arXiv:2310.01889), to compare with the gathered keys of context parallelism.

Each rank passes its keys and values on to the next one while it computes with them, and in backward
also the gradients. The queries stay. The parts of the rows are those of `SequenceShard`: rank r has
the chunks r and 2 * ranks - 1 - r, so that all ranks have the same work at each step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import (
    DEVICE,
    GIB,
    TINY,
    Row,
    attempt,
    config,
    everywhere,
    mesh,
    milliseconds,
)
from ligermodels.layers.attention_backend import attend, attend_in_parts
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.layers.causal_suffix import _attend, _attend_backward
from ligermodels.layers.sequence_shard import SequenceShard


def ring_attention(q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard, scale: float) -> Tensor:
    """Return causal attention of this rank's queries to the keys of all ranks.

    Args: q (batch, heads, tokens of this rank, head_dim); k, v the same with kv heads.
    """
    return _Ring.apply(q, torch.stack([k, v]), shard, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, shard: SequenceShard, scale: float) -> Tensor:
        ctx.shard, ctx.scale, states, own = shard, scale, [], kv
        out = lse = torch.empty(0)
        for step in range(shard.ranks):
            coming = _Passed(kv, shard) if step + 1 < shard.ranks else None
            rows, keys, causal = _seen(shard, step, q.shape[2])
            part, part_lse, *state = _attend(
                q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys], causal, scale
            )
            states.append(state)
            if step == 0:
                out, lse = part.float(), part_lse.clone()
            else:
                share = torch.sigmoid(part_lse - lse[:, :, rows])
                out[:, :, rows] += share * (part - out[:, :, rows])
                lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
            kv = kv if coming is None else coming.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        ctx.states = states
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, kv, out, lse = ctx.saved_tensors
        shard, dq, passed = ctx.shard, torch.zeros_like(q), None
        for step in range(shard.ranks):
            coming = _Passed(kv, shard) if step + 1 < shard.ranks else None
            rows, keys, causal = _seen(shard, step, q.shape[2])
            dq_part, dk, dv = _attend_backward(
                *(grad[:, :, rows], q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys]),
                *(out[:, :, rows], lse[:, :, rows].contiguous(), causal, ctx.scale),
                ctx.states[step],
            )
            dq[:, :, rows] += dq_part
            # The gradients of these keys come from the ranks that have had them before.
            dkv = torch.zeros_like(kv, dtype=torch.float32) if passed is None else passed.wait()
            dkv[0][:, :, keys] += dk
            dkv[1][:, :, keys] += dv
            passed = _Passed(dkv, shard)
            kv = kv if coming is None else coming.wait()
        assert passed is not None
        return dq, passed.wait().to(kv.dtype), None, None


class _Passed:
    """A tensor on its way to the next rank, while that of the rank before comes."""

    def __init__(self, x: Tensor, shard: SequenceShard) -> None:
        after, before = (
            dist.get_global_rank(shard.group, (shard.rank + away) % shard.ranks) for away in (1, -1)
        )
        self.sent, self.coming = x.contiguous(), torch.empty_like(x.contiguous())
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, after, shard.group),
                dist.P2POp(dist.irecv, self.coming, before, shard.group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.coming


def _seen(shard: SequenceShard, step: int, tokens: int) -> tuple[slice, slice, bool]:
    """Return the queries and the keys of a step, and whether the mask between them is causal."""
    if step == 0:
        return slice(None), slice(None), True
    if step <= shard.rank:  # keys of a rank before: only their first chunk is before the queries
        return slice(None), slice(0, tokens // 2), False
    return slice(tokens // 2, None), slice(None), False


def ring(_: int | None) -> list[Row]:
    """Compare gathered keys and values with those that are passed in a ring, in one layer."""
    ranks, sizes = dist.get_world_size(), config(None)
    seq, scale = (1024 if TINY else 131072), sizes.head_dim**-0.5
    heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
    part = SequenceShard(mesh(cp=ranks).get_group(), ranks, dist.get_rank())
    mask = AttentionMask(seq // ranks, seq, shard=part)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def made(heads: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        shape = 1, seq, heads, sizes.head_dim
        return part.split(torch.randn(shape, generator=generator, device=DEVICE)).to(dtype)

    q, k, v, upstream = (made(n, i) for i, n in enumerate((heads, kv_heads, kv_heads, heads)))

    def gathered(q: Any, k: Any, v: Any) -> Any:
        whole = (x.transpose(1, 2) for x in (part.whole(k), part.whole(v)))
        return attend_in_parts(partial(attend, scale=scale), q.transpose(1, 2), *whole, mask)

    def passed(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(*(x.transpose(1, 2) for x in (q, k, v)), part, scale)

    expected: list[torch.Tensor] = []

    def run(attention: Callable[..., Any]) -> Row:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        found: list[torch.Tensor] = []

        def step() -> None:
            found.clear()
            out = attention(*leaves).transpose(1, 2)
            found.extend([out.detach(), *torch.autograd.grad(out, leaves, upstream)])

        taken = min([milliseconds(step) for _ in range(4)][1:])
        forward = min(milliseconds(lambda: attention(q, k, v)) for _ in range(3))
        found.clear()
        before = torch.cuda.memory_allocated()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        peak = max(everywhere(torch.cuda.max_memory_allocated() - before))
        expected.extend([] if expected else found)
        errors = [((x - y).norm() / y.norm()).item() for x, y in zip(found, expected)]
        row = {"ms": taken, "forward ms": forward, "peak GiB": peak / GIB}
        return row | {"differs by": max(everywhere(max(errors)))}

    def exchange() -> Row:
        """Gather the keys and values, and reduce their gradients."""
        leaves = [x.detach().requires_grad_() for x in (k, v)]
        wholes = [torch.randn_like(part.whole(x)) for x in leaves]

        def step() -> None:
            torch.autograd.backward([part.whole(x) for x in leaves], wholes)

        return {"ms": min(milliseconds(step) for _ in range(5))}

    return [
        attempt(f"{seq} over {ranks}, gathered", partial(run, gathered)),
        attempt(f"{seq} over {ranks}, in a ring", partial(run, passed)),
        attempt("exchange of gathered keys and values", exchange),
    ]
