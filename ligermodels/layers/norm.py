"""The norms as modules. If a residual is passed, its addition is fused into the norm."""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.kernels.checks import check_count, check_number


class RMSNorm(nn.RMSNorm):
    """Root mean square norm over the last dimension. Source: arXiv:1910.07467.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        offset: added to the weight. It is 1 for Gemma, whose weights are stored as w - 1.
        casting_mode: "llama" rounds the normalised input to the input's dtype before it multiplies
            by the weight; "gemma" rounds once, at the end.

    Raises:
        ValueError: hidden_size is not a positive integer, or eps is negative or no number; when
            it is called, casting_mode is unknown.
    """

    weight: nn.Parameter
    eps: float

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("RMSNorm", "hidden_size", hidden_size, 1)
        eps = check_number("RMSNorm", "eps", eps)
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)
        self.offset = offset
        self.casting_mode = casting_mode
        self.reset_parameters()

    @property
    def options(self) -> dict[str, Any]:
        """The settings of the norm, as keyword arguments of the ops that contain it."""
        return {"eps": self.eps, "offset": self.offset, "casting_mode": self.casting_mode}

    def reset_parameters(self) -> None:
        """Set the factor, which is offset + weight, to one."""
        # nn.RMSNorm.__init__ calls this before self.offset is set.
        nn.init.constant_(self.weight, 1.0 - getattr(self, "offset", 0.0))

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x, or x + residual.

        Args: x, residual (..., hidden_size).
        Returns: (..., hidden_size) in the dtype of x; with a residual, (the norm, x + residual).
        """
        if residual is None:
            return kernels.rms_norm(x, self.weight, **self.options)
        return kernels.add_rms_norm(x, residual, self.weight, **self.options)

    def extra_repr(self) -> str:
        """Show offset and casting_mode in addition to what nn.RMSNorm shows."""
        return f"{super().extra_repr()}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class UnitRMSNorm(nn.Module):
    """`RMSNorm` without a weight, for any size of the last dimension. It rounds once, at the end.

    Args: eps: added to the mean square.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = check_number("UnitRMSNorm", "eps", eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (...); the result has its dtype."""
        weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        return kernels.rms_norm(x, weight, self.eps, casting_mode="gemma")


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension: mean 0 and variance 1. Source: arXiv:1607.06450.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the variance.
        elementwise_affine: whether the norm has a weight.
        bias: whether the norm also has a bias.

    Raises:
        ValueError: hidden_size is not a positive integer, or eps is negative or no number.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("LayerNorm", "hidden_size", hidden_size, 1)
        eps = check_number("LayerNorm", "eps", eps)
        super().__init__(hidden_size, eps, elementwise_affine, bias, device, dtype)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x, or x + residual.

        Args: x, residual (..., hidden_size).
        Returns: (..., hidden_size) in the dtype of x; with a residual, (the norm, x + residual).
        """
        if residual is None:
            return kernels.layer_norm(x, self.weight, self.bias, self.eps)
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
