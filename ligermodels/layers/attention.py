"""Self-attention on packed projections with grouped heads."""

import inspect
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.layers.masks import DocumentMask, Mask, VarlenMask, flex_attention_compiled
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.plain import is_plain, normalized


class Cache(Protocol):
    """What attention asks of a KV cache; `ligermodels.generation.KVCache` is one."""

    length: int

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (batch, kv heads, new, head_dim); return all so far, in the same layout."""
        ...

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has appended in this forward."""
        ...


class AttentionContext:
    """What all layers of one forward pass share.

    Args: cos, sin (batch or 1, seq, head_dim / 2), float32; mask, see `ligermodels.layers.masks`;
        cache, for inference.

    One object, not loose tensors, and no dataclass: FSDP2's mixed precision casts the floating
    point tensors that it finds in a module's arguments, and would round the angles.
    """

    def __init__(
        self, cos: Tensor, sin: Tensor, mask: Mask = None, cache: Cache | None = None
    ) -> None:
        self.cos = cos
        self.sin = sin
        self.mask = mask
        self.cache = cache


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads (arXiv:2305.13245).

    Args:
        hidden_size: width of input and output.
        num_heads, num_kv_heads: query heads, and key and value heads, which divide them.
        head_dim: size of a head; default hidden_size / num_heads.
        bias: whether the projections (all four) have one.
        scale: factor on the scores; default head_dim^-1/2.
        layer_index: which slot of a KV cache is this layer's.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        scale: float | None = None,
        layer_index: int = 0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"Attention: hidden_size {hidden_size} is not a multiple of {num_heads} heads; "
                "set head_dim"
            )
        self.head_dim = head_dim or hidden_size // num_heads
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.layer_index = layer_index
        if num_heads % self.num_kv_heads:
            raise ValueError(f"Attention: {num_heads} heads in {self.num_kv_heads} groups")
        rows = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(hidden_size, rows, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x, or from norm(x + residual) with the add and norm fused in.

        Args: x, residual (batch, seq, hidden).
        Returns: (batch, seq, hidden); with a norm the pair (that, x + residual).
        """
        heads = (self.num_heads, self.num_kv_heads)
        if (
            norm is not None
            and is_plain(norm, RMSNorm)
            and is_plain(self.qkv_proj, nn.Linear)
            and x.numel()
        ):
            q, k, v, total = kernels.norm_qkv_rope(
                x,
                residual,
                norm.weight,
                self.qkv_proj.weight,
                self.qkv_proj.bias,
                context.cos,
                context.sin,
                *heads,
                eps=norm.eps,
                offset=norm.offset,
                casting=norm.casting,
            )
        else:
            y, total = normalized(x, residual, norm)
            q, k, v = kernels.rope(self.qkv_proj(y), context.cos, context.sin, *heads)
        out = self.o_proj(self._attend(q, k, v, context).flatten(-2))
        return out if norm is None else (out, total)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """(batch, seq, heads, head_dim) from q, k, v of that layout."""
        mask = context.mask
        if isinstance(mask, VarlenMask):
            return _varlen(q, k, v, mask, self.scale)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.update(self.layer_index, k, v)
        if isinstance(mask, DocumentMask):
            attend = flex_attention_compiled()
            out = attend(q, k, v, block_mask=mask.block_mask, scale=self.scale, enable_gqa=True)
        else:
            # A single query attends to everything before it.
            causal = mask is None and q.shape[2] > 1
            assert not causal or q.shape[2] == k.shape[2], "a cached past needs a mask"
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=True
            )
        return out.transpose(1, 2)


@cache
def _varlen_options() -> dict[str, Any]:
    """Grouped heads have to be asked for in newer torch and are understood in older."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _varlen(q: Tensor, k: Tensor, v: Tensor, mask: VarlenMask, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        mask.cu_seqlens,
        mask.cu_seqlens,
        mask.max_seqlen,
        mask.max_seqlen,
        scale=scale,
        window_size=(-1, 0),
        **_varlen_options(),
    )
    assert isinstance(out, torch.Tensor)
    return out.view_as(q)
