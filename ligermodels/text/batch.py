"""The ids of one text or of several, with the names that models and data collators ask for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIDES = ("left", "right")


class Encoding(dict[str, Any]):
    """What a `Tokenizer` returns when it is called: a dict whose values are attributes, too.

    Attributes:
        input_ids: the ids of a text, or of each text; with return_tensors="pt" (batch, seq) int64.
        attention_mask: 0 for padding and 1 for the others, in the form of input_ids.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"an encoding has no {name!r}; it has {', '.join(self)}")

    def to(self, device: "torch.device | str") -> "Encoding":
        """Return a copy with the tensors on a device."""
        return Encoding({name: value.to(device) for name, value in self.items()})


def check_options(
    padding: Any, truncation: Any, max_length: Any, padding_side: Any, return_tensors: Any
) -> None:
    """Raise ValueError for options of a call that there are not, or that have no effect."""
    for name, value, choices in (
        ("padding", padding, (True, False, "longest", "max_length", "do_not_pad")),
        ("truncation", truncation, (True, False)),
        ("padding_side", padding_side, SIDES),
        ("return_tensors", return_tensors, ("pt", None)),  # None returns lists.
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: expected one of {choices}")
    if max_length is not None and not (type(max_length) is int and max_length > 0):
        raise ValueError(f"max_length={max_length!r}: expected a number of tokens above 0")
    if max_length is not None and not truncation and padding != "max_length":
        raise ValueError(
            f"max_length={max_length}: this has no effect; pass truncation=True to cut longer "
            "texts, or padding='max_length' to fill shorter ones"
        )


def cut(whole: list[int], plain: list[int], length: int, side: str) -> list[int]:
    """Return the ids of a text, cut to a length. The tokens around the text (bos, eos) stay.

    Args:
        whole: the ids with the tokens around the text; plain: without them.
        side: the side of the text that is cut off.
    Raises:
        ValueError: there is no room for the text.
    """
    around = len(whole) - len(plain)
    if length <= around:
        raise ValueError(
            f"max_length={length}: this has no room for a text beside {around} special tokens"
        )
    start = next(at for at in range(around + 1) if whole[at : at + len(plain)] == plain)
    kept = plain[: length - around] if side == "right" else plain[around - length :]
    return whole[:start] + kept + whole[start + len(plain) :]


def padded(rows: Sequence[list[int]], length: int, pad: int | None, side: str) -> Encoding:
    """Return rows and their masks, filled to a length.

    Args: pad: the token that fills, if there is one.
    Raises:
        ValueError: something has to be filled, and there is no such token.
    """
    if pad is None and any(len(row) < length for row in rows):
        raise ValueError(
            "the tokenizer has no pad_token; set one, such as "
            "tokenizer.pad_token = tokenizer.eos_token"
        )

    def filled(row: list[int], value: int | None) -> list[Any]:
        more = [value] * (length - len(row))
        return more + row if side == "left" else row + more

    masks = [filled([1] * len(row), 0) for row in rows]
    return Encoding(input_ids=[filled(row, pad) for row in rows], attention_mask=masks)


def as_tensors(encoding: Encoding) -> Encoding:
    """Return the lists as tensors (batch, seq) int64.

    Raises:
        ValueError: the rows have different lengths.
    """
    import torch

    if len({len(row) for row in encoding.input_ids}) > 1:
        raise ValueError("return_tensors='pt': the texts differ in length; pass padding=True")
    return Encoding({n: torch.tensor(rows, dtype=torch.int64) for n, rows in encoding.items()})
