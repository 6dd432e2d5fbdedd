"""The interfaces that generation needs of heads that draft."""

from typing import Any, Protocol

from torch import Tensor


class DraftHeads(Protocol):
    """Heads that draft the tokens after the next one, such as `MedusaHeads`."""

    @property
    def num_drafts(self) -> int:
        """The number of tokens after the next one that are drafted."""
        ...

    def check_model(self, model: Any) -> None:
        """Raise ValueError unless the heads belong to this model or fit it."""

    def drafter(self, max_length: int, sampler: Any) -> "Drafter":
        """Return what drafts tokens for one row of at most so many tokens.

        Args: sampler: the `Sampler` of the generation. What only drafts likely tokens needs none.
        """
        ...


class Drafter(Protocol):
    """Drafts the tokens after a row's last one. A CUDA graph may hold all calls but the first."""

    def __call__(
        self, hidden: Tensor, tokens: Tensor, right: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return drafts (1, num_drafts), and the probabilities that they were drawn with.

        Args:
            hidden: (1, seq, hidden), the model's hidden states of the last pass, which in the first
                call is that of the prompt.
            tokens: (1, seq + 1), the tokens that they are of, and those after each of them.
            right: (1,), how many of the states are of right tokens: tokens[:, right] is the row's
                last token. In the first call it is seq.
            ends: (1,), the tokens of the row without the last one.
        Returns: (1, num_drafts) int64, and (num_drafts, vocab), or None if they were not drawn.
        """
        ...
