"""Reading a checkpoint: headers first, one comparison with the table, then tensor by tensor."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ligermodels.converters.files import (
    DTYPES,
    INDEX,
    TensorInfo,
    read_header,
    read_json,
    weight_files,
)
from ligermodels.converters.table import Entry, Span, Table
from ligermodels.errors import CheckpointError, listing


class Checkpoint:
    """The weights of a local HF folder; constructing it reads headers and nothing else.

    Args: allow_nonfinite lets NaN and infinite weights through `read`.
    Attributes:
        folder: where it is.
        tensors: what the headers say, by HF name.
    Raises:
        CheckpointError: no readable weights, a shard missing, truncated or damaged, or an index
            that does not match its shards; names the file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> None:
        self.folder = Path(folder)
        self.allow_nonfinite = allow_nonfinite
        self._open: dict[Path, Any] = {}
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: there is no such folder")
        # Symlinks count by what they point to: the hub cache is made of them.
        names = {path.name for path in self.folder.iterdir() if path.is_file()}
        files, weight_map = weight_files(
            str(self.folder), names, lambda: read_json(self.folder / INDEX, CheckpointError)
        )
        # What a message about the checkpoint as a whole names.
        self.listing_file = self.folder / (files[0] if weight_map is None else INDEX)
        self.files = [self.folder / name for name in files]
        self.tensors: dict[str, TensorInfo] = {}
        for path in self.files:
            header = read_header(path)
            if weight_map is not None:
                _match_index(self.folder / INDEX, weight_map, path, header.keys())
            self.tensors.update(header)

    def plan(self, table: Table) -> dict[str, torch.dtype]:
        """Check that the checkpoint holds exactly what the table asks for.

        Returns: for each native name, the dtype it is stored in; where its HF tensors differ,
            the one that holds them all.
        Raises:
            CheckpointError: one for everything that is quantised, mis-shaped, missing or
                unexpected.
        """
        expected = table.source_shapes()
        optional = {
            name: expected[original]
            for name, original in table.aliases.items()
            if name in self.tensors
        }
        faults: list[tuple[Path, str, str]] = []
        absent = []
        for name, shape in {**expected, **optional}.items():
            info = self.tensors.get(name)
            if info is None:
                absent.append((self.listing_file, name, "is missing"))
            elif info.dtype not in DTYPES:
                what = f"is stored as {info.dtype}: quantised checkpoints are not supported"
                faults.append((info.path, name, what))
            elif info.shape != shape:
                what = f"has shape {list(info.shape)}, expected {list(shape)}"
                faults.append((info.path, name, what))
        unexpected = [
            (info.path, name, "is unexpected")
            for name, info in self.tensors.items()
            if name not in expected and name not in optional and not name.endswith(table.ignored)
        ]
        if faults := [*faults, *absent, *unexpected]:
            raise CheckpointError(_describe(faults))
        return {entry.name: self._stored_dtype(entry) for entry in table}

    def read(self, entry: Entry, out: Tensor, start: int = 0) -> None:
        """Copy native rows `start` to `start + len(out)` of a parameter into `out`.

        Touches only those rows of the files, one HF tensor at a time, and casts on copy.

        Args: out (rows, *entry.shape[1:]), any float dtype, any device.
        Raises:
            CheckpointError: a value is NaN or infinite, as stored or as cast.
        """
        rows = out.shape[0]
        assert out.shape[1:] == entry.shape[1:] and 0 <= start <= start + rows <= entry.shape[0]
        with torch.no_grad():
            for span in entry.spans:
                first, last = max(start, span.row), min(start + rows, span.row + span.rows)
                if first < last:
                    offset = span.source_row - span.row
                    stored = self._rows(span.source, first + offset, last + offset)
                    if not self.allow_nonfinite:
                        self._check_finite(span, stored, out.dtype)
                    out[first - start : last - start].copy_(stored)

    def check_aliases(self, table: Table) -> None:
        """Compare what is stored a second time, such as a tied head, with its original.

        Raises:
            CheckpointError: they differ.
        """
        for alias, original in table.aliases.items():
            if alias in self.tensors and not same_bits(self.tensor(alias), self.tensor(original)):
                raise CheckpointError(
                    f"{self.tensors[alias].path}: {alias!r} differs from {original!r}, but "
                    "config.json ties them; if it is a head of its own, set tie_word_embeddings "
                    "to false there"
                )

    def tensor(self, name: str) -> Tensor:
        """An HF tensor as stored, a view of the mapped file: not to be written to."""
        return self._rows(name, None, None)

    def _rows(self, name: str, first: int | None, last: int | None) -> Tensor:
        path = self.tensors[name].path
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            file = self._open[path]
            return file.get_tensor(name) if first is None else file.get_slice(name)[first:last]
        except Exception as fault:  # safetensors' own errors, which do not say where
            raise CheckpointError(f"{path}: {name!r} cannot be read: {fault}") from fault

    def _check_finite(self, span: Span, stored: Tensor, dtype: torch.dtype) -> None:
        if stored.numel() == 0:
            return
        # Both ends are NaN if any value is; unlike isfinite().all(), this needs no memory.
        ends = torch.stack(stored.aminmax())
        if not ends.isfinite().all():
            what = "holds NaN or infinite values; allow_nonfinite=True lets them in"
        elif not ends.to(dtype).isfinite().all():
            what = f"holds values too large for {dtype}"
        else:
            return
        raise CheckpointError(f"{self.tensors[span.source].path}: {span.source!r} {what}")

    def _stored_dtype(self, entry: Entry) -> torch.dtype:
        dtype = DTYPES[self.tensors[entry.spans[0].source].dtype]
        for span in entry.spans[1:]:
            dtype = torch.promote_types(dtype, DTYPES[self.tensors[span.source].dtype])
        return dtype


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit, NaN and the sign of 0 included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _match_index(index: Path, weight_map: Mapping[str, str], shard: Path, held: Any) -> None:
    promised = {name for name, file in weight_map.items() if file == shard.name}
    if lacking := sorted(promised - held):
        raise CheckpointError(
            f"{shard}: {lacking[0]!r} is missing, but {index.name} puts it there "
            f"({len(lacking)} such)\n{listing(lacking)}"
        )
    if surplus := sorted(held - promised):
        raise CheckpointError(
            f"{index}: {surplus[0]!r} is not mapped to {shard.name}, which holds it "
            f"({len(surplus)} such)\n{listing(surplus)}"
        )


def _describe(faults: list[tuple[Path, str, str]]) -> str:
    path, name, what = faults[0]
    first = f"{path}: {name!r} {what}"
    if len(faults) == 1:
        return first
    lines = listing(f"{name} {what}" for _, name, what in faults)
    return f"{first} (the first of {len(faults)} faults)\n{lines}"
