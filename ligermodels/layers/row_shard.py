"""The interface to a part of each row, where several ranks have a row together."""

from typing import Protocol

from torch import Tensor

from ligermodels.layers.loss_head import HeadOptions, HeadOutput, LossHead


class RowShard(Protocol):
    """The part of each row that this rank computes; `ligermodels.parallel.context` makes it.

    Attributes: ranks: how many ranks have a row together.
    """

    @property
    def ranks(self) -> int: ...

    def check(self, seq: int) -> None:
        """Raise ValueError unless rows of this length can be split."""

    def chunks(self, seq: int) -> tuple[tuple[int, int], ...]:
        """Return the first token and the end of each of this rank's chunks of a row."""
        ...

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor of whole rows."""
        ...

    def whole(self, x: Tensor) -> Tensor:
        """Return (batch, seq, ...) from each rank's (batch, seq / ranks, ...)."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        ...

    def loss(
        self, head: LossHead, hidden: Tensor, targets: Tensor, options: HeadOptions
    ) -> HeadOutput:
        """Return the head's output for whole rows.

        Args: hidden (batch, seq / ranks, hidden), of this rank; targets (batch, seq).
        """
        ...
