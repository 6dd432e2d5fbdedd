"""Choose the next token from logits.

Shape legend: B batch, S sequence, V vocabulary.
"""

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_count

# At this temperature a draw takes the likeliest token. Closer to 0, the logits would overflow.
_LEAST_TEMPERATURE = 1e-20
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is chosen: the likeliest one, or a random draw.

    Attributes:
        do_sample: whether to draw the token. If False, the likeliest token is taken.
        temperature: the number that divides the logits. Close to 0, a draw takes the likeliest
            token.
        top_k: how many of the likeliest tokens a draw may choose from. None means all.
        top_p: the sum of probabilities up to which the likeliest tokens are kept. None means all.
    Raises:
        ValueError: a number is out of range, or it has no effect because the choice is greedy.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, Real) and 0 < self.temperature < math.inf):
            raise ValueError(
                f"temperature={self.temperature!r}: the temperature must be a finite number above "
                "0; do_sample=False is greedy"
            )
        if self.top_k is not None:
            check_count("generate", "top_k", self.top_k, 1)
        if self.top_p is not None and not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise ValueError(
                f"top_p={self.top_p!r}: the number must be above 0 and at most 1, or None for all "
                "tokens"
            )
        filters = (self.temperature, self.top_k, self.top_p)
        if not self.do_sample and filters != (1.0, None, None):
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}: these "
                "have no effect on a greedy choice; pass do_sample=True"
            )

    def filter(self, logits_BV: Tensor) -> Tensor:
        """Return the logits (B, V) divided by the temperature, with -inf for excluded tokens.

        Top-k is applied first. Top-p then keeps the likeliest tokens, up to and including the one
        with which the sum of their probabilities reaches `top_p` (arXiv:1904.09751).
        """
        temperature = min(max(self.temperature, _LEAST_TEMPERATURE), _LARGEST)
        logits_BV = logits_BV / float(temperature)
        if temperature < 1:
            logits_BV = logits_BV.clamp(max=_LARGEST)
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
        """Return one token for each row of the float32 logits, (B,)."""
        if not self.do_sample:
            return logits_BV.argmax(-1)
        probabilities = self.filter(logits_BV).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


class RepetitionPenalty:
    """A penalty on the tokens that a row already contains (arXiv:1909.05858, section 4.1).

    Args:
        penalty: the number that divides a positive logit and multiplies a negative logit.
        prompt_BS: the prompts.
        mask_BS: 0 for padding. None means that there is no padding.
        vocab_size: V.
    """

    def __init__(
        self, penalty: float, prompt_BS: Tensor, mask_BS: Tensor | None, vocab_size: int
    ) -> None:
        self.penalty = penalty
        # The additional column is for padding.
        seen = prompt_BS.new_zeros(len(prompt_BS), vocab_size + 1, dtype=torch.bool)
        if mask_BS is not None:
            prompt_BS = prompt_BS.masked_fill(mask_BS == 0, vocab_size)
        self.seen_BV = seen.scatter_(1, prompt_BS, True)[:, :vocab_size]

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Return the logits with the penalty on the tokens that were seen."""
        penalised = torch.where(logits_BV > 0, logits_BV / self.penalty, logits_BV * self.penalty)
        if self.penalty < 1:
            penalised = penalised.clamp(max=_LARGEST)
        return torch.where(self.seen_BV, penalised, logits_BV)

    def add(self, tokens_B: Tensor) -> None:
        """Record the tokens that were chosen as seen."""
        self.seen_BV.scatter_(1, tokens_B.unsqueeze(1), True)
