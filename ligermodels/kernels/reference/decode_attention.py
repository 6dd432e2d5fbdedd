"""Plain PyTorch: attention of the last tokens of each row to the tokens in a cache."""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype


def decode_attention_forward(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    firsts: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Write `new` into k and v, and return softmax(scores) v of the keys that each query sees.

    Args: as in `kernels.decode_attention`. Slot s has the token at the largest position p < end
        with p % slots = s.
    Returns: (batch, heads, queries, head_dim), computed in float32 (float64 for float64).
    """
    queries, slots, dtype = q.shape[2], k.shape[2], compute_dtype(q)
    own = ends[:, None] - queries + torch.arange(queries, device=q.device)  # (batch, queries)
    if new is not None:
        rows = torch.arange(len(q), device=q.device)[:, None]
        for cache, x in zip((k, v), new):
            cache[rows, :, own % slots] = cast(x.transpose(1, 2), cache.dtype)
    last = ends[:, None] - 1
    at = (last - (last - torch.arange(slots, device=q.device)) % slots)[:, None]
    visible = (at >= 0) & (at <= own[:, :, None])  # (batch, queries, slots)
    if firsts is not None:
        visible &= at >= firsts[:, None, None]
    if window is not None:
        visible &= at > own[:, :, None] - window
    grouped = cast(q, dtype).unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # heads x queries
    scores = grouped @ cast(k, dtype).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~visible[:, None].repeat(1, 1, grouped.shape[2] // queries, 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = cast(sinks, dtype).view(k.shape[1], -1).repeat_interleave(queries, 1)
        scores = torch.cat((scores, logits[..., None].expand(len(q), -1, -1, -1)), -1)
    weights = scores.softmax(-1)[..., :slots]
    # Slots that no token has been written to may hold anything, also NaN.
    values = cast(v, dtype).masked_fill(~visible.any(1)[:, None, :, None], 0.0)
    return cast(weights @ values, q.dtype).reshape(q.shape)
