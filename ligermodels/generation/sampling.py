"""Choosing the next token from logits.

Shape legend: B batch, S sequence, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest one, or one drawn after the filters.

    Attributes:
        do_sample: draw; otherwise the likeliest token is taken.
        temperature: divides the logits.
        top_k: keep so many of the likeliest tokens; None keeps all.
        top_p: keep the likeliest tokens until their probabilities sum to it; None keeps all.
    Raises:
        ValueError: a number is out of its range, or has no effect since the choice is greedy.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature}: must be above 0; do_sample=False is greedy"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1, or None")
        filters = (self.temperature, self.top_k, self.top_p)
        if not self.do_sample and filters != (1.0, None, None):
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}: without "
                "effect on a greedy choice; pass do_sample=True"
            )

    def filter(self, logits_BV: Tensor) -> Tensor:
        """Logits divided by the temperature, and -inf where top-k or top-p leaves a token out.

        Top-k is applied first. Top-p keeps the likeliest tokens up to and including the one with
        which their sum reaches it (arXiv:1904.09751).
        """
        logits_BV = logits_BV / self.temperature
        if self.top_k is not None:
            kept = torch.topk(logits_BV, min(self.top_k, logits_BV.shape[-1])).values
            logits_BV = logits_BV.masked_fill(logits_BV < kept[:, -1:], -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ascending, order = logits_BV.sort()
            below = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            below[:, -1] = False
            logits_BV = logits_BV.masked_fill(below.scatter(-1, order, below), -torch.inf)
        return logits_BV

    def next_tokens(self, logits_BV: Tensor, generator: torch.Generator | None) -> Tensor:
        """One token (B,) for each row of float32 logits."""
        if not self.do_sample:
            return logits_BV.argmax(-1)
        probabilities = self.filter(logits_BV).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


class RepetitionPenalty:
    """Makes the tokens that a row has had less likely (arXiv:1909.05858, section 4.1).

    Args:
        penalty: divides a positive logit and multiplies a negative one.
        prompt_BS: the prompts.
        mask_BS: 0 for padding; None for none.
        vocab_size: V.
    """

    def __init__(
        self, penalty: float, prompt_BS: Tensor, mask_BS: Tensor | None, vocab_size: int
    ) -> None:
        self.penalty = penalty
        # One column more, in which padding is put.
        seen = prompt_BS.new_zeros(len(prompt_BS), vocab_size + 1, dtype=torch.bool)
        if mask_BS is not None:
            prompt_BS = prompt_BS.masked_fill(mask_BS == 0, vocab_size)
        self.seen_BV = seen.scatter_(1, prompt_BS, True)[:, :vocab_size]

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Logits with the penalty on the tokens seen so far."""
        penalised = torch.where(logits_BV > 0, logits_BV / self.penalty, logits_BV * self.penalty)
        return torch.where(self.seen_BV, penalised, logits_BV)

    def add(self, tokens_B: Tensor) -> None:
        """Count the tokens that were chosen."""
        self.seen_BV.scatter_(1, tokens_B.unsqueeze(1), True)
