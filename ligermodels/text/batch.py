"""The ids of one text or of several, with the names that models and data collators ask for."""

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


def as_tensors(encoding: Encoding) -> Encoding:
    """Return the lists as tensors (batch, seq) int64.

    Raises:
        ValueError: the rows have different lengths.
    """
    import torch

    if len({len(row) for row in encoding.input_ids}) > 1:
        raise ValueError("return_tensors='pt': the texts differ in length; pass padding=True")
    return Encoding({n: torch.tensor(rows, dtype=torch.int64) for n, rows in encoding.items()})
