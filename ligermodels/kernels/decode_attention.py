"""Attention of few new tokens of each row to a cache; the rows' lengths are on the device."""

from torch import Tensor

from ligermodels.kernels.dispatch import select


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
    if not fits or heads % k.shape[1]:
        raise ValueError(
            f"decode_attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; "
            "expected (batch, heads, queries, head_dim) and (batch, kv heads, slots, head_dim), "
            "and no more queries than slots"
        )
    each = (batch, k.shape[1], queries, head_dim)
    if new is not None and any(x.shape != each for x in new):
        shapes = " and ".join(str(tuple(x.shape)) for x in new)
        raise ValueError(f"decode_attention: new {shapes}; expected {each}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"decode_attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; expected one dtype"
        )
    if any(x is not None and x.shape != (batch,) for x in (ends, firsts)):
        raise ValueError(f"decode_attention: ends {tuple(ends.shape)}; expected ({batch},)")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"decode_attention: sinks {tuple(sinks.shape)}; expected ({heads},)")
    ops = select("decode_attention", q)
    return ops.decode_attention_forward(q, new, k, v, ends, firsts, sinks, scale, window, softcap)
