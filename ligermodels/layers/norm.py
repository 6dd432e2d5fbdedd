"""The norms as modules, with the residual add fused in where a residual is given."""

from typing import TypedDict, overload

import torch
from torch import Tensor, nn

from ligermodels import kernels


class RMSNormOptions(TypedDict):
    """What the ops with an RMS norm in them take by keyword."""

    eps: float
    offset: float
    casting_mode: str


class RMSNorm(nn.RMSNorm):
    """Root mean square norm over the last dimension. Source: arXiv:1910.07467.

    Args:
        hidden_size: the last dimension.
        eps: added to the mean square.
        offset: added to the weight; 1 for Gemma, whose weights are stored as w - 1.
        casting_mode: "llama" rounds the normalised input to its dtype before the product with the
            weight, "gemma" rounds once at the end.
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
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)
        self.offset = offset
        self.casting_mode = casting_mode
        self.reset_parameters()

    @property
    def options(self) -> RMSNormOptions:
        """All that the norm depends on besides its weight."""
        return {"eps": self.eps, "offset": self.offset, "casting_mode": self.casting_mode}

    def reset_parameters(self) -> None:
        """Set the factor, offset + weight, to one."""
        # nn.RMSNorm calls this before the offset is known.
        nn.init.constant_(self.weight, 1.0 - getattr(self, "offset", 0.0))

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x, or x + residual.

        Args: x, residual (..., hidden_size).
        Returns: (..., hidden_size) in x's dtype; with a residual the pair (that, x + residual).
        """
        if residual is None:
            return kernels.rms_norm(x, self.weight, **self.options)
        return kernels.add_rms_norm(x, residual, self.weight, **self.options)

    def extra_repr(self) -> str:
        """Show offset and casting_mode beside what nn.RMSNorm shows."""
        return f"{super().extra_repr()}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LayerNorm(nn.LayerNorm):
    """Norm of mean zero and variance one over the last dimension. Source: arXiv:1607.06450.

    Args:
        hidden_size: the last dimension.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias, too.
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
        super().__init__(hidden_size, eps, elementwise_affine, bias, device, dtype)

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x, or x + residual.

        Args: x, residual (..., hidden_size).
        Returns: (..., hidden_size) in x's dtype; with a residual the pair (that, x + residual).
        """
        if residual is None:
            return kernels.layer_norm(x, self.weight, self.bias, self.eps)
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
