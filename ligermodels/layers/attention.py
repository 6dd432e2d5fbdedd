"""Self-attention on packed projections with grouped heads."""

from typing import Protocol

import torch
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.layers.attention_backend import attend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.layers.fusion import is_plain, norm_then_linear, normalized
from ligermodels.layers.norm import RMSNorm


class Cache(Protocol):
    """What attention asks of a KV cache; `ligermodels.KVCache` is one."""

    length: int

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (batch, kv heads, new, head_dim); return what is held, in the same layout.

        That is everything so far, or in a layer with a window at least what the new see of it.
        """
        ...

    def columns(self, layer_index: int, new: int) -> Tensor | None:
        """Which tokens (held,) int64, counted from the row's first, `update` has just returned
        for `new` ones, in any order; None for all in order. Layers of one window hold the same."""
        ...

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has appended in this forward."""
        ...


class AttentionContext:
    """What all layers of one forward pass share.

    Args: cos, sin (batch or 1, seq, head_dim / 2), float32; mask, an `AttentionMask`, or a bool
        tensor (batch, 1, queries, keys) that is True where a query sees a key, or None for plain
        causality; cache, for inference.

    One object, not loose tensors, and no dataclass: FSDP2's mixed precision casts the floating
    point tensors that it finds in a module's arguments, and would round the angles.
    """

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        mask: AttentionMask | Tensor | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.cos = cos
        self.sin = sin
        if not isinstance(mask, AttentionMask):
            seq = cos.shape[1]
            keys = seq if cache is None else cache.length + seq
            mask = AttentionMask(seq, keys, visible=mask)
        self.mask = mask
        self.cache = cache


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads (arXiv:2305.13245).

    Args:
        hidden_size: width of input and output.
        num_heads, num_kv_heads: query heads, and key and value heads, which divide them.
        head_dim: size of a head; default hidden_size / num_heads.
        bias: whether the projections of queries, keys and values have one.
        out_bias: whether the output's has; default as the others.
        scale: factor on the scores; default head_dim^-1/2.
        window: how many keys a query sees, its own included; default all.
        softcap: scores become softcap * tanh(scores / softcap), arXiv:2408.00118.
        q_norm, k_norm: norms of each query and key head, over head_dim, before the rotation.
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
        out_bias: bool | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
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
        for name, value in (("window", window), ("softcap", softcap)):
            if value is not None and value <= 0:
                raise ValueError(f"Attention: {name}={value}; expected a positive number or None")
        self.window = window
        self.softcap = softcap
        self.layer_index = layer_index
        if num_heads % self.num_kv_heads:
            raise ValueError(f"Attention: {num_heads} heads in {self.num_kv_heads} groups")
        rows = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(hidden_size, rows, bias=bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=out_bias)

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
        q, k, v, total = self._project(x, residual, norm, context)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        columns = None
        if context.cache is not None:
            new = k.shape[2]
            k, v = context.cache.update(self.layer_index, k, v)
            columns = context.cache.columns(self.layer_index, new)
        out = attend(
            q,
            k,
            v,
            context.mask,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            columns=columns,
        )
        out = self.o_proj(out.transpose(1, 2).flatten(-2))
        return out if norm is None else (out, total)

    def _project(
        self, x: Tensor, residual: Tensor | None, norm: RMSNorm | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q (batch, seq, heads, head_dim), k, v (batch, seq, kv heads, head_dim), the sum."""
        heads = (self.num_heads, self.num_kv_heads)
        angles = (context.cos, context.sin)
        if self.q_norm is not None or self.k_norm is not None:
            if norm is None:
                total = x if residual is None else x + residual
                qkv = self.qkv_proj(total)
            else:
                qkv, total = norm_then_linear(x, residual, norm, self.qkv_proj)
            return *self._normed_heads(qkv, context), total
        if (
            norm is not None
            and is_plain(norm, RMSNorm)
            and is_plain(self.qkv_proj, nn.Linear)
            and x.numel()
        ):
            return kernels.norm_qkv_rope(
                x,
                residual,
                norm.weight,
                self.qkv_proj.weight,
                self.qkv_proj.bias,
                *angles,
                *heads,
                eps=norm.eps,
                offset=norm.offset,
                casting_mode=norm.casting_mode,
            )
        y, total = normalized(x, residual, norm)
        return *kernels.rope(self.qkv_proj(y), *angles, *heads), total

    def _normed_heads(
        self, qkv: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.num_heads, self.num_kv_heads)
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.fuses_head_norms and qkv.numel():
            assert isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm)
            return kernels.qk_norm_rope(
                qkv,
                q_norm.weight,
                k_norm.weight,
                context.cos,
                context.sin,
                *heads,
                eps=q_norm.eps,
                offset=q_norm.offset,
                casting_mode=q_norm.casting_mode,
            )
        q, k, v = kernels.split_qkv(qkv, *heads)
        q = q if q_norm is None else q_norm(q)
        k = k if k_norm is None else k_norm(k)
        packed = torch.cat([part.flatten(-2) for part in (q, k, v)], -1)
        return kernels.rope(packed, context.cos, context.sin, *heads)

    @property
    def fuses_head_norms(self) -> bool:
        """Whether q and k have plain RMSNorms that differ in their weights alone."""
        q_norm, k_norm = self.q_norm, self.k_norm
        return (
            isinstance(q_norm, RMSNorm)
            and isinstance(k_norm, RMSNorm)
            and is_plain(q_norm, RMSNorm)
            and is_plain(k_norm, RMSNorm)
            and (q_norm.eps, q_norm.offset, q_norm.casting_mode)
            == (k_norm.eps, k_norm.offset, k_norm.casting_mode)
        )
