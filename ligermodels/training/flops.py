"""The floating point operations that a training step needs, for its share of the GPU's peak (MFU).

They are counted as in PaLM (Chowdhery et al. 2022, appendix B): two for each weight and token in
forward, and as many for each gradient. What a run computes again in backward does not count, and
what it does not need does not either: padding, pairs of tokens that the mask hides, logits of
tokens without a target, and the gradients of frozen weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.adapters.peft_format import linears
from ligermodels.models.base import DecoderModel
from ligermodels.training.packing import IGNORE_INDEX, Batch


@dataclass(frozen=True)
class StepFlops:
    """Operations of forward and backward: for each token, each target, and each pair of tokens.

    Attributes:
        per_token, per_target: of the linears of the layers, and of the head.
        per_pair: of the attention of one layer, for a query and a key.
        windows: how far each layer looks back, in tokens; None is all the way.
    """

    per_token: int
    per_target: int
    per_pair: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: DecoderModel) -> StepFlops:
        """Count the operations of a model, some of whose parameters may be frozen."""
        weight_map = model.weight_map(model.built_from)
        shapes = weight_map.source_shapes()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        per_token = per_target = 0
        for name, parts in linears(weight_map).items():
            if not name.startswith(("layers.", "head.")):
                continue
            size = sum(_size(shapes[f"{part.hf}.weight"]) for part in parts)
            flops = (6 if f"{name}.weight" in trained else 4) * size
            if name.startswith("layers."):
                per_token += flops
            else:
                per_target += flops
        # Adapters are matrices of the layers that the checkpoint does not have.
        known = {f"{name}.weight" for name in linears(weight_map)}
        per_token += 6 * sum(
            p.numel()
            for name, p in trained.items()
            if name.startswith("layers.") and p.ndim == 2 and name not in known
        )
        config = model.config
        if not per_target:  # the head is tied to the embedding
            tied = "embed_tokens.weight" in trained
            per_target = (6 if tied else 4) * config.vocab_size * config.hidden_size
        heads = config.num_attention_heads * config.head_dim
        return cls(per_token, per_target, 12 * heads, tuple(config.sliding_windows))

    def count(self, batch: Batch) -> int:
        """Return the operations of a batch."""
        lengths = _lengths(batch).double()
        pairs = 0.0
        for window in set(self.windows):
            layers = self.windows.count(window)
            near = lengths if window is None else lengths.clamp(max=window)
            # The first tokens see all before them, the others a whole window.
            seen = near * (near + 1) / 2 + (lengths - near) * near
            pairs += layers * float(seen.sum())
        return (
            self.per_token * batch.num_tokens
            + self.per_target * batch.num_targets
            + int(self.per_pair * pairs)
        )


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _lengths(batch: Batch) -> Tensor:
    """Return the lengths of the documents of a batch; padding is one that has no target."""
    if not batch.num_tokens:
        return torch.zeros(0)
    starts = batch.position_ids.flatten() == 0
    document = starts.cumsum(0) - 1
    targets = (batch.labels.flatten() != IGNORE_INDEX).double()
    has_target = torch.bincount(document, targets) > 0
    return torch.bincount(document)[has_target]
