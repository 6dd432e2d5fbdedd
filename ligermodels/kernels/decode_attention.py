"""Attention of one new token of each row to a cache; the rows' lengths are on the device."""

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
) -> Tensor:
    """Write a token's key and value into the cache, and attend from it to the tokens there.

    The token at position p of a row is in slot p % slots. Nothing depends on a number that only the
    device knows, so a CUDA graph can hold this op. It has no gradient.

    Args:
        q: (batch, heads, 1, head_dim), the query of the last token of each row.
        new: its key and value, each (batch, kv heads, 1, head_dim), which the op writes into k and
            v; None if they are there already.
        k, v: (batch, kv heads, slots, head_dim), the cache, in q's dtype.
        ends: (batch,) int64, how many tokens each row has, the new one among them.
        firsts: (batch,) int64, how many of the first ones are padding. By default none is.
        scale: factor on the scores.
        window: the query sees only the last `window` tokens. By default it sees all in the cache.
        softcap: scores become softcap * tanh(scores / softcap), arXiv:2408.00118.
    Returns: (batch, heads, 1, head_dim).
    Raises:
        ValueError: a shape or dtype does not fit.
    Source: arXiv:2311.01282 (the keys of a query are split over blocks), arXiv:2305.13245.
    """
    batch, heads, queries, head_dim = q.shape
    expected = (batch, k.shape[1], k.shape[2], head_dim)
    if queries != 1 or k.shape != expected or v.shape != expected or heads % k.shape[1]:
        raise ValueError(
            f"decode_attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; "
            "expected (batch, heads, 1, head_dim) and (batch, kv heads, slots, head_dim)"
        )
    one = (batch, k.shape[1], 1, head_dim)
    if new is not None and any(x.shape != one for x in new):
        shapes = " and ".join(str(tuple(x.shape)) for x in new)
        raise ValueError(f"decode_attention: new {shapes}; expected {one}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"decode_attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; expected one dtype"
        )
    if any(x is not None and x.shape != (batch,) for x in (ends, firsts)):
        raise ValueError(f"decode_attention: ends {tuple(ends.shape)}; expected ({batch},)")
    ops = select("decode_attention", q)
    return ops.decode_attention_forward(q, new, k, v, ends, firsts, scale, window, softcap)
