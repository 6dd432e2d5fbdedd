"""The gated delta net: a layer of linear attention, as in Qwen3-Next and Qwen3.5."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.kernels.checks import check_count, check_number


class DeltaState(NamedTuple):
    """What a layer keeps of the tokens so far; its size does not depend on their number."""

    rows: Tensor  # (batch, taps - 1, channels), what the convolution reads
    memory: Tensor  # (batch, value heads, key_dim, value_dim), float32


class GatedDeltaNet(nn.Module):
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
        ValueError: a size is not a positive integer, num_value_heads is no multiple of
            num_key_heads, or eps is negative.
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
            raise ValueError(
                f"GatedDeltaNet: {num_value_heads} value heads; expected a multiple of the "
                f"{num_key_heads} key heads"
            )
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_dim, self.value_dim, self.taps = key_dim, value_dim, taps
        self.eps = check_number("GatedDeltaNet", "eps", eps)
        values = num_value_heads * value_dim
        channels = 2 * num_key_heads * key_dim + values
        self.widths = (channels, values, num_value_heads, num_value_heads)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        out = sum(self.widths)
        self.in_proj = nn.Linear(hidden_size, out, bias=False, device=device, dtype=dtype)
        self.conv_weight = parameter(channels, taps)
        self.a_log = parameter(num_value_heads)
        self.dt_bias = parameter(num_value_heads)
        self.norm_weight = parameter(value_dim)
        self.out_proj = nn.Linear(values, hidden_size, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the decays as the paper does, and the convolution as nn.Conv1d does."""
        nn.init.uniform_(self.conv_weight, -(self.taps**-0.5), self.taps**-0.5)
        with torch.no_grad():
            self.a_log.uniform_(0.01, 16).log_()
        nn.init.ones_(self.dt_bias)
        nn.init.ones_(self.norm_weight)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, state: DeltaState | None = None
    ) -> tuple[Tensor, DeltaState | None]:
        """Return the output, and without cu_seqlens the state after each row.

        Args:
            x: (batch, seq, hidden_size). A row of zeros leaves the memory as it is, but for the
                decay.
            cu_seqlens: (documents + 1,), where each document begins in all rows joined, and their
                end. By default each row is a document.
            state: that of the tokens before, of each row.

        Returns: (batch, seq, hidden_size), and a `DeltaState` or None.
        Raises: ValueError if both cu_seqlens and a state are given, or a shape does not fit.
        """
        if cu_seqlens is not None and state is not None:
            raise ValueError("GatedDeltaNet: a state continues rows; expected no cu_seqlens")
        qkv, z, b, a = self.in_proj(x).split(self.widths, -1)
        past = self.taps - 1
        if state is not None:  # the rows before are convolved again, and then left out
            qkv = torch.cat((state.rows, qkv), 1)
            b, a = (F.pad(gate, (0, 0, past, 0)) for gate in (b, a))
        gates = b, a, self.conv_weight, self.a_log, self.dt_bias
        made = kernels.gated_delta_inputs(qkv, *gates, self.num_key_heads, self.key_dim, cu_seqlens)
        q, k, v, g, beta = (part[:, -x.shape[1] :] for part in made)
        memory = None if state is None else state.memory
        out, memory = kernels.gated_delta(q, k, v, g, beta, cu_seqlens, memory)
        out = kernels.rms_norm(out, self.norm_weight, self.eps)
        gate = F.silu(z.unflatten(-1, (self.num_value_heads, self.value_dim)).float())
        out = self.out_proj((out * gate).to(out.dtype).flatten(2))
        if cu_seqlens is not None:
            return out, None
        rows = F.pad(qkv, (0, 0, max(past - qkv.shape[1], 0), 0))[:, -past:] if past else qkv[:, :0]
        return out, DeltaState(rows, memory)
