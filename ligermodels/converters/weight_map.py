"""The span table: where the rows of each native parameter stand in an HF checkpoint.

A native parameter is a list of row spans of HF tensors. Loading, reading the rows of one rank and
exporting all walk the same spans. A family has a function from its config to a `WeightMap`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ligermodels.converters.hf_config import HFConfig


@dataclass(frozen=True)
class Span:
    """`rows` rows of the HF tensor `source` from `source_row` on are the native rows from `row`."""

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
    """How a checkpoint of several towers spells the text model's names, and what else it holds.

    Attributes:
        spellings: beginnings of names, and what stands in their place in the text model alone.
        left_out: beginnings of the names of the other towers.
    """

    spellings: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]

    def text_name(self, name: str) -> str:
        """The tensor's name in a checkpoint of the text model alone."""
        for theirs, alone in self.spellings:
            if name.startswith(theirs):
                return alone + name.removeprefix(theirs)
        return name


@dataclass(frozen=True)
class WeightMap:
    """Every parameter of a model, at the sizes of one config, and the HF tensors that fill it.

    Attributes:
        entries: every native parameter, in the order in which an export writes them.
        aliases: HF names that may be stored a second time, and the name they must equal.
        ignored: endings of the names of HF tensors that the model does not need.
        towers: what else a checkpoint of the family may hold; None for nothing.
    """

    entries: tuple[Entry, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    towers: Towers | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every HF tensor that the entries are made of, in export order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            for span in entry.spans:
                rows = span.source_row + span.rows
                if span.source in shapes:
                    rows = max(rows, shapes[span.source][0])
                shapes[span.source] = (rows, *entry.shape[1:])
        return shapes

    def parts(self) -> dict[str, list[tuple[Entry, Span]]]:
        """The way back: every HF tensor's pieces in the native parameters, by source row."""
        parts: dict[str, list[tuple[Entry, Span]]] = {}
        for entry in self.entries:
            for span in entry.spans:
                parts.setdefault(span.source, []).append((entry, span))
        for pieces in parts.values():
            pieces.sort(key=lambda piece: piece[1].source_row)
        return parts


def packed(name: str, width: tuple[int, ...], *pieces: tuple[str, int]) -> Entry:
    """The HF tensors `pieces`, (name, rows) each, stacked in this order; rows are `width` wide."""
    spans, row = [], 0
    for source, rows in pieces:
        spans.append(Span(source, 0, row, rows))
        row += rows
    return Entry(name, (row, *width), tuple(spans))


def linear(
    name: str, width: int, *pieces: tuple[str, int], bias: bool = False
) -> tuple[Entry, ...]:
    """The weight of a linear with `width` inputs, and its bias if it has one.

    Args: pieces are the HF linears, (name, outputs) each, that are stacked in this order.
    """
    weight = packed(f"{name}.weight", (width,), *((f"{hf}.weight", rows) for hf, rows in pieces))
    if not bias:
        return (weight,)
    return weight, packed(f"{name}.bias", (), *((f"{hf}.bias", rows) for hf, rows in pieces))


def norm(name: str, source: str, size: int) -> Entry:
    """The weight of a norm over `size` features; `source` is the norm's name in HF."""
    return packed(f"{name}.weight", (), (f"{source}.weight", size))


class Family(Protocol):
    """What the converters ask of a family, which is a model class."""

    @property
    def config_class(self) -> type[HFConfig]: ...

    def weight_map(self, config: Any) -> WeightMap: ...
