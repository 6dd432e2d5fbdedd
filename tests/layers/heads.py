"""Small loss heads of every kind, and their loss computed from all logits at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.layers import LossHead
from tests.kernels import formulas
from tests.models.pairs import relative

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


def dense(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return (loss, z-loss) of each token in float64, from all logits at once."""
    logits = logit_scale * F.linear(hidden.double(), weight.double(), bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        None if class_weights is None else class_weights.double(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    z = z_loss * logits.logsumexp(-1).square() * (targets != ignore_index)
    return flat.view(targets.shape) + z, z


def dense_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probability, entropy, correct) of each token in float64."""
    return formulas.token_stats(
        F.linear(hidden.double(), weight.double(), bias), targets, **options
    )


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


def assert_compiled_equals_eager(
    head: LossHead, weight: Tensor, hidden: Tensor, targets: Tensor, **options: Any
) -> None:
    """Compare the loss and the gradients of hidden and weight, compiled into one graph."""
    loss = head(hidden, targets, **options).loss
    wanted = torch.autograd.grad(loss, [hidden, weight])
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    out = compiled(hidden, targets, **options)
    assert relative(out.loss, loss) <= 1e-6
    for grad, want in zip(torch.autograd.grad(out.loss, [hidden, weight]), wanted):
        assert relative(grad, want) <= 1e-6
