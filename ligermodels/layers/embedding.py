"""An embedding that multiplies its rows by a scale at lookup."""

from typing import Any

import torch
from torch import Tensor, nn


class ScaledEmbedding(nn.Embedding):
    """An embedding that returns scale * weight[ids].

    The scale is first rounded to the weight's dtype, as in Gemma. A head tied to the embedding uses
    the unscaled weight.

    Args: those of nn.Embedding; scale, the factor.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, scale: float, **options: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        self.scale = scale

    @property
    def embed_scale(self) -> Tensor:
        """The scale as a tensor. PEFT multiplies by it what an adapter adds to a row."""
        return torch.full((), self.scale, dtype=self.weight.dtype, device=self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """Look up (...) int64 and return (..., embedding_dim) in the weight's dtype."""
        rows = super().forward(input)
        scale = torch.full((), self.scale, dtype=rows.dtype, device=rows.device)
        if type(rows) is not Tensor:  # A DTensor may have to be gathered first.
            return rows * scale
        return rows.mul_(scale)  # The rows are new, and the lookup does not save them.

    def extra_repr(self) -> str:
        """Show the scale in addition to what nn.Embedding shows."""
        return f"{super().extra_repr()}, scale={self.scale}"
