"""The weight map: which rows of an HF checkpoint fill which rows of each native parameter.

A native parameter is a list of row spans of HF tensors. Loading, reading the rows of one rank and
exporting all use these spans. Each family has a function from its config to a `WeightMap`.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from ligermodels.converters.hf_config import HFConfig
from ligermodels.errors import ConfigError, listing


@dataclass(frozen=True)
class Span:
    """Rows of an HF tensor that one native parameter takes.

    The native rows `row` to `row + rows` are the rows `source_row`, `source_row + step`, ... of the
    HF tensor `source`, which may hold the parameters of several experts.

    Attributes:
        expert: the index of the source's first dimension, or None for a source without experts.
        step: distance of the rows in the source, such as 2 where gate and up alternate.
        transposed: whether the rows are columns of the source.
    """

    source: str
    source_row: int
    row: int
    rows: int
    expert: int | None = None
    step: int = 1
    transposed: bool = False

    @property
    def end(self) -> int:
        """The row of the source after the last one."""
        return self.source_row + self.step * (self.rows - 1) + 1

    def of(self, source: Tensor) -> Tensor:
        """Return the view of the rows in the HF tensor."""
        matrix = source if self.expert is None else source[self.expert]
        return (matrix.T if self.transposed else matrix)[self.source_row : self.end : self.step]


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
        kept: the name prefixes of those whose tensors are not loaded either, but which a save
            writes again, byte for byte. Then it also writes the text model's tensors under the
            names that they had.
    """

    spellings: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

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
        ignored: name endings of HF tensors that the model does not need. A load keeps them, and a
            save writes them back as they were.
        constants: HF name of a tensor that the model does not need -> its value, for the export of
            a model that was made anew. A checkpoint with other values is not loaded, and a loaded
            model writes back what it was loaded with.
        towers: the other towers that a checkpoint of the family may hold. None if it has none.
        layouts: name of another layout that a checkpoint of the family may have -> the entries of
            it that replace those of the same names. A load takes the layout whose tensors are
            there, and a save writes the one that was loaded. A source whose name ends in
            MXFP4_BLOCKS has values of four bits, which a load decodes.
    """

    entries: tuple[Entry, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    constants: dict[str, Tensor] = field(default_factory=dict)
    towers: Towers | None = None
    layouts: dict[str, tuple[Entry, ...]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @property
    def is_mxfp4(self) -> bool:
        """Whether some of the tensors are in MXFP4."""
        return any(name.endswith(MXFP4_BLOCKS) for name in self.parts())

    def in_layout(self, name: str | None) -> "WeightMap":
        """Return the map of a layout; None means this map."""
        if name is None:
            return self
        others = {entry.name: entry for entry in self.layouts[name]}
        return replace(self, entries=tuple(others.get(e.name, e) for e in self.entries), layouts={})

    def written_as(self, layout: str | None) -> "WeightMap":
        """Return the map for an export of a model that was loaded in this layout."""
        loaded = self.in_layout(layout)
        return self if loaded.is_mxfp4 else loaded

    def spelled(self, names: Mapping[str, str]) -> "WeightMap":
        """Return the map with other names of HF tensors: those in `names`, by the names here.

        A tensor that is not in `names`, as of another layout, gets a prefix that these have.
        """
        if not names:
            return self
        pairs = self.towers.spellings if self.towers else ()
        used = [pair for pair in pairs if any(x.startswith(pair[0]) for x in names.values())]

        def span(of: Span) -> Span:
            name = next((b + of.source[len(a) :] for b, a in used if of.source.startswith(a)), None)
            return replace(of, source=names.get(of.source, name or of.source))

        def renamed(entries: Iterable[Entry]) -> tuple[Entry, ...]:
            return tuple(replace(each, spans=tuple(map(span, each.spans))) for each in entries)

        layouts = {name: renamed(entries) for name, entries in self.layouts.items()}
        return replace(self, entries=renamed(self.entries), layouts=layouts)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every HF tensor that the entries use, in export order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for source, parts in self.parts().items():
            entry, last = parts[-1]
            rows = max(span.end for _, span in parts)
            shape = (*entry.shape[1:], rows) if last.transposed else (rows, *entry.shape[1:])
            shapes[source] = shape if last.expert is None else (last.expert + 1, *shape)
        return shapes

    def parts(self) -> dict[str, list[tuple[Entry, Span]]]:
        """Return for every HF tensor its pieces in the native parameters, in the source's order."""
        parts: dict[str, list[tuple[Entry, Span]]] = {}
        for entry in self.entries:
            for span in entry.spans:
                parts.setdefault(span.source, []).append((entry, span))
        for pieces in parts.values():
            pieces.sort(key=lambda piece: (piece[1].expert or 0, piece[1].source_row))
        return parts

    def check(self, family: str, parameters: Mapping[str, tuple[int, ...]]) -> None:
        """Raise unless every row of every parameter and tensor is used exactly once.

        Args: family: the name for messages; parameters: the shape of each parameter of the model.
        Raises:
            ConfigError: an entry occurs twice, is not a parameter, has another shape, or a row of a
                parameter or tensor is missing or used twice. The message names family and entry.
        """
        fault = next(self._faults(parameters), None)
        if fault is not None:
            raise ConfigError(f"{family}: weight map: {fault}")
        for name in self.layouts:
            self.in_layout(name).check(f"{family}, layout {name!r}", parameters)

    def _faults(self, parameters: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        names: set[str] = set()
        for entry in self.entries:
            if entry.name in names:
                yield f"entry {entry.name!r} occurs twice; remove one of them"
            names.add(entry.name)
            if entry.name not in parameters:
                near = difflib.get_close_matches(entry.name, parameters, 1)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                yield f"entry {entry.name!r}: the model has no parameter of this name{hint}"
                continue
            shape = tuple(parameters[entry.name])
            if entry.shape != shape:
                yield f"entry {entry.name!r} has shape {entry.shape}, but the parameter has {shape}"
            if not shape:
                yield f"entry {entry.name!r}: its parameter has no dimension; give it shape (1,)"
            rows = [(span.row, span.rows, f"span of {span.source!r}") for span in entry.spans]
            if fault := _gap(rows, entry.shape[0]):
                yield f"entry {entry.name!r}: its spans must fill each row once, but {fault}"
        if missing := [name for name in parameters if name not in names]:
            yield (
                f"entry {missing[0]!r} is missing (this is so for {len(missing)} of the model's "
                f"parameters)\n{listing(missing)}"
            )
        for source, parts in self.parts().items():
            first = parts[0][0]
            if fault := _source_fault(parts):
                yield (
                    f"entry {first.name!r}: each row of the tensor {source!r} must be used once, "
                    f"but {fault}"
                )
            for entry, _ in parts:
                if entry.shape[1:] != first.shape[1:]:
                    yield (
                        f"entry {entry.name!r} takes rows of shape {entry.shape[1:]} from "
                        f"{source!r}, but entry {first.name!r} takes rows of {first.shape[1:]}"
                    )
        if isinstance(self.ignored, str):
            yield f"ignored is {self.ignored!r}; give a tuple of name endings"
        sources = self.source_shapes()
        for copy, original in self.aliases.items():
            if copy in sources or original not in sources:
                yield (
                    f"alias {copy!r} of {original!r}: the first must not be a source of an entry, "
                    "and the second must be one"
                )
        for constant in self.constants:
            if constant in sources or constant in self.aliases:
                yield f"constant {constant!r} is also a source of an entry or an alias; remove one"


def _source_fault(parts: list[tuple[Entry, Span]]) -> str | None:
    """Return where the pieces of an HF tensor leave a gap or overlap, or None if they tile it."""
    experts = list(dict.fromkeys(span.expert for _, span in parts))
    if experts not in ([None], list(range(len(experts)))):
        return f"its experts are {experts}, expected 0, 1, ... or None"
    if len({span.transposed for _, span in parts}) > 1:
        return "only a part of it is transposed"
    rows = max(span.end for _, span in parts)
    step = parts[0][1].step
    if any(span.step != step for _, span in parts):
        return "its pieces have several steps"
    groups = [parts] if experts == [None] else blocks_of(parts)
    for expert, group in zip(experts, groups, strict=True):
        for first in range(step):  # the rows first, first + step, ...
            used = [
                (span.source_row // step, span.rows, f"entry {entry.name!r}")
                for entry, span in group
                if span.source_row % step == first
            ]
            if fault := _gap(used, len(range(first, rows, step))):
                of_step = "" if step == 1 else f", counted from row {first} in steps of {step}"
                return ("" if expert is None else f"of expert {expert} ") + fault + of_step
    return None


def _gap(pieces: Iterable[tuple[int, int, str]], rows: int | None) -> str | None:
    """Return where (start, rows, name) pieces leave a gap or overlap, or None if they tile.

    Args: rows: the number of rows to tile; None means as many as the pieces reach.
    """
    end, before = 0, "the start"
    for start, count, name in sorted(pieces):
        if count < 1:
            return f"{name} has {count} rows"
        if start != end:
            what = "are missing" if start > end else "are used twice"
            low, high = min(start, end), max(start, end)
            return f"rows {low} to {high} {what}, between {before} and {name}"
        end, before = start + count, name
    if rows is not None and end != rows:
        return f"they fill {end} of {rows} rows"
    return None


MXFP4_BLOCKS = "_blocks"
"""The ending of the name of a source that a checkpoint holds in MXFP4: see `converters.mxfp4`."""


def scales_of(name: str) -> str:
    """Return the name of the scales that belong to blocks of MXFP4, or to a weight in float8."""
    if name.endswith(MXFP4_BLOCKS):
        return name.removesuffix(MXFP4_BLOCKS) + "_scales"
    return f"{name}_scale"


def packed_entry(name: str, width: tuple[int, ...], *pieces: tuple[str, int]) -> Entry:
    """Return the entry that stacks the HF tensors `pieces`, (name, rows) each, in this order.

    Args: width is the shape of one row.
    """
    spans, row = [], 0
    for source, rows in pieces:
        spans.append(Span(source, 0, row, rows))
        row += rows
    return Entry(name, (row, *width), tuple(spans))


def expert_entry(
    name: str,
    width: tuple[int, ...],
    source: str,
    experts: int,
    rows: int,
    *,
    parts: int = 1,
    transposed: bool = False,
) -> Entry:
    """Return the entry that stacks the experts of one HF tensor, (experts, rows, *width).

    Args:
        width: the shape of one row.
        rows: the rows of an expert.
        parts: how many parts of a native expert have alternating rows in the source: 2 if rows 0,
            2, ... are the gate's, and rows 1, 3, ... up's.
        transposed: whether the source is (experts, width, rows).
    """
    each = rows // parts
    spans = (
        Span(source, part, expert * rows + part * each, each, expert, parts, transposed)
        for expert in range(experts)
        for part in range(parts)
    )
    return Entry(name, (experts * rows, *width), tuple(spans))


class Family(Protocol):
    """The interface that the converters need of a family, which is a model class."""

    @property
    def config_class(self) -> type[HFConfig]: ...

    def weight_map(self, config: Any) -> WeightMap: ...


def hf_tensors(
    weight_map: WeightMap, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each HF name and tensor of a model, in export order.

    A tensor whose rows lie together in one native parameter is a view of it.

    Args: weights: the native parameters by name.
    """
    for name, parts in weight_map.parts().items():
        yield name, joined_rows(parts, weights)


def joined_rows(parts: list[tuple[Entry, Span]], weights: Mapping[str, Tensor]) -> Tensor:
    """Return one HF tensor.

    Args: parts: its pieces as in `WeightMap.parts`; weights: the native parameters by name.
    """
    entry = parts[0][0]
    if len(parts) == len(entry.spans) == 1:  # all rows, also those that a resize has added
        return weights[entry.name]
    blocks = [
        joined_block(
            [span for _, span in block], [weights[e.name][s.row : s.row + s.rows] for e, s in block]
        )
        for block in blocks_of(parts)
    ]
    return _joined(blocks) if parts[0][1].expert is None else torch.stack(blocks)


def blocks_of(parts: list[tuple[Entry, Span]]) -> list[list[tuple[Entry, Span]]]:
    """Divide the pieces of an HF tensor into those of each expert, or into single ones."""
    if parts and parts[0][1].expert is None:
        return [[part] for part in parts]
    return [list(block) for _, block in groupby(parts, lambda part: part[1].expert)]


def joined_block(spans: list[Span], rows: list[Tensor]) -> Tensor:
    """Return what the native rows of spans make up in the file: all of an expert, or one span."""
    if len(spans) == 1 and not spans[0].transposed:
        return rows[0]
    block = rows[0].new_empty(max(span.end for span in spans), *rows[0].shape[1:])
    for span, values in zip(spans, rows, strict=True):
        block[span.source_row : span.end : span.step].copy_(values.detach())
    return block.T.contiguous() if spans[0].transposed else block


def native_tensor(entry: Entry, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a native parameter's value, joined from HF tensors.

    Args: entry: the parameter; tensors: at least the HF tensors of its spans, by name.
    """
    return _joined([span.of(tensors[span.source]) for span in entry.spans])


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
