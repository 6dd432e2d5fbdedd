"""The rates of attention on a GPU, measured with the function that the layers call.

The kernels differ: FlexAttention with capped scores, or heads of 256, reach a fraction of the rate
of cuDNN's attention, and each of them is slower in backward.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.layers.attention_backend import attend
from ligermodels.layers.attention_mask import AttentionMask

# Backward computes five products where forward computes two.
BACKWARD = 2.5
# Attention is measured with rows or documents of these lengths, and with at least so many tokens.
# It takes a few percent less time for a pair of tokens if rows are longer.
_LENGTHS = 128, 16384
_TOKENS = 4096


class AttentionKind(NamedTuple):
    """The properties of an attention call that decide its rate.

    Attributes:
        backend: the one that `attend` chooses.
        heads, kv_heads, head_dim: the shape of q, k and v.
        length: queries of a row or of a document, rounded up to a power of two, from 128 to 16384.
        window: None where it hides no key in `length` queries.
        softcap, causal: those of the layer.
    """

    backend: str
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    window: int | None = None
    softcap: float | None = None
    causal: bool = True

    @property
    def tokens(self) -> int:
        """The number of tokens with which the rate is measured."""
        return max(self.length, _TOKENS)

    @property
    def forward_flops(self) -> int:
        """The FLOP of the two products of the measured forward, over the pairs of the mask."""
        pairs = self.tokens // self.length * attention_pairs(self.length, self.window, self.causal)
        return 4 * self.heads * self.head_dim * pairs


def attention_kind(
    backend: str,
    q: Tensor,
    k: Tensor,
    length: int,
    window: int | None,
    softcap: float | None,
    causal: bool,
) -> AttentionKind:
    """Return the kind of an attention over rows or documents of `length` queries.

    Args: q: (batch, heads, queries, head_dim); k: (batch, kv heads, keys, head_dim).
    """
    measured = min(max(1 << (length - 1).bit_length(), _LENGTHS[0]), _LENGTHS[1])
    window = None if window is None or window >= measured else window
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    return AttentionKind(backend, heads, kv_heads, head_dim, measured, window, softcap, causal)


def attention_pairs(queries: int, window: int | None, causal: bool = True) -> int:
    """Return how many keys the queries of a row see together."""
    window = queries if window is None else min(window, queries)
    before = window * (window + 1) // 2 + (queries - window) * window  # with its own
    return before if causal else 2 * before - queries


@cache
def measured_rates(
    kind: AttentionKind,
    device: torch.device,
    dtype: torch.dtype,
    seconds_of: Callable[[Callable[[], object]], float],
) -> tuple[float, float]:
    """Return the FLOP/s of forward and of backward on a GPU.

    Args: seconds_of: a function that times a call.
    """
    rows = 1 if kind.backend == "varlen" else kind.tokens // kind.length
    shape = rows, kind.tokens // rows, kind.heads + 2 * kind.kv_heads, kind.head_dim
    # A separate generator leaves that of the caller unchanged.
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    parts = packed.split((kind.heads, kind.kv_heads, kind.kv_heads), 2)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in parts)
    mask = _mask(kind, rows, device)
    options = {"scale": kind.head_dim**-0.5, "window": kind.window, "softcap": kind.softcap}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask, causal=kind.causal, **options)

    if kind.backend == "flex":
        mask.block_mask(kind.window, rows, device, causal=kind.causal)  # the mask keeps it
        # A compiled function of its own: if that of the layers saw shapes here which training does
        # not have, torch would compile it again for all shapes, to slower code.
        attention = torch.compile(attention, fullgraph=True, dynamic=False)

    def run() -> Tensor:
        return attention(q, k, v)

    with (
        torch.enable_grad(),
        torch._dynamo.config.patch(recompile_limit=256),
        warnings.catch_warnings(),
    ):
        # Dynamo says that it looks into a cached function, whose result is always the same.
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cac")
        gradient = torch.empty_like(run()).normal_(generator=generator)
        forward = seconds_of(run)
        both = seconds_of(lambda: torch.autograd.grad(run(), (q, k, v), gradient))
    backward = max(both - forward, forward)  # it computes more; noise must not say otherwise
    return kind.forward_flops / forward, BACKWARD * kind.forward_flops / backward


def _mask(kind: AttentionKind, rows: int, device: torch.device) -> AttentionMask:
    """Return a mask with which `attend` chooses the backend of the kind."""
    if kind.backend == "varlen":
        starts = torch.arange(0, kind.tokens + 1, kind.length, device=device, dtype=torch.int32)
        ids = torch.arange(kind.tokens, device=device)[None] // kind.length
        return AttentionMask(
            kind.tokens, document_ids=ids, cu_seqlens=starts, max_seqlen=kind.length
        )
    queries = kind.tokens // rows
    ids = torch.zeros(1, queries, device=device, dtype=torch.int64)
    return AttentionMask(queries, document_ids=ids if kind.backend == "flex" else None)
