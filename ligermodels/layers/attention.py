"""Self-attention with grouped heads. One packed linear projects queries, keys and values."""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.kernels.checks import check_count, check_number
from ligermodels.kernels.decode_attention import decode_attention
from ligermodels.kernels.dispatch import autocast_dtype
from ligermodels.layers.attention_backend import attend, attend_in_parts
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.layers.fusion import (
    PendingNorm,
    PreNormed,
    gate_then_linear,
    is_plain,
    norm_then_linear,
    products_of,
)
from ligermodels.layers.kv_cache import CachedLayer, DecodeStep, KVCache
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.recompute import Planned, attend_once


class AttentionContext:
    """The inputs that all layers of one forward pass share.

    Args:
        cos, sin: (batch or 1, seq, head_dim / 2), float32.
        mask: an `AttentionMask`, which hides keys in addition to each layer's own rule (causality,
            window), or a bool tensor (batch or 1, 1, queries, keys) that is True where a query sees
            a key and replaces causality. None hides nothing more.
        cache: for inference, the cache to which the layers append their keys and values.
        shared: the keys and values that layers have left for later layers, by layer_index; by
            default none.
        memory, memory_mask: the sequence that `CrossAttention` layers attend to, and its mask, if
            there is one: `cross(x, context.memory, context.memory_mask)`.
        experts: (batch, seq, top_k), the experts of each token that `Experts` of this layer take
            as their second argument, or None if the router chooses.
        layer_input: (batch, seq, size), a further input of this layer, or None.
        query_factors: (batch or 1, seq), float32, factors on the rotated queries, or None.

    It is a plain class, not separate tensors or a dataclass. FSDP2's mixed precision casts every
    floating point tensor that it finds in a module's arguments and in dataclasses, so it would
    round cos and sin.
    """

    _OF_LAYERS = ("memory", "memory_mask", "experts", "layer_input", "query_factors")

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        mask: AttentionMask | Tensor | None = None,
        cache: KVCache | None = None,
        shared: dict[int, tuple[Tensor, Tensor]] | None = None,
        memory: Tensor | None = None,
        memory_mask: AttentionMask | None = None,
        experts: Tensor | None = None,
        layer_input: Tensor | None = None,
        query_factors: Tensor | None = None,
    ) -> None:
        self.cos = cos
        self.sin = sin
        if not isinstance(mask, AttentionMask):
            seq = cos.shape[1]
            keys = seq if cache is None else cache.length + seq
            mask = AttentionMask(seq, keys, mask=mask)
        self.mask = mask
        self.cache = cache
        self.shared = {} if shared is None else shared
        self.memory = memory
        self.memory_mask = memory_mask
        self.experts = experts
        self.layer_input = layer_input
        self.query_factors = query_factors
        self._on_device: dict[torch.device, AttentionContext] = {}

    def to(
        self, device: torch.device | str | int, non_blocking: bool = False
    ) -> "AttentionContext":
        """Return this context on another device. The cache is shared: its buffers are per layer.

        Tools that place a model's layers on several devices (accelerate's device_map) call this
        before each layer, so the context keeps one copy per device.
        """
        device = torch.device(device)
        if device == self.cos.device:
            return self
        if device not in self._on_device:

            def moved(x: Any) -> Any:
                return None if x is None else x.to(device, non_blocking=non_blocking)

            own = {name: moved(getattr(self, name)) for name in self._OF_LAYERS}
            made = moved(self.cos), moved(self.sin), moved(self.mask), self.cache, self.shared
            self._on_device[device] = AttentionContext(*made, **own)
        return self._on_device[device]

    def changed(self, **values: Any) -> "AttentionContext":
        """Return this context with other values of `shared`, `experts`, `layer_input`, ..."""
        own = {name: getattr(self, name) for name in ("shared", *self._OF_LAYERS)}
        return AttentionContext(self.cos, self.sin, self.mask, self.cache, **(own | values))


def head_sizes(
    op: str, hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key heads, and the size of a head.

    Raises:
        ValueError: one of them is not a positive integer, or does not divide what it must divide.
    """
    check_count(op, "hidden_size", hidden_size, 1)
    num_heads = check_count(op, "num_heads", num_heads, 1)
    if num_kv_heads is None:
        num_kv_heads = num_heads
    num_kv_heads = check_count(op, "num_kv_heads", num_kv_heads, 1)
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"{op}: hidden_size {hidden_size} is not a multiple of num_heads {num_heads}; set "
            "head_dim"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{op}: num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}"
        )
    if head_dim is None:
        head_dim = hidden_size // num_heads
    return num_heads, num_kv_heads, check_count(op, "head_dim", head_dim, 1)


class Attention(Planned, CachedLayer, nn.Module):
    """Self-attention with rotary positions and grouped key/value heads (arXiv:2305.13245).

    Args:
        hidden_size: width of input and output.
        num_heads: number of query heads.
        num_kv_heads: number of key heads and of value heads. It must divide num_heads, which is
            also the default.
        head_dim: size of a head. The default is hidden_size / num_heads.
        bias: whether the projections of queries, keys and values have a bias.
        out_bias: whether the output projection has a bias. The default is `bias`.
        scale: factor on the scores. The default is head_dim^-1/2.
        causal: whether a token sees no later token. Without it, a token sees its whole row.
        sliding_window: a token sees only tokens that are less than this number of positions away.
            In a causal layer these are as many keys, its own among them. By default it sees all.
        softcap: scores become softcap * tanh(scores / softcap), arXiv:2408.00118.
        q_norm, k_norm: norms over head_dim of each query head and key head, before the rotation.
        norms_after_rope: whether they come after the rotation instead, as in Hunyuan.
        v_norm: a norm over head_dim of each value head.
        values_are_keys: whether the values are the keys before their norm and the rotation, as in
            Gemma 4. Then qkv_proj computes queries and keys alone.
        layer_index: index of this layer in a KV cache, and for layers that take its keys.
        rotary_dim: the number of elements at the start of each head that rope rotates. The default
            is head_dim; 0 means that the layer does not use positions.
        interleaved_rope: whether rope rotates neighbouring elements together, as in Cohere. By
            default, they are half of rotary_dim apart, as in Llama.
        shares_kv: whether later layers take the keys and values of this one.
        kv_from: the layer_index of an earlier layer with shares_kv, whose keys and values this one
            takes (arXiv:2405.12981). Then qkv_proj computes queries alone.
        sinks: whether each query head has a further logit in its softmax, which takes weight from
            the keys (gpt-oss, arXiv:2508.10925). They are the parameter `sinks`, (num_heads,).
        output_gate: whether each head's output is multiplied by sigmoid(gate), as in Qwen3-Next
            (arXiv:2505.06708). In `qkv_proj`, the rows of a head's gate follow those of its query.

    Raises:
        ValueError: a size is not a positive integer, num_heads does not divide hidden_size and
            head_dim is not given, num_kv_heads does not divide num_heads, sliding_window is not a
            positive integer, scale or softcap is not a positive number, or rotary_dim is odd or
            greater than head_dim.
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
        causal: bool = True,
        sliding_window: int | None = None,
        softcap: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        layer_index: int = 0,
        rotary_dim: int | None = None,
        interleaved_rope: bool = False,
        shares_kv: bool = False,
        kv_from: int | None = None,
        norms_after_rope: bool = False,
        v_norm: nn.Module | None = None,
        values_are_keys: bool = False,
        sinks: bool = False,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        heads = head_sizes("Attention", hidden_size, num_heads, num_kv_heads, head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        scale = self.head_dim**-0.5 if scale is None else scale
        self.scale = check_number("Attention", "scale", scale, above=True)
        self.causal = causal
        self.sliding_window = sliding_window
        if sliding_window is not None:
            self.sliding_window = check_count("Attention", "sliding_window", sliding_window, 1)
        self.softcap = softcap
        if softcap is not None:
            self.softcap = check_number("Attention", "softcap", softcap, above=True)
        self.layer_index = check_count("Attention", "layer_index", layer_index, 0)
        self.rotary_dim = self.head_dim
        if rotary_dim is not None:
            self.rotary_dim = check_count("Attention", "rotary_dim", rotary_dim, 0)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"Attention: rotary_dim={self.rotary_dim}; expected an even number from 0 to "
                f"head_dim, which is {self.head_dim}"
            )
        self.interleaved_rope = interleaved_rope
        if kv_from is not None:
            kv_from = check_count("Attention", "kv_from", kv_from, 0)
        if kv_from is not None and (shares_kv or k_norm is not None):
            raise ValueError(
                f"Attention: with kv_from={kv_from} the layer computes no keys and values; "
                "leave out shares_kv and k_norm"
            )
        self.shares_kv = shares_kv
        self.kv_from = kv_from
        self._own_kv_heads = self.num_kv_heads if kv_from is None else 0
        self.output_gate, self.values_are_keys = output_gate, values_are_keys
        q_heads = 2 * self.num_heads if output_gate else self.num_heads
        projected = self._own_kv_heads * (1 if values_are_keys else 2)
        rows = (q_heads + projected) * self.head_dim
        self.qkv_proj = nn.Linear(hidden_size, rows, bias=bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.v_norm = v_norm
        self.norms_after_rope = norms_after_rope
        self.sinks = nn.Parameter(torch.zeros(self.num_heads)) if sinks else None
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=out_bias)

    @property
    def hf_linears(self) -> dict[str, dict[str, int]]:
        """The packed linear, and the linears of HF that it consists of, with their rows."""
        rows = self.num_heads * self.head_dim * (2 if self.output_gate else 1)
        linears = dict.fromkeys(("k_proj", "v_proj"), self._own_kv_heads * self.head_dim)
        if self.values_are_keys:
            del linears["v_proj"]
        return {"qkv_proj": {"q_proj": rows, **{k: n for k, n in linears.items() if n}}}

    def forward(
        self, x: Tensor | PreNormed, context: AttentionContext
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply attention to x, or to norm(x + residual) if x comes from `pre_norm`.

        Args: x (batch, seq, hidden), or what `pre_norm` returns.
        Returns: the output (batch, seq, hidden); for an x from `pre_norm`, (the output,
            x + residual).
        """
        q, k, v, gate, total = self._project(x, context)
        v = v if self.v_norm is None else self.v_norm(v)
        if context.query_factors is not None:
            q = q * context.query_factors.to(q.dtype)[..., None, None]
        if context.mask.shard is not None and self.kv_from is None:
            k, v = context.mask.shard.whole(k), context.mask.shard.whole(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if context.cache is not None and not self.causal:
            raise ValueError(
                "Attention: a layer with causal=False sees the tokens after each token, so it "
                "cannot continue the tokens in a cache; call it with whole rows, without cache"
            )
        # Another class with a cache's methods may have no steps.
        step: DecodeStep | None = getattr(context.cache, "step", None)
        if step is not None and context.cache is not None:
            out = self._output(self._decode(q, k, v, context.cache, step), gate)
            return out if isinstance(x, Tensor) else (out, total)
        if self.kv_from is not None:
            k, v = self._kv_of_another_layer(context)
        elif context.cache is not None:
            k, v = context.cache.update(self.layer_index, k, v)
            if k.dtype != q.dtype and autocast_dtype(q) is None:
                raise ValueError(
                    f"Attention: the KVCache holds {k.dtype}, and the queries are {q.dtype}; make "
                    "the cache with the model's dtype, or without one"
                )
        if self.shares_kv:
            context.shared[self.layer_index] = k, v
        key_positions = None
        if context.cache is not None:
            owner = self.layer_index if self.kv_from is None else self.kv_from
            key_positions = context.cache.key_positions(owner, q.shape[2])

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
            def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
                return attend(
                    q,
                    k,
                    v,
                    mask,
                    scale=self.scale,
                    window=self.sliding_window,
                    softcap=self.softcap,
                    key_positions=key_positions,
                    causal=self.causal,
                    sinks=sinks,
                )

            inputs = (q, k, v) if self.sinks is None else (q, k, v, self.sinks)
            return attend_once(run, *inputs) if self.keeps_output else run(*inputs)

        out = attend_in_parts(attention, q, k, v, context.mask, self.causal)
        out = self._output(out, gate)
        return out if isinstance(x, Tensor) else (out, total)

    def _output(self, out: Tensor, gate: Tensor | None) -> Tensor:
        """Project the heads' outputs (batch, heads, seq, head_dim), with their gate if any."""
        out = out.transpose(1, 2)
        if gate is None:
            return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]
        return gate_then_linear(out, gate, None, self.o_proj, "sigmoid")

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, step: DecodeStep) -> Tensor:
        """Attend from the new tokens of each row to the cache, in a step of decoding."""
        owner = self.layer_index if self.kv_from is None else self.kv_from
        ends, firsts = step.ends.to(q.device), step.firsts
        return decode_attention(
            q,
            None if self.kv_from is not None else (k, v),
            *cache.buffers(owner),
            ends,
            None if firsts is None else firsts.to(q.device),
            scale=self.scale,
            window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def _project(
        self, x: Tensor | PreNormed, context: AttentionContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return rotated q and k, v, the gate or None, and the sum x + residual or None.

        Returns: q (batch, seq, heads, head_dim); k, v (batch, seq, kv heads, head_dim), with 0
            heads if the layer takes those of another one; the gate of q's shape; the sum if x comes
            from `pre_norm`, else None.
        """
        heads, angles = (self.num_heads, self._own_kv_heads), self._angles(context)
        q_norm, k_norm, linear = self.q_norm, self.k_norm, self.qkv_proj
        with_head_norms = q_norm is not None or k_norm is not None
        products = None
        gate: Tensor | None = None
        plain = not (with_head_norms or self.output_gate or self.values_are_keys)
        if isinstance(x, PendingNorm) and plain:
            products = products_of(linear)
        if products is not None and isinstance(x, PendingNorm) and x.x.numel():
            q, k, v, summed = kernels.norm_qkv_rope(
                *(x.x, x.residual, x.weight, linear.weight, linear.bias, *angles, *heads),
                interleaved=self.interleaved_rope,
                products=products,
                **x.options,
            )
            return q, k, v, None, summed
        qkv, total = norm_then_linear(x, linear)
        if self.values_are_keys:
            qkv = torch.cat([qkv, qkv[..., -self._own_kv_heads * self.head_dim :]], -1)
        if with_head_norms and self.fuses_head_norms and qkv.numel():
            assert isinstance(q_norm, RMSNorm)
            # Without keys, their weight is not used; torch.compile refuses one tensor twice.
            weights = q_norm.weight, getattr(k_norm, "weight", q_norm.weight.detach())
            q, k, v, *gates = kernels.qk_norm_rope(
                *(qkv, *weights, *angles, *heads), **q_norm.options, gated=self.output_gate
            )
            return q, k, v, gates[0] if gates else None, total
        if self.output_gate:
            q, k, v, gate = kernels.split_gated_qkv(qkv, *heads)
            qkv = torch.cat([part.flatten(-2) for part in (q, k, v)], -1)
        if self.norms_after_rope:
            q, k, v = kernels.rope(qkv, *angles, *heads, interleaved=self.interleaved_rope)
            q = q if q_norm is None else q_norm(q)
            return q, k if k_norm is None else k_norm(k), v, gate, total
        if with_head_norms:
            q, k, v = kernels.split_qkv(qkv, *heads)
            q = q if q_norm is None else q_norm(q)
            k = k if k_norm is None else k_norm(k)
            qkv = torch.cat([part.flatten(-2) for part in (q, k, v)], -1)
        q, k, v = kernels.rope(qkv, *angles, *heads, interleaved=self.interleaved_rope)
        return q, k, v, gate, total

    def _angles(self, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the context, or empty ones if nothing is rotated."""
        cos, sin = context.cos, context.sin
        if self.rotary_dim == 0:
            return cos[..., :0], sin[..., :0]
        if 2 * cos.shape[-1] != self.rotary_dim:
            raise ValueError(
                f"Attention: the context's angles {tuple(cos.shape)} rotate {2 * cos.shape[-1]} "
                f"elements of a head, but this layer rotates {self.rotary_dim}; make them with "
                f"RotaryEmbedding({self.rotary_dim}), or set rotary_dim"
            )
        return cos, sin

    def _kv_of_another_layer(self, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Return k, v (batch, kv heads, keys, head_dim) of the layer `kv_from`."""
        assert self.kv_from is not None
        if self.kv_from not in context.shared:
            raise ValueError(
                f"Attention: layer {self.layer_index} takes the keys and values of layer "
                f"{self.kv_from}, which has left none in this context; set shares_kv=True there, "
                "and call that layer first"
            )
        device = context.cos.device
        k, v = (x.to(device) for x in context.shared[self.kv_from])
        if k.shape[1] != self.num_kv_heads or k.shape[3] != self.head_dim:
            raise ValueError(
                f"Attention: layer {self.kv_from} has {k.shape[1]} key heads of size {k.shape[3]}, "
                f"but layer {self.layer_index}, which takes them, has {self.num_kv_heads} of size "
                f"{self.head_dim}; make them equal"
            )
        return k, v

    @property
    def fuses_head_norms(self) -> bool:
        """Whether the norms of q and k run in one op with rope.

        They must be plain RMSNorms with the same options, before rope, of heads of an even size.
        """
        q_norm, k_norm = self.q_norm, self.k_norm
        return (
            self.head_dim % 2 == 0
            and not self.interleaved_rope
            and not self.norms_after_rope
            and is_plain(q_norm, RMSNorm)
            and (
                (k_norm is None and self._own_kv_heads == 0)
                or (is_plain(k_norm, RMSNorm) and q_norm.options == k_norm.options)
            )
        )
