"""The interfaces that generation needs of a model and of heads that draft."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ligermodels.converters.source import Source
from ligermodels.layers import LossHead, RotaryEmbedding


class TextConfig(Protocol):
    """The fields of a model's config that generation reads."""

    vocab_size: int
    max_position_embeddings: int
    pad_token_id: int | None
    eos_token_id: int | list[int] | None


class LanguageModel(Protocol):
    """A decoder such as `ligermodels.DecoderModel`: its forward returns hidden states."""

    head: LossHead
    rotary_emb: RotaryEmbedding
    source: Source

    @property
    def config(self) -> TextConfig: ...

    def __call__(self, *args: Any, **inputs: Any) -> Any: ...


class DraftHeads(Protocol):
    """Heads that draft the tokens after the next one, such as `MedusaHeads`."""

    @property
    def num_drafts(self) -> int:
        """The number of tokens after the next one that are drafted."""
        ...

    def check_model(self, model: Any) -> None:
        """Raise ValueError unless the heads belong to this model or fit it."""

    def drafter(self, max_length: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that drafts tokens, for one row of so many tokens.

        Its arguments are the hidden states (1, new, hidden) of the tokens since the last call, and
        the tokens after each of them (1, new). It returns the tokens after the last one, (1,
        num_drafts).
        """
        ...
