"""Rotary position embedding: the angles of every rope type that HF configs name."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, arXiv:2104.09864, with the scaling that a config asks for.

    Args:
        head_dim: size of a head; half as many frequencies.
        theta: base of the frequencies theta^(-2i / head_dim).
        max_position_embeddings: the length the model was made for.
        scaling: HF's `rope_scaling` dict with "rope_type" in it, or None for none.

    The frequencies are float32 whatever dtype the model is converted to: they are derived from
    the arguments again after every move. They are no parameters and not in the state dict.
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        max_position_embeddings: int = 2048,
        scaling: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"RotaryEmbedding: head_dim={head_dim}; expected an even number")
        self.head_dim = head_dim
        self.theta = theta
        self.max_position_embeddings = max_position_embeddings
        self.scaling = scaling or {"rope_type": "default"}
        self.rope_type = self.scaling["rope_type"]
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type={self.rope_type!r}: expected one of {ROPE_TYPES}")
        self.original_length = (
            self.scaling.get("original_max_position_embeddings") or max_position_embeddings
        )
        self.attention_factor = self._attention_factor()
        frequencies = self._frequencies()
        self.register_buffer("inv_freq", frequencies.to(torch.empty(0).device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # Derived, never converted: `model.to(torch.bfloat16)` must not round frequencies, and
        # `to_empty` must not leave them unset.
        self.inv_freq = self._frequencies().to(self.inv_freq.device)
        return self

    def forward(
        self, positions: Tensor, length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Angles of `positions`.

        Args: positions (batch or 1, seq), integer; length, tokens in the call (largest position
            + 1), on which "dynamic" and "longrope" depend; default: taken from positions, on
            the device.
        Returns: cos, sin (batch or 1, seq, head_dim / 2), float32, attention factor included.
        """
        inv_freq = self.inv_freq
        if self.rope_type in ("dynamic", "longrope"):
            inv_freq = self._frequencies_at(positions.max() + 1 if length is None else length)
        angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def _frequencies_at(self, length: int | Tensor) -> Tensor:
        """Frequencies of the two types that change with the length of the call."""
        device = self.inv_freq.device
        length = torch.as_tensor(length, device=device)
        if self.rope_type == "longrope":
            exponents = self._exponents(device)
            long = self._scaled_by("long_factor", exponents)
            return torch.where(length > self.original_length, long, self.inv_freq)
        factor = self.scaling["factor"]
        longest = self.max_position_embeddings
        ratio = factor * length.clamp(min=longest).to(torch.float32) / longest - (factor - 1)
        base = self.theta * ratio ** (self.head_dim / (self.head_dim - 2))
        return 1.0 / base ** self._exponents(device)

    def _exponents(self, device: torch.device | str = "cpu") -> Tensor:
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=device)
        return pairs.to(torch.float32) / self.head_dim

    def _scaled_by(self, key: str, exponents: Tensor) -> Tensor:
        factors = torch.tensor(self.scaling[key], dtype=torch.float32, device=exponents.device)
        return 1.0 / (factors * self.theta**exponents)

    def _frequencies(self) -> Tensor:
        """Frequencies (head_dim / 2) float32 on CPU, for calls no longer than the original."""
        exponents = self._exponents()
        plain = 1.0 / self.theta**exponents
        if self.rope_type in ("linear", "proportional"):
            return plain / self.scaling.get("factor", 1.0)
        if self.rope_type == "llama3":
            return self._llama3(plain)
        if self.rope_type == "yarn":
            return self._yarn(self.theta**exponents)
        if self.rope_type == "longrope":
            return self._scaled_by("short_factor", exponents)
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Llama 3.1: stretch long wavelengths by the factor, keep short ones, a ramp between."""
        factor = self.scaling["factor"]
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        wavelength = 2 * math.pi / plain
        ramp = (self.original_length / wavelength - low) / (high - low)
        between = (1 - ramp) * plain / factor + ramp * plain
        stretched = torch.where(wavelength > self.original_length / low, plain / factor, between)
        return torch.where(wavelength < self.original_length / high, plain, stretched)

    def _yarn(self, powers: Tensor) -> Tensor:
        """YaRN, arXiv:2309.00071: interpolate slow frequencies, keep fast ones, a ramp between."""
        factor = self.scaling["factor"]

        def dimension(rotations: float) -> float:
            turns = self.original_length / (rotations * 2 * math.pi)
            return self.head_dim * math.log(turns) / (2 * math.log(self.theta))

        low = dimension(self.scaling.get("beta_fast") or 32)
        high = dimension(self.scaling.get("beta_slow") or 1)
        if self.scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(self.head_dim // 2, dtype=torch.float32, device=powers.device)
        keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        return (1 - keep) / (factor * powers) + keep / powers

    def _attention_factor(self) -> float:
        """What cos and sin are multiplied by, and attention scores so by its square."""
        given = self.scaling.get("attention_factor")
        if given is not None:
            return float(given)
        factor = self.scaling.get("factor")
        if self.rope_type == "yarn":
            stretch = float(self.scaling["factor"])

            def magnitude(scale: float = 1.0) -> float:
                return 0.1 * scale * math.log(stretch) + 1.0 if stretch > 1 else 1.0

            mscale, all_dim = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
            return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude()
        if self.rope_type == "longrope":
            if factor is None:
                factor = self.max_position_embeddings / self.original_length
            if factor > 1:
                return math.sqrt(1 + math.log(factor) / math.log(self.original_length))
        return 1.0

    def extra_repr(self) -> str:
        """Show what the frequencies derive from."""
        return f"head_dim={self.head_dim}, theta={self.theta}, rope_type={self.rope_type!r}"
