"""Plain PyTorch: attention of one token of each row to the tokens in a cache."""

import torch
from torch import Tensor

from ligermodels.kernels.dtypes import cast, compute_dtype


def decode_attention_forward(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    firsts: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Write `new` into k and v, and return softmax(scores) v of the keys that the query sees.

    Args: as in `kernels.decode_attention`. Slot s has the token at the largest position p < end
        with p % slots = s.
    Returns: (batch, heads, 1, head_dim), computed in float32 (float64 for float64).
    """
    slots, dtype = k.shape[2], compute_dtype(q)
    last = ends - 1
    if new is not None:
        rows = torch.arange(len(q), device=q.device)
        for cache, x in zip((k, v), new):
            cache[rows, :, last % slots] = cast(x[:, :, 0], cache.dtype)
    at = last[:, None] - (last[:, None] - torch.arange(slots, device=q.device)) % slots
    visible = at >= 0
    if firsts is not None:
        visible &= at >= firsts[:, None]
    if window is not None:
        visible &= at > last[:, None] - window
    grouped = cast(q, dtype).unflatten(1, (k.shape[1], -1)).squeeze(3)
    scores = grouped @ cast(k, dtype).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~visible[:, None, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    # Slots that no token has been written to may hold anything, also NaN.
    values = cast(v, dtype).masked_fill(~visible[:, None, :, None], 0.0)
    return cast(weights @ values, q.dtype).flatten(1, 2).unsqueeze(2)
