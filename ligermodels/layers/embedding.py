"""An embedding whose rows are scaled when looked up."""

from typing import Any

import torch
from torch import Tensor, nn


class ScaledEmbedding(nn.Embedding):
    """scale * weight[ids], with the scale rounded to the weight's dtype first, as Gemma does.

    A head tied to the embedding uses the weight as it is.

    Args: as nn.Embedding's; scale, the factor.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, scale: float, **options: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """(...) int64 -> (..., embedding_dim) in the weight's dtype."""
        rows = super().forward(input)
        return rows * torch.full((), self.scale, dtype=rows.dtype, device=rows.device)

    def extra_repr(self) -> str:
        """Show the scale beside what nn.Embedding shows."""
        return f"{super().extra_repr()}, scale={self.scale}"
