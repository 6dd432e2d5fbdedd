"""FlexAttention as it has to be called: compiled, since uncompiled it makes every score."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# Every head_dim, dtype and soft cap in the process counts as one; torch.compile's own limit is 8.
_RECOMPILE_LIMIT = 256


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile(function); the function itself where an outer torch.compile does it."""
    return function if torch.compiler.is_compiling() else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Whole or not at all: past its limit torch.compile would run the function as it is.
    made = torch.compile(function, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        # A second scale or cap in a process would become a symbol, which the op does not take.
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT, specialize_float=True):
            return made(*args, **kwargs)

    return call


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, softcap: float | None
) -> Tensor:
    """FlexAttention with grouped heads: (batch, heads, queries, head_dim) as q."""
    score_mod = None if softcap is None else _capped(softcap)
    return compiled(flex_attention)(
        q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=True
    )


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """softcap * tanh(score / softcap); one object per cap, since each new one is compiled."""

    def capped(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
