"""Attention of few new tokens of each row to a cache; the rows' lengths are on the device."""

from torch import Tensor

from ligermodels.kernels.checks import misfit
from ligermodels.kernels.dispatch import select

_OP = "decode_attention"


def decode_attention(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    firsts: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write tokens' keys and values into the cache, and attend from each to it and those before it.

    The token at position p of a row is in slot p % slots. Nothing depends on a number that only the
    device knows, so a CUDA graph can hold this op. It has no gradient. It is made for one query of
    each row, and for up to about 16.

    Args:
        q: (batch, heads, queries, head_dim), the queries of the last tokens of each row.
        new: their keys and values, each (batch, kv heads, queries, head_dim), which the op writes
            into k and v; None if they are there already.
        k, v: (batch, kv heads, slots, head_dim), the cache, in q's dtype. With a window, there are
            at least window + queries - 1 slots, or a slot for every token.
        ends: (batch,) int64, how many tokens each row has, the new ones among them.
        firsts: (batch,) int64, how many of the first ones are padding. By default none is.
        scale: factor on the scores.
        window: a query sees only the last `window` tokens. By default it sees all in the cache.
        softcap: scores become softcap * tanh(scores / softcap), arXiv:2408.00118.
        sinks: (heads,), a further logit of each head in the softmax, which has no value.
    Returns: (batch, heads, queries, head_dim).
    Raises:
        ValueError: a shape or dtype does not fit.
    Source: arXiv:2311.01282 (the keys are split over blocks), arXiv:2305.13245.
    """
    batch, heads, queries, head_dim = q.shape
    expected = (batch, k.shape[1], k.shape[2], head_dim)
    fits = k.shape == v.shape == expected and queries <= k.shape[2]
    if not fits or heads % k.shape[1] or not q.dtype == k.dtype == v.dtype:
        layout = (
            "(batch, heads, queries, head_dim) and (batch, kv heads, slots, head_dim) twice, of "
            "one dtype, and no more queries than slots"
        )
        raise misfit(_OP, layout, q=q, k=k, v=v)
    each = (batch, k.shape[1], queries, head_dim)
    if new is not None and any(x.shape != each for x in new):
        raise misfit(_OP, f"{each} twice", new_k=new[0], new_v=new[1])
    if any(x is not None and x.shape != (batch,) for x in (ends, firsts)):
        raise misfit(_OP, f"({batch},)", ends=ends, firsts=firsts)
    if sinks is not None and sinks.shape != (heads,):
        raise misfit(_OP, f"({heads},)", sinks=sinks)
    of_rows = [x if x is None else x.contiguous() for x in (ends, firsts, sinks)]
    ops = select(_OP, q)
    return ops.decode_attention_forward(q, new, k, v, *of_rows, scale, window, softcap)
