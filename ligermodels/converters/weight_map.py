"""The weight map: which rows of an HF checkpoint fill which rows of each native parameter.

A native parameter is a list of row spans of HF tensors. Loading, reading the rows of one rank and
exporting all use these spans. Each family has a function from its config to a `WeightMap`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ligermodels.converters.hf_config import HFConfig


@dataclass(frozen=True)
class Span:
    """Rows of an HF tensor that one native parameter takes.

    The native rows `row` to `row + rows` are the rows `source_row` to `source_row + rows` of the HF
    tensor `source`.
    """

    source: str
    source_row: int
    row: int
    rows: int


@dataclass(frozen=True)
class Entry:
    """A native parameter: its name in the state dict, its shape, and the spans that fill it."""

    name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Towers:
    """The tensor names of a checkpoint that has other towers in addition to the text model.

    Attributes:
        spellings: pairs of a name prefix there and the prefix that replaces it in the text model.
        left_out: the name prefixes of the other towers, whose tensors are not loaded.
    """

    spellings: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]

    def text_name(self, name: str) -> str:
        """Return the tensor's name in a checkpoint that holds only the text model."""
        for theirs, alone in self.spellings:
            if name.startswith(theirs):
                return alone + name.removeprefix(theirs)
        return name


@dataclass(frozen=True)
class WeightMap:
    """Every parameter of a model, at the sizes of one config, and the HF tensors that fill it.

    Attributes:
        entries: every native parameter, in the order in which an export writes them.
        aliases: HF name of a tensor that a checkpoint may hold as a copy -> HF name of its
            original. Both must be equal.
        ignored: name endings of HF tensors that the model does not need.
        towers: the other towers that a checkpoint of the family may hold. None if it has none.
    """

    entries: tuple[Entry, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    towers: Towers | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every HF tensor that the entries use, in export order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            for span in entry.spans:
                rows = span.source_row + span.rows
                if span.source in shapes:
                    rows = max(rows, shapes[span.source][0])
                shapes[span.source] = (rows, *entry.shape[1:])
        return shapes

    def parts(self) -> dict[str, list[tuple[Entry, Span]]]:
        """Return for every HF tensor its pieces in the native parameters, sorted by source row."""
        parts: dict[str, list[tuple[Entry, Span]]] = {}
        for entry in self.entries:
            for span in entry.spans:
                parts.setdefault(span.source, []).append((entry, span))
        for pieces in parts.values():
            pieces.sort(key=lambda piece: piece[1].source_row)
        return parts


def packed(name: str, width: tuple[int, ...], *pieces: tuple[str, int]) -> Entry:
    """Return the entry that stacks the HF tensors `pieces`, (name, rows) each, in this order.

    Args: width is the shape of one row.
    """
    spans, row = [], 0
    for source, rows in pieces:
        spans.append(Span(source, 0, row, rows))
        row += rows
    return Entry(name, (row, *width), tuple(spans))


def linear(
    name: str, width: int, *pieces: tuple[str, int], bias: bool = False
) -> tuple[Entry, ...]:
    """Return the entries of a linear with `width` inputs: its weight, and its bias if it has one.

    Args: pieces are the HF linears, (name, outputs) each. They are stacked in this order.
    """
    weight = packed(f"{name}.weight", (width,), *((f"{hf}.weight", rows) for hf, rows in pieces))
    if not bias:
        return (weight,)
    return weight, packed(f"{name}.bias", (), *((f"{hf}.bias", rows) for hf, rows in pieces))


def norm(name: str, source: str, size: int) -> Entry:
    """Return the entry of the weight of a norm over `size` features; `source` is its HF name."""
    return packed(f"{name}.weight", (), (f"{source}.weight", size))


class Family(Protocol):
    """The interface that the converters need of a family, which is a model class."""

    @property
    def config_class(self) -> type[HFConfig]: ...

    def weight_map(self, config: Any) -> WeightMap: ...
