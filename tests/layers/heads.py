"""Small loss heads of every kind, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.layers import LossHead

HIDDEN, VOCAB, BATCH, SEQ = 20, 37, 3, 9
KINDS = ["own", "own, bias", "tied", "replaced", "replaced, bias"]


def make(tied: bool = False, bias: bool = False, **options: Any) -> tuple[LossHead, nn.Embedding]:
    """Return a head and an embedding; the head's weight may be tied to the embedding."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCAB, HIDDEN)
    head = LossHead(HIDDEN, VOCAB, bias=bias, tied_to=embedding if tied else None, **options)
    return head, embedding


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return hidden states, which are a leaf, and targets, three of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, SEQ, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    targets[0, 2:5] = -100
    return hidden.requires_grad_(), targets


class Counting(nn.Linear):
    """A linear that records the number of rows of each call."""

    rows: list[int]

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__.setdefault("rows", []).append(len(x))
        return super().forward(x)


def swap(head: LossHead) -> None:
    """Swap the projection for one of another class with the same weights, which must be called."""
    replaced = Counting(HIDDEN, VOCAB, bias=head.proj.bias is not None)
    replaced.load_state_dict(head.proj.state_dict())
    head.proj = replaced


def build(kind: str, **options: Any) -> tuple[LossHead, Tensor, Tensor | None]:
    """Return a head of a kind, its weight and its bias."""
    head, _ = make("tied" in kind, "bias" in kind, **options)
    if "replaced" in kind:
        swap(head)
    return head, head.weight, None if "tied" in kind else head.proj.bias
