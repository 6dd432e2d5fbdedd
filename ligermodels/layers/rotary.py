"""Rotary position embedding (rope): the angles for every rope type of HF configs."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ligermodels.kernels.checks import check_count, check_number

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, arXiv:2104.09864, with the scaling from a config.

    Args:
        head_dim: size of a head. There are head_dim / 2 frequencies.
        theta: base of the frequencies theta^(-2i / head_dim).
        max_position_embeddings: the sequence length that the model was made for.
        scaling: HF's `rope_scaling` dict, which must contain "rope_type"; None means no scaling.
            With "llama_4_scaling_beta", rotated queries have the factors of `query_factors`.

    The frequencies stay float32 in every dtype of the model, because they are computed again from
    the arguments whenever the module is moved or converted. They are a buffer that is not in the
    state dict.

    Raises:
        ValueError: head_dim is not an even positive integer, theta not a positive number,
            max_position_embeddings not a positive integer, or the rope_type is unknown.
    """

    inv_freq: Tensor
    long_inv_freq: Tensor  # of "longrope": the frequencies beyond the original length
    exponents: Tensor  # of "dynamic": 2i / head_dim

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        max_position_embeddings: int = 2048,
        scaling: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if check_count("RotaryEmbedding", "head_dim", head_dim, 1) % 2:
            raise ValueError(
                f"RotaryEmbedding: head_dim={head_dim}; expected an even number of 2 or more"
            )
        self.head_dim = head_dim
        self.theta = check_number("RotaryEmbedding", "theta", theta, above=True)
        self.max_position_embeddings = check_count(
            "RotaryEmbedding", "max_position_embeddings", max_position_embeddings, 1
        )
        # A copy: the frequencies are computed again later, and the caller may change its dict.
        self.scaling = copy.deepcopy(scaling or {"rope_type": "default"})
        self.rope_type = self.scaling["rope_type"]
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"RotaryEmbedding: rope_type={self.rope_type!r}; expected one of {ROPE_TYPES}"
            )
        self.original_length = (
            self.scaling.get("original_max_position_embeddings") or max_position_embeddings
        )
        self.attention_factor = self._attention_factor()
        # "dynamic" and "longrope" also compute with a second buffer. A forward makes no tensor from
        # numbers of the host: that would be a synchronisation, which a CUDA graph cannot capture.
        for name, values in self._tables().items():
            self.register_buffer(name, values.to(torch.empty(0).device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # The frequencies are computed again: `model.to(torch.bfloat16)` must not round them, and
        # `to_empty` must not leave them uninitialised.
        for name, values in self._tables().items():
            setattr(self, name, values.to(getattr(self, name).device))
        return self

    def forward(
        self, positions: Tensor, length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the angles at `positions`.

        Args: positions (batch or 1, seq), integer; length, the largest position + 1, which
            "dynamic" and "longrope" depend on. By default it is computed from positions on the
            device.
        Returns: cos, sin (batch or 1, seq, head_dim / 2), float32, times the attention factor.
        """
        inv_freq = self.inv_freq
        if self.rope_type in ("dynamic", "longrope"):
            inv_freq = self._frequencies_at(positions.max() + 1 if length is None else length)
        angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def query_factors(self, positions: Tensor) -> Tensor | None:
        """Return the factors on rotated queries at `positions`, or None if they have none.

        Source: Llama 4 and Ministral 3, 1 + beta * ln(1 + floor(position / original length)).

        Args: positions (batch or 1, seq), integer.
        Returns: (batch or 1, seq), float32.
        """
        beta = self.scaling.get("llama_4_scaling_beta")
        if not beta:
            return None
        return 1 + beta * torch.log(1 + (positions / self.original_length).floor())

    def _frequencies_at(self, length: int | Tensor) -> Tensor:
        """Return the frequencies of "dynamic" or "longrope" for a sequence of this length."""
        if not isinstance(length, Tensor):
            length = torch.full((), length, device=self.inv_freq.device)
        if self.rope_type == "longrope":
            beyond = length > self.original_length
            return torch.where(beyond, self.long_inv_freq, self.inv_freq)
        factor = self.scaling["factor"]
        longest = self.max_position_embeddings
        ratio = factor * length.clamp(min=longest).to(torch.float32) / longest - (factor - 1)
        base = self.theta * ratio ** (self.head_dim / (self.head_dim - 2))
        return 1.0 / base**self.exponents

    def _tables(self) -> dict[str, Tensor]:
        """Return the buffers by name, each (head_dim / 2), float32 on CPU."""
        tables = {"inv_freq": self._frequencies()}
        if self.rope_type == "longrope":
            tables["long_inv_freq"] = self._scaled_by("long_factor")
        if self.rope_type == "dynamic":
            tables["exponents"] = self._exponents()
        return tables

    def _exponents(self) -> Tensor:
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device="cpu")
        return pairs.to(torch.float32) / self.head_dim

    def _scaled_by(self, key: str) -> Tensor:
        factors = torch.tensor(self.scaling[key], dtype=torch.float32, device="cpu")
        return 1.0 / (factors * self.theta ** self._exponents())

    def _frequencies(self) -> Tensor:
        """Return the frequencies (head_dim / 2), float32 on CPU.

        For "dynamic" and "longrope" they hold up to the original length.
        """
        exponents = self._exponents()
        plain = 1.0 / self.theta**exponents
        if self.rope_type in ("linear", "proportional"):
            turning = int(self.scaling.get("partial_rotary_factor", 1.0) * self.head_dim // 2)
            plain[turning:] = 0.0  # of "proportional": these elements are not rotated
            return plain / self.scaling.get("factor", 1.0)
        if self.rope_type == "llama3":
            return self._llama3(plain)
        if self.rope_type == "yarn":
            return self._yarn(self.theta**exponents)
        if self.rope_type == "longrope":
            return self._scaled_by("short_factor")
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Scale as Llama 3.1 does.

        Long wavelengths are stretched by the factor and short ones stay as they are. Between them a
        linear ramp mixes both.
        """
        factor = self.scaling["factor"]
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        wavelength = 2 * math.pi / plain
        ramp = (self.original_length / wavelength - low) / (high - low)
        between = (1 - ramp) * plain / factor + ramp * plain
        stretched = torch.where(wavelength > self.original_length / low, plain / factor, between)
        return torch.where(wavelength < self.original_length / high, plain, stretched)

    def _yarn(self, powers: Tensor) -> Tensor:
        """Scale as YaRN does, arXiv:2309.00071.

        Low frequencies are divided by the factor and high ones stay as they are. Between them a
        linear ramp mixes both.
        """
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
        """Return the factor on cos and sin. Attention scores are scaled by its square."""
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
        """Show the arguments that the frequencies are computed from."""
        return f"head_dim={self.head_dim}, theta={self.theta}, rope_type={self.rope_type!r}"
