"""Attention of one sequence to another, whose keys and values one packed linear projects."""

from functools import partial

from torch import Tensor, nn

from ligermodels.kernels.checks import check_count, check_number
from ligermodels.layers.attention import head_sizes
from ligermodels.layers.attention_backend import attend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.layers.fusion import PreNormed, norm_then_linear
from ligermodels.layers.recompute import Planned, attend_once


class CrossAttention(Planned, nn.Module):
    """Attention of tokens to a memory, such as an encoder's output (arXiv:1706.03762).

    It has no positions: every token sees the whole memory, except for what a mask hides.

    Args:
        hidden_size: width of input and output.
        num_heads: number of query heads.
        num_kv_heads: number of key heads and of value heads. It must divide num_heads, which is
            also the default.
        head_dim: size of a head. The default is hidden_size / num_heads.
        memory_size: width of the memory. The default is hidden_size.
        bias: whether the projections of queries, keys and values have a bias.
        out_bias: whether the output projection has a bias. The default is `bias`.
        scale: factor on the scores. The default is head_dim^-1/2.
        softcap: scores become softcap * tanh(scores / softcap), arXiv:2408.00118.
        q_norm, k_norm: norms over head_dim of each query head and key head.

    Raises:
        ValueError: a size is not a positive integer, num_heads does not divide hidden_size and
            head_dim is not given, num_kv_heads does not divide num_heads, or scale or softcap is
            not a positive number.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        memory_size: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        heads = head_sizes("CrossAttention", hidden_size, num_heads, num_kv_heads, head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.memory_size = hidden_size
        if memory_size is not None:
            self.memory_size = check_count("CrossAttention", "memory_size", memory_size, 1)
        scale = self.head_dim**-0.5 if scale is None else scale
        self.scale = check_number("CrossAttention", "scale", scale, above=True)
        self.softcap = softcap
        if softcap is not None:
            self.softcap = check_number("CrossAttention", "softcap", softcap, above=True)
        rows = 2 * self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.kv_proj = nn.Linear(self.memory_size, rows, bias=bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=out_bias)

    def forward(
        self,
        x: Tensor | PreNormed,
        memory: Tensor | None,
        mask: AttentionMask | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply attention to x, or to norm(x + residual) if x comes from `pre_norm`.

        Args: x (batch, seq, hidden), or what `pre_norm` returns; memory (batch, keys, memory size);
            mask, an `AttentionMask(seq, keys, ...)`, which layers may share, or a bool tensor
            (batch or 1, 1, seq, keys), True where a token sees a key. None hides nothing.
        Returns: the output (batch, seq, hidden); for an x from `pre_norm`, (the output,
            x + residual).
        Raises:
            ValueError: memory is None or has another shape, or the mask has other sizes.
        """
        if memory is None:
            raise ValueError(
                "CrossAttention: memory is None; pass memory= to the model, or to the context of "
                "its layers; to plan_memory, pass a step_module that makes it"
            )
        if memory.dim() != 3 or memory.shape[-1] != self.memory_size:
            raise ValueError(
                f"CrossAttention: memory has shape {tuple(memory.shape)}; expected (batch, keys, "
                f"{self.memory_size}), or set memory_size"
            )
        q, total = norm_then_linear(x, self.q_proj)
        if memory.shape[0] not in (1, q.shape[0]):
            raise ValueError(
                f"CrossAttention: memory has shape {tuple(memory.shape)}, but x has {q.shape[0]} "
                "rows; pass the memory of each row"
            )
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k, v = self.kv_proj(memory).unflatten(-1, (-1, self.head_dim)).chunk(2, -2)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if not isinstance(mask, AttentionMask):
            mask = AttentionMask(q.shape[2], k.shape[2], mask=mask)
        attention = partial(attend, mask=mask, scale=self.scale, softcap=self.softcap, causal=False)
        out = attend_once(attention, q, k, v) if self.keeps_output else attention(q, k, v)
        out = self.o_proj(out.transpose(1, 2).flatten(-2))
        return out if isinstance(x, Tensor) else (out, total)
