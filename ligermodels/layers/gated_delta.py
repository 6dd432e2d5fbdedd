"""The gated delta net: a layer of linear attention, as in Qwen3-Next and Qwen3.5."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.kernels.checks import check_count, check_number, misfit
from ligermodels.kernels.gated_delta_decode import gated_delta_decode
from ligermodels.layers.attention import AttentionContext
from ligermodels.layers.fusion import (
    AppliedNorm,
    PreNormed,
    gate_then_linear,
    has_plain_call,
    norm_then_linear,
)
from ligermodels.layers.kv_cache import CachedLayer
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.recompute import Planned, attend_once


class DeltaState(NamedTuple):
    """What a layer keeps of the tokens so far; its size does not depend on their number."""

    rows: Tensor  # (documents, taps - 1, channels), what the convolution reads
    memory: Tensor  # (documents, value heads, key_dim, value_dim), float32


class GatedDeltaNet(Planned, nn.Module):
    """Projections, a causal convolution, the gated delta rule, a gated norm, and a projection.

    One packed linear makes q, k, v, the gate z of the output, and b and a of the gates. The output
    of each value head is norm(out) * silu(z).

    Args:
        hidden_size: size of the input and the output.
        num_key_heads, num_value_heads: value head h reads key head
            h // (num_value_heads / num_key_heads).
        key_dim, value_dim: size of a head.
        taps: tokens that the convolution reads.
        eps: of the norm of the output.

    Raises:
        ValueError: a size is not a positive integer, eps is negative, or the value heads cannot be
            shared out among the key heads.
    Source: arXiv:2412.06464.
    """

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        taps: int = 4,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (hidden_size, num_key_heads, num_value_heads, key_dim, value_dim, taps)
        names = "hidden_size num_key_heads num_value_heads key_dim value_dim taps".split()
        for name, size in zip(names, sizes, strict=True):
            check_count("GatedDeltaNet", name, size, 1)
        if num_value_heads % num_key_heads:
            expected = f"a multiple of num_key_heads {num_key_heads}"
            raise misfit("GatedDeltaNet", expected, num_value_heads=num_value_heads)
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_dim, self.value_dim, self.taps = key_dim, value_dim, taps
        self.eps = check_number("GatedDeltaNet", "eps", eps)
        values = num_value_heads * value_dim
        channels = 2 * num_key_heads * key_dim + values
        self.widths = (channels, values, num_value_heads, num_value_heads)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        options: Any = {"bias": False, "device": device, "dtype": dtype}
        # Names and order are HF's, except that in_proj is four linears there. The layer reads the
        # weights of conv1d and norm.
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, **options)
        self.dt_bias, self.A_log = parameter(num_value_heads), parameter(num_value_heads)
        self.norm = RMSNorm(value_dim, eps, device=device, dtype=dtype)
        self.out_proj = nn.Linear(values, hidden_size, **options)
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), **options)
        self.reset_parameters()

    @property
    def hf_linears(self) -> dict[str, dict[str, int]]:
        """The packed linear, and the linears of HF that it consists of, with their rows."""
        parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return {"in_proj": dict(zip(parts, self.widths, strict=True))}

    def reset_parameters(self) -> None:
        """Draw the decays as the paper does."""
        with torch.no_grad():
            self.A_log.uniform_(0.01, 16).log_()
        nn.init.ones_(self.dt_bias)

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the convolution and the gates compute with.

        Raises: ValueError if the convolution or the norm was replaced or has hooks.
        """
        for child, kind in ((self.conv1d, nn.Conv1d), (self.norm, RMSNorm)):
            if not has_plain_call(child, kind):
                raise ValueError(
                    f"GatedDeltaNet: a {type(child).__name__} stands for its {kind.__name__}, or "
                    "has hooks; the layer reads the weight and does not call it, so leave "
                    "conv1d and norm as they are"
                )
        return self.conv1d.weight[:, 0], self.A_log, self.dt_bias

    def _check_state(self, x: Tensor, state: DeltaState) -> None:
        """Raise ValueError unless a state is that of each row of x (batch, ...)."""
        rows = len(x), self.taps - 1, self.widths[0]
        memory = len(x), self.num_value_heads, self.key_dim, self.value_dim
        fits = isinstance(state, DeltaState) and all(
            x.shape == shape and x.is_contiguous()
            for x, shape in zip(state, (rows, memory), strict=True)
        )
        if not fits:
            given = dict(zip(DeltaState._fields, state, strict=False))
            raise misfit("GatedDeltaNet", f"DeltaState of contiguous {rows} and {memory}", **given)

    def forward(
        self,
        x: Tensor | PreNormed,
        cu_seqlens: Tensor | None = None,
        state: DeltaState | None = None,
        *,
        returns_state: bool = False,
    ) -> tuple[Tensor, Tensor | None, DeltaState | None]:
        """Return the output, the sum x + residual or None, and the state after each document.

        Args:
            x: (batch, seq, hidden_size), or what `pre_norm` returns.
            cu_seqlens: (documents + 1,) int32 or int64, where each document begins in all rows
                joined, and their end; `AttentionMask.document_starts` makes it, with padding as
                documents of its own. By default each row is a document.
            state: that of the tokens before, of each row.
            returns_state: whether to return the state, if none is given.

        Returns: (batch, seq, hidden_size); (batch, seq, hidden_size) if x comes from `pre_norm`;
            and a `DeltaState` of new tensors, if there is one.
        Raises: ValueError if both cu_seqlens and a state are given, or a shape does not fit.
        """
        if cu_seqlens is not None and state is not None:
            raise ValueError("GatedDeltaNet: a state continues rows; expected no cu_seqlens")
        projected, total = norm_then_linear(x, self.in_proj)
        qkv, z, b, a = projected.split(self.widths, -1)
        weights = self._weights()
        sizes = self.num_key_heads, self.key_dim
        before = memory = None
        if state is not None:
            self._check_state(qkv, state)
            before = state.memory
            # The rows before are convolved again. Their gates forget and write nothing.
            qkv = torch.cat((state.rows, qkv), 1)
            b, a = (F.pad(x, (0, 0, self.taps - 1, 0), value=-torch.inf) for x in (b, a))

        def run(qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
            nonlocal memory
            out, memory = kernels.gated_delta_layer(qkv, b, a, *weights, *sizes, cu_seqlens, before)
            return out

        returns_state = returns_state or state is not None
        attends_once = self.keeps_output and not returns_state
        out = attend_once(run, qkv, b, a) if attends_once else run(qkv, b, a)
        out = out if state is None else out[:, self.taps - 1 :]
        z = z.unflatten(-1, (self.num_value_heads, self.value_dim))
        out = gate_then_linear(out, z, self.norm.weight, self.out_proj, "silu", self.eps)
        if not returns_state:
            return out, total, None
        assert memory is not None
        return out, total, DeltaState(self._last_rows(qkv, cu_seqlens), memory)

    def _last_rows(self, qkv: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Return the last taps - 1 rows of each document, with zeros before its first one."""
        past = self.taps - 1
        if cu_seqlens is None:
            return F.pad(qkv, (0, 0, past, 0))[:, qkv.shape[1] :].contiguous()
        at = cu_seqlens[1:, None] - torch.arange(past, 0, -1, device=qkv.device)
        inside = (at >= cu_seqlens[:-1, None])[..., None]
        return torch.where(inside, qkv.flatten(0, 1)[at.clamp(min=0)], 0)

    @torch.no_grad()
    def decode(self, x: Tensor | PreNormed, state: DeltaState) -> tuple[Tensor, Tensor | None]:
        """Compute the next tokens of each row, and overwrite the state with that after them.

        A CUDA graph can hold this. It has no gradient.

        Args: x, state: as in `forward`.
        Returns: the first two of what `forward` returns.
        """
        projected, total = norm_then_linear(x, self.in_proj)
        self._check_state(projected, state)
        weights = *self._weights(), self.norm.weight
        sizes = self.num_key_heads, self.key_dim, self.eps
        out = gated_delta_decode(projected, weights, state, *sizes)
        return self.out_proj(out), total


class LinearAttention(CachedLayer, GatedDeltaNet):
    """A gated delta net in the place of an `Attention`, which knows documents, padding and cache.

    Args: those of `GatedDeltaNet`; layer_index: index of this layer in a cache.
    """

    recurrent = True
    sliding_window = None

    def __init__(self, *args: Any, layer_index: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layer_index = check_count("LinearAttention", "layer_index", layer_index, 0)

    def forward(  # type: ignore[override]
        self, x: Tensor | PreNormed, context: AttentionContext
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return what `Attention.forward` does for the same arguments.

        Raises: ValueError if a token is to see later ones, as those of a prefix do.
        """
        mask, cache = context.mask, context.cache
        if mask.prefix_lengths is not None or mask.mask is not None:
            raise ValueError(
                "LinearAttention: a token sees the tokens before it and no others; call the model "
                "without prefix_lengths, and without a mask of pairs"
            )
        kept = None if cache is None else cache.state(self.layer_index)
        state = None if kept is None else DeltaState(*kept)
        if cache is None:
            rows = x if isinstance(x, Tensor) else x[0]
            starts = mask.document_starts(len(rows), rows.device)
            out, total, _ = GatedDeltaNet.forward(self, x, starts)
        elif cache.step is not None:
            assert state is not None, "a pass has written the prompt"
            out, total = self.decode(x, state)
        else:
            given = x
            if mask.padding_mask is not None:
                # A token of zeros leaves a state of zeros as it is.
                output, before = (x, x) if isinstance(x, Tensor) else x.apply()
                output = output * mask.padding_mask[:, -mask.queries :, None]
                given = output if isinstance(x, Tensor) else AppliedNorm(output, before)
            out, total, after = GatedDeltaNet.forward(
                self, given, mask.cu_seqlens, state, returns_state=True
            )
            assert after is not None
            cache.keep_state(self.layer_index, after)
        return out if isinstance(x, Tensor) else (out, total)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a row's state, whose convolution's rows have elements of a size."""
        rows = (self.taps - 1) * self.widths[0]
        return itemsize * rows + 4 * self.num_value_heads * self.key_dim * self.value_dim
