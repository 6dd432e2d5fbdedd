"""Heads that predict the tokens after the next one, trained with few matrix products each.

Medusa (arXiv:2401.10774): head k of K predicts the token k + 1 places after the next one from the
body's last hidden state. All heads go through one chunk loop if they share their projection, and
one after the other if each has its own, so that only one sum of a weight gradient exists at a time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import ConfigError
from ligermodels.kernels.loss_options import LossOptions
from ligermodels.layers import LossHead
from ligermodels.layers.loss_head import only_normalizer
from ligermodels.models.base import DecoderModel
from ligermodels.models.inputs import next_token_targets


class ResidualBlock(nn.Module):
    """x + silu(linear(x)), as in Medusa. It starts as the identity, so a new head is the old one.

    Args: hidden_size: of the input and of the output (..., hidden).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class DraftOutput(NamedTuple):
    """The losses of several heads."""

    loss: Tensor  # the weighted sum, differentiable
    losses: Tensor  # (heads) the mean loss of each, without its weight; not differentiable
    num_valid: Tensor  # (heads) int64: how many targets each head has


class MedusaHeads(nn.Module):
    """Some heads on the last hidden state of a body, each for a token further ahead.

    Args:
        head: the body's head. With tied True, all heads use its projection, and the projection
            learns from them; else each has its own, which starts as a copy.
        num_heads: how many tokens after the next one are predicted.
        num_blocks: how many `ResidualBlock`s each head has.
        decay: head k, counted from 0, has the weight decay^(k + 1) in the loss (0.8 in the paper).

    Raises:
        ConfigError: a number is not positive, or the body's projection is not a plain nn.Linear.
    """

    def __init__(
        self,
        head: LossHead,
        num_heads: int,
        *,
        num_blocks: int = 1,
        tied: bool = False,
        decay: float = 0.8,
    ) -> None:
        super().__init__()
        if num_heads < 1 or num_blocks < 1 or decay <= 0:
            raise ConfigError(
                f"MedusaHeads: num_heads={num_heads}, num_blocks={num_blocks}, decay={decay}; "
                "expected positive numbers"
            )
        if not head.is_linear:
            raise ConfigError(
                f"MedusaHeads: the head's projection is a {type(head.proj).__name__}; expected a "
                "plain nn.Linear"
            )
        if head.vocab_shard is not None:
            raise ConfigError(
                "MedusaHeads: the head's vocabulary is split over ranks; make the heads before the "
                "model is sharded"
            )
        weight = head.weight
        self.decay, self.tied, self.hidden_size = decay, tied, weight.shape[1]
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(self.hidden_size) for _ in range(num_blocks)))
            for _ in range(num_heads)
        ).to(weight.device, weight.dtype)
        # The tuple keeps nn.Module from registering the body's head as a child.
        self._head = (head,)
        self.heads = nn.ModuleList()
        if not tied:
            self.heads.extend(_copy(head) for _ in range(num_heads))

    def head(self, index: int) -> LossHead:
        """Return the projection of a head: its own, or the body's."""
        return self._head[0] if self.tied else self.heads[index]  # type: ignore[return-value]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of all heads: (..., hidden) -> (heads, ..., vocab)."""
        return torch.stack(
            [self.head(i).logits(block(hidden)) for i, block in enumerate(self.blocks)]
        )

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        normalizer: float | Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        **options: Any,
    ) -> DraftOutput:
        """Return the sum of the heads' losses.

        Args:
            hidden: (batch, seq, hidden) of the body, at the tokens of labels.
            labels: (batch, seq) int64 at the positions of the inputs, as a model takes them; the
                ignore_index of the head is ignored.
            document_ids: (batch, seq); no head predicts a token of another document.
            normalizer: what divides each head's sum over tokens; by default it is the head's own
                number of targets. num_items_in_batch is another name of it.
            options: those of `LossHead.forward` that choose targets, chunks and memory.
        Raises: what `LossHead.forward` raises.
        """
        count = len(self.blocks)
        ignore_index = options.get("ignore_index", self.ignore_index)
        targets = [draft_targets(labels, i + 1, document_ids, ignore_index) for i in range(count)]
        valid = torch.stack([(x != ignore_index).sum() for x in targets])
        normalizer = only_normalizer(normalizer, num_items_in_batch)
        LossOptions.of(normalizer=normalizer)  # raises
        divisors = loss_divisors(valid, normalizer)
        divisors = divisors.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        decays = self.decay ** torch.arange(1, count + 1, device=hidden.device).to(divisors)
        scales = decays / divisors
        if self.tied:
            if (most := options.get("max_valid")) is not None:
                options["max_valid"] = count * most  # of all heads together
            states = torch.stack([block(hidden) for block in self.blocks])
            loss, sums = shared_head_loss(self.head(0), states, targets, scales, **options)
        else:
            # Only one float32 sum of a weight gradient exists at a time, and no head keeps logits.
            options["weight_grad_in_forward"] = True
            losses = [
                self.head(i)(block(hidden), target, reduction="sum", **options).loss
                for i, (block, target) in enumerate(zip(self.blocks, targets))
            ]
            sums = scales * torch.stack(losses)
            loss = sums.sum()
        return DraftOutput(loss, sums.detach() / decays, valid)

    @property
    def num_drafts(self) -> int:
        """The number of tokens after the next one that are predicted."""
        return len(self.blocks)

    def check_model(self, model: DecoderModel) -> None:
        """Raise ValueError unless the heads are for a model of these sizes."""
        theirs = self.head(0).vocab_size, self.hidden_size
        own = model.head.vocab_size, model.config.hidden_size
        if theirs != own:
            raise ValueError(
                f"generate with heads: they are for a vocabulary of {theirs[0]} and hidden states "
                f"of {theirs[1]}, but the model has {own[0]} and {own[1]}"
            )

    def drafter(self, max_length: int, sampler: object) -> Callable[..., tuple[Tensor, None]]:
        """Return what drafts tokens in generation: see `ligermodels.generation.models`."""

        def draft(
            hidden: Tensor, tokens: Tensor, right: Tensor, ends: Tensor
        ) -> tuple[Tensor, None]:
            last = hidden[0].index_select(0, right - 1)
            return self.logits(last)[:, 0].argmax(-1)[None], None

        return draft

    @property
    def ignore_index(self) -> int:
        """The target that no head learns from."""
        return self._head[0].loss_options.get("ignore_index", -100)


def shared_head_loss(
    head: LossHead, states: Tensor, targets: list[Tensor], scales: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return a scaled sum of losses of one head, and the parts, from one loop over all tokens.

    Args: states: (parts, batch, seq, hidden); targets: (batch, seq) for each part; scales: (parts)
        what multiplies the summed loss of each; options: of the head.
    Returns: a scalar, differentiable, and (parts), not differentiable.
    """
    out = head(
        states,
        torch.stack(targets),
        token_weights=scales.view(-1, 1, 1).expand(states.shape[:-1]),
        reduction="sum",
        return_token_loss=True,
        **options,
    )
    assert out.token_loss is not None
    return out.loss, out.token_loss.flatten(1).sum(1)


def loss_divisors(valid: Tensor, normalizer: float | Tensor | None) -> Tensor:
    """Return the divisors of the heads' sums: the normalizer, or valid (heads). 0 counts as 1."""
    divisors = valid if normalizer is None else torch.ones_like(valid) * normalizer
    return torch.where(divisors == 0, 1, divisors)


def draft_targets(
    labels: Tensor, ahead: int, document_ids: Tensor | None, ignore_index: int
) -> Tensor:
    """Return the label `ahead` + 1 places later (batch, seq), in the same document."""
    targets = next_token_targets(labels, None, ignore_index)
    for _ in range(ahead):
        targets = F.pad(targets[:, 1:], (0, 1), value=ignore_index)
    if document_ids is None:
        return targets
    later = document_ids
    for _ in range(ahead + 1):
        later = F.pad(later[:, 1:], (0, 1), value=-1)
    return targets.masked_fill(later != document_ids, ignore_index)


def _copy(head: LossHead) -> LossHead:
    """Return a head of the same options with its own projection, which starts with the values."""
    weight = head.weight
    vocab, hidden = weight.shape
    bias = getattr(getattr(head, "proj", None), "bias", None)  # a tied head has no projection
    options: dict[str, Any] = {**head.loss_options, "class_weights": head.class_weights}
    with torch.device("meta"):
        copied = LossHead(hidden, vocab, bias=bias is not None, **options)
    copied.proj.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        copied.proj.bias = nn.Parameter(bias.detach().clone())
    return copied
