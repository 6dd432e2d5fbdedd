"""Embedding models: one vector of each text, pooled from the hidden states of a decoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import ConfigError
from ligermodels.heads.classifier import last_valid
from ligermodels.models.base import DecoderModel

POOLINGS = ("mean", "last")


class EmbeddingModel(nn.Module):
    """A decoder that returns a vector of each row. `losses.info_nce` trains it.

    Args:
        body: the decoder; its head is not used. Load and save it with its own methods.
        pooling: "mean" of the tokens, or the "last" token, which alone has seen all others.
        normalize: whether vectors have length 1, so that their products are cosines.
    Raises:
        ConfigError: the pooling is unknown.
    """

    def __init__(self, body: DecoderModel, pooling: str = "last", normalize: bool = True) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ConfigError(f"pooling: {pooling!r} is not one of {', '.join(POOLINGS)}")
        self.body, self.pooling, self.normalize = body, pooling, normalize

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any
    ) -> Tensor:
        """Return (batch, hidden) float32.

        Args: input_ids, attention_mask (batch, seq), 0 for padding on either side; inputs, other
            arguments of the body's forward.
        """
        hidden = self.body(input_ids, attention_mask=attention_mask, **inputs)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        vectors = pool(hidden, mask, self.pooling)
        return F.normalize(vectors, dim=-1) if self.normalize else vectors


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Return one vector of each row: (batch, seq, hidden), (batch, seq) -> (batch, hidden) float32.

    Args: mask: true for the tokens that count; pooling: one of `POOLINGS`.
    """
    if pooling == "last":
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, last_valid(mask)].float()
    mask = mask.bool()
    # The sum is in float32, without a float32 copy of all hidden states.
    total = hidden.masked_fill(~mask[..., None], 0.0).sum(1, dtype=torch.float32)
    return total / mask.sum(1, keepdim=True).clamp(min=1)
