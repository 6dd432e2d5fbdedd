"""Read a checkpoint: first all headers, then compare names and shapes, then read the tensors."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ligermodels.converters import mxfp4
from ligermodels.converters.files import SAFE_WEIGHTS_INDEX_NAME, local_weight_files
from ligermodels.converters.safetensors_file import (
    DTYPES,
    FileTensor,
    SafetensorsFile,
    StoredTensor,
    TensorInfo,
    byte_view,
)
from ligermodels.converters.weight_map import (
    MXFP4_BLOCKS,
    Entry,
    Span,
    Towers,
    WeightMap,
    scales_of,
)
from ligermodels.errors import CheckpointError, listing, short_repr

# The tensors of a quantised weight have names with these endings. The first line is of GPTQ and
# AWQ, the second of bitsandbytes, the third of compressed-tensors and float8 checkpoints.
_QUANTISED = (
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
    *(".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map", ".SCB"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"),
)
# The dtypes in `Checkpoint.tensors` of weights that two tensors hold: MXFP4, and e4m3 with a scale
# for each row, as compressed-tensors and `save_hf(float8=True)` write it.
MXFP4, FLOAT8 = "MXFP4", "FLOAT8"
# The name that transformers gives the head of all its ...ForSequenceClassification models.
_CLASSIFIER_HEAD = "score.weight"


class _Take(NamedTuple):
    """The rows of a slice that go to `out`: the row `first` of it, `first + step`, ..."""

    first: int
    step: int
    out: Tensor


class _Slice(NamedTuple):
    """Rows of an HF tensor, and where they go.

    Attributes:
        first, last: the rows in the file; those of all experts count, one after the other.
        leading: how many dimensions of the tensor these numbers count.
        columns: the columns in the file, or None for all.
        transposed: whether the rows that `takes` counts are the columns in the file.
        memory: the bytes of the only target, if they are those of the file.
    """

    source: str
    first: int
    last: int
    leading: int
    columns: tuple[int, int] | None
    takes: list[_Take]
    transposed: bool = False
    memory: np.ndarray | None = None


class Checkpoint:
    """The weights of a local HF folder. The constructor reads the headers and nothing else.

    Args:
        folder: the local folder.
        allow_nonfinite: whether `read` accepts NaN and infinite weights.
    Attributes:
        files: the weight files.
        tensors: HF name -> header entry. After `plan`, only the text model's tensors are in it.
        left_out: name prefix of another tower -> how many tensors that tower has.
        kept: after `plan`, the tensors of other towers that a save writes again.
        spelling: after `plan`, if it may have such towers: the name of a tensor in the weight map
            -> its name in the file, for names that differ.
        ignored: after `plan`, the tensors that the weight map ignores, or names as constants.
        layout: after `plan`, the name in `WeightMap.layouts` of the layout that the checkpoint has,
            or None for that of the map itself.
        weight_map: after `plan`, the map of this layout.
    Raises:
        CheckpointError: the folder has no weights that can be read, a shard is missing or damaged,
            or the index does not match its shards. The message names the file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> None:
        self.folder = Path(folder)
        self.allow_nonfinite = allow_nonfinite
        if not os.path.isdir(self.folder):
            raise CheckpointError(f"{self.folder}: there is no such folder; check the path")
        files, shard_of = local_weight_files(self.folder)
        index = self.folder / SAFE_WEIGHTS_INDEX_NAME
        # Messages about the whole checkpoint name this file.
        self.listing_file = self.folder / files[0] if shard_of is None else index
        self.files = [self.folder / name for name in files]
        self.tensors: dict[str, TensorInfo] = {}
        self.left_out: dict[str, int] = {}
        self.kept: dict[str, FileTensor] = {}
        self.spelling: dict[str, str] = {}
        self.ignored: list[str] = []
        self.layout: str | None = None
        self.weight_map = WeightMap(())
        self._entries: dict[str, Entry] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        # The text model's name of a tensor -> its name in the file, for names that differ.
        self._stored_as: dict[str, str] = {}
        promised: dict[str, set[str]] = {}
        for name, shard in (shard_of or {}).items():
            promised.setdefault(shard, set()).add(name)
        for path in self.files:
            file = SafetensorsFile(path)
            if shard_of is not None:
                _match_index(index, promised[path.name], path, file.tensors)
            self.tensors.update(file.tensors)
            self._file_of.update(dict.fromkeys(file.tensors, file))

    def plan(self, weight_map: WeightMap) -> dict[str, torch.dtype]:
        """Check that the checkpoint holds exactly the tensors of one layout of a weight map.

        Returns: native name -> stored dtype. If its HF tensors have different dtypes, this is the
            dtype that can hold the values of all of them.
        Raises:
            CheckpointError: tensors are quantised, missing or unexpected, or have a wrong shape.
                One message lists the faults.
        """
        if weight_map.towers is not None:
            self._leave_out(weight_map.towers)
        self._choose_layout(weight_map)
        weight_map = self.weight_map
        expected = weight_map.source_shapes()
        for name, shape in expected.items():
            self._join(name, shape)
        optional = {
            name: expected[original]
            for name, original in weight_map.aliases.items()
            if name in self.tensors
        }
        faults: list[tuple[Path, str, str]] = []
        absent = []
        for name, shape in {**expected, **optional}.items():
            found = self.tensors.get(name)
            if found is None and name == _CLASSIFIER_HEAD:
                what = (
                    "is missing: the folder holds a model without the head of a classifier; load a "
                    "language model with AutoLiger.from_hf, and give it a head with "
                    "classifier_class(type(model)).from_model(model, num_labels)"
                )
                faults.append((self.listing_file, name, what))
            elif found is None:
                absent.append((self.listing_file, name, "is missing"))
            elif found.dtype == "U8" and name.endswith(MXFP4_BLOCKS):
                what = f"and {scales_of(name)!r} do not hold {list(shape)} values in MXFP4"
                faults.append((found.path, self._name_in_file(name), what))
            elif found.dtype == "F8_E4M3":
                name = self._name_in_file(name)
                what = f"is in float8, but {scales_of(name)!r} has no scale for each of its rows"
                faults.append((found.path, name, what))
            elif found.dtype not in (*DTYPES, MXFP4, FLOAT8):
                what = f"is stored as {found.dtype}: quantised checkpoints are not supported"
                faults.append((found.path, self._name_in_file(name), what))
            elif found.shape != shape:
                what = f"has shape {list(found.shape)}, expected {list(shape)}"
                faults.append((found.path, self._name_in_file(name), what))
        unexpected = []
        self.ignored = []
        for name, info in self.tensors.items():
            if name in expected or name in optional:
                continue
            if name in weight_map.constants or name.endswith(weight_map.ignored):
                self.ignored.append(name)
            elif name.endswith(_QUANTISED):
                what = "is part of a quantised weight: quantised checkpoints are not supported"
                faults.append((info.path, name, what))
            elif name == _CLASSIFIER_HEAD:
                what = (
                    "is the head of a classifier: the folder holds a ...ForSequenceClassification "
                    "model and no language model; load it with LigerClassifier.from_hf"
                )
                faults.append((info.path, name, what))
            else:
                unexpected.append((info.path, name, "is unexpected"))
        if faults := [*faults, *absent, *unexpected]:
            raise CheckpointError(_describe(faults))
        return {entry.name: self.dtype_of(entry) for entry in weight_map}

    def _choose_layout(self, weight_map: WeightMap) -> None:
        """Take the layout of which the checkpoint has most tensors; the first of equals."""
        layouts = {name: weight_map.in_layout(name) for name in (None, *weight_map.layouts)}

        def found(layout: str | None) -> int:
            entries = layouts[layout].entries
            return len({s.source for e in entries for s in e.spans} & self.tensors.keys())

        self.layout = max(layouts, key=found)
        self.weight_map = layouts[self.layout]
        self._entries = {entry.name: entry for entry in self.weight_map}

    def _join(self, name: str, shape: tuple[int, ...]) -> None:
        """Let the two tensors of a weight in MXFP4, of this shape, or in float8 count as one."""
        one, scale = self.tensors.get(name), self.tensors.get(scales_of(name))
        if one is None or scale is None:
            return
        if name.endswith(MXFP4_BLOCKS):
            groups = (*shape[:-1], shape[-1] // 32)
            kind, wide, long = MXFP4, (*groups, 16), groups
            fits = one.dtype == scale.dtype == "U8"
        else:
            shape = one.shape  # another one is a fault of its own
            kind, wide, long = FLOAT8, shape, (*shape[:1], 1)
            fits = len(shape) == 2 and one.dtype == "F8_E4M3" and scale.dtype in DTYPES
        if fits and (one.shape, scale.shape) == (wide, long):
            nbytes = one.nbytes + scale.nbytes
            self.tensors[name] = replace(one, dtype=kind, shape=shape, nbytes=nbytes)
            del self.tensors[scales_of(name)]

    def _leave_out(self, towers: Towers) -> None:
        """Drop the tensors of other towers, and give the others the text model's names."""
        text: dict[str, TensorInfo] = {}
        for name, info in self.tensors.items():
            if tower := next((start for start in towers.left_out if name.startswith(start)), None):
                self.left_out[tower] = self.left_out.get(tower, 0) + 1
                continue
            if name.startswith(towers.kept):
                self.kept[name] = FileTensor(self._file_of[name], name)
                continue
            alone = towers.text_name(name)
            if alone in text:
                raise CheckpointError(
                    f"{info.path}: {short_repr(name)} and {short_repr(self._name_in_file(alone))} "
                    "are two spellings of one tensor; a checkpoint may hold only one of them"
                )
            if alone != name:
                self._stored_as[alone] = name
            text[alone] = info
        self.tensors = text
        self.spelling = dict(self._stored_as) if towers.kept else {}

    def _name_in_file(self, name: str) -> str:
        """Return the name in the file of a tensor with this name in the text model."""
        return self._stored_as.get(name, name)

    def read(self, entry: Entry, out: Tensor, start: int = 0, column: int = 0) -> None:
        """Copy native rows `start` to `start + len(out)` of a parameter into `out`.

        This reads only these rows from the files, one HF tensor at a time, and casts them on copy.

        Args:
            out: (rows, *entry.shape[1:]), of any float dtype and on any device. Of a matrix it may
                have fewer columns.
            column: the first of its columns.
        Raises:
            CheckpointError: a value is NaN or infinite, or overflows in the dtype of `out`; or the
                file was changed after its header was read.
        """
        for piece in self._slices(entry, out, start, column):
            self._read_slice(piece)

    def _slices(self, entry: Entry, out: Tensor, start: int = 0, column: int = 0) -> list[_Slice]:
        """Divide what `read` reads by HF tensors."""
        rows, out = out.shape[0], out.detach()
        assert out.dim() == len(entry.shape) and 0 <= start <= start + rows <= entry.shape[0]
        columns = None
        if out.shape[1:] != entry.shape[1:]:
            assert out.dim() == 2 and 0 <= column <= column + out.shape[1] <= entry.shape[1]
            columns = column, column + out.shape[1]
        whole_rows = out.device.type == "cpu" and out.is_contiguous() and not columns
        slices = []
        # Rows that alternate in the file, such as those of gate and up, are read once for both.
        together: dict[tuple[str, int | None], list[tuple[Span, Tensor]]] = {}
        for span in self._entries.get(entry.name, entry).spans:
            first, last = max(start, span.row), min(start + rows, span.row + span.rows)
            if first >= last:
                continue
            target = out[first - start : last - start]
            here = span.source_row + (first - span.row) * span.step
            part = replace(span, source_row=here, rows=last - first)
            if span.step > 1 or span.transposed:
                together.setdefault((span.source, span.expert), []).append((part, target))
                continue
            memory = None
            if whole_rows and DTYPES.get(self.tensors[span.source].dtype) == out.dtype:
                memory = byte_view(target)
            slices.append(self._slice([(part, target)], columns)._replace(memory=memory))
        return slices + [self._slice(parts, columns) for parts in together.values()]

    def _slice(self, parts: list[tuple[Span, Tensor]], columns: tuple[int, int] | None) -> _Slice:
        """Return the slice that holds all rows of some spans of one source and expert."""
        span, _ = parts[0]
        low, high = min(part.source_row for part, _ in parts), max(part.end for part, _ in parts)
        takes = [_Take(part.source_row - low, part.step, target) for part, target in parts]
        shape, leading = self.tensors[span.source].shape, 1 if span.expert is None else 2
        above = (span.expert or 0) * shape[leading - 1]  # the rows of the experts before
        if span.transposed:
            first, last = columns or (0, shape[-2])
            columns = None if (low, high) == (0, shape[-1]) else (low, high)
        else:
            first, last = low, high
        return _Slice(
            span.source, above + first, above + last, leading, columns, takes, span.transposed
        )

    def read_all(self, targets: Sequence[tuple[Entry, Tensor]]) -> Iterator[None]:
        """Read whole parameters, each into a new tensor; yield once for each parameter.

        Values that need no cast are read by two threads, if torch may use two. torch itself uses
        its threads for the casts. More threads do not help: on a machine with 16 cores, 16 were
        slower than one.

        Raises: what `read` raises, for the first target that fails.
        """
        # All at once: after each read, neither torch's code nor its data is left in the cache.
        slices = [self._slices(entry, out) for entry, out in targets]
        casts = any(piece.memory is None for each in slices for piece in each)

        def read(pieces: list[_Slice]) -> None:
            for piece in pieces:
                self._read_slice(piece)

        if casts or torch.get_num_threads() == 1:
            for each in slices:
                read(each)
                yield
            return
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(read, each) for each in slices]
            try:
                for done in reads:
                    done.result()
                    yield
            finally:
                pool.shutdown(cancel_futures=True)

    def _read_slice(self, piece: _Slice) -> None:
        """Copy rows of an HF tensor, and check the values while the cache holds them."""
        name, first, last, leading, columns, takes, transposed, memory = piece
        out = takes[0].out
        if memory is not None:
            data_of = self._opened(name).read_into
            for data in data_of(memory, self._name_in_file(name), first, leading):
                if not (self.allow_nonfinite or _are_finite(data, out.dtype)):
                    self._refuse_nonfinite(name, torch.from_numpy(data).view(out.dtype), out.dtype)
            return
        simple, at = takes[0].step == 1 and not transposed and out.device.type == "cpu", 0
        for stored in self._rows(name, first, last, columns, leading):
            end = at + len(stored)
            turned = stored.T.contiguous() if transposed else stored
            for start, step, target in takes:
                if transposed:
                    target[:, at:end].copy_(turned[start::step][: len(target)])
                else:
                    begin = max(0, -((start - at) // step))  # the first row that is here
                    found = stored[start + begin * step - at :: step][: len(target) - begin]
                    target[begin : begin + len(found)].copy_(found)
            # A check on another device would make the host wait for that device.
            if not (
                self.allow_nonfinite or is_finite(out[at:end] if simple else stored.to(out.dtype))
            ):
                self._refuse_nonfinite(name, stored, out.dtype)
            at = end

    def check_aliases(self, weight_map: WeightMap, share: tuple[int, int] = (0, 1)) -> None:
        """Compare each tensor that is stored twice, such as a tied head, with its original.

        Args: share (i, n): of n parts of about equal size, compare only rows of the part i.
        Raises:
            CheckpointError: the two tensors differ.
        """
        for alias, original in weight_map.aliases.items():
            if alias in self.tensors and not self.bitwise_equal(alias, self, original, share):
                raise CheckpointError(
                    f"{self.tensors[alias].path}: {alias!r} differs from {original!r}, but "
                    "config.json ties them; if the model has a separate head, set "
                    "tie_word_embeddings to false in config.json"
                )

    def bitwise_equal(
        self, name: str, other: "Checkpoint", other_name: str, share: tuple[int, int] = (0, 1)
    ) -> bool:
        """Return whether two stored HF tensors agree in dtype, shape and every bit.

        Args: share, as in `check_aliases`.
        """
        a, b = self.tensors[name], other.tensors[other_name]
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        rows, (part, parts) = (a.shape or (1,))[0], share
        here = rows * part // parts, rows * (part + 1) // parts
        pieces = zip(self._raw_rows(name, *here), other._raw_rows(other_name, *here), strict=True)
        return all(bitwise_equal(mine, theirs) for mine, theirs in pieces)

    def tensor(self, name: str) -> Tensor:
        """Return an HF tensor in its stored dtype, as a new tensor."""
        if self.tensors[name].dtype in (MXFP4, FLOAT8):
            return torch.cat([*self._rows(name, 0, self.tensors[name].shape[0])])
        return self._opened(name).tensor(self._name_in_file(name))

    def constants(self) -> dict[str, StoredTensor]:
        """Return the tensors in `ignored` and `kept` as they are in the files."""
        found = {self.spelling.get(name, name): self.stored(name) for name in self.ignored}
        return {**found, **self.kept}

    def _rows(
        self,
        name: str,
        first: int,
        last: int,
        columns: tuple[int, int] | None = None,
        leading: int = 1,
    ) -> Iterator[Tensor]:
        """Yield the values of rows in pieces; those of MXFP4 are in bfloat16."""
        file, stored = self._opened(name), self._name_in_file(name)
        dtype = self.tensors[name].dtype
        if dtype == MXFP4:
            return self._decoded(name, first, last, columns, leading)
        if columns is not None:
            rows = file.read_columns(stored, first, last, columns)
        else:
            rows = file.read(stored, first, last, leading)
        return self._scaled(name, rows, first) if dtype == FLOAT8 else rows

    def _scaled(self, name: str, rows: Iterator[Tensor], first: int) -> Iterator[Tensor]:
        """Yield rows in e4m3 times their scales, in the dtype of these, as compressed-tensors."""
        scales = scales_of(name)
        scale = self._opened(scales).tensor(self._name_in_file(scales))
        for piece in rows:
            yield piece.to(scale.dtype) * scale[first : first + len(piece)]
            first += len(piece)

    def _decoded(
        self, name: str, first: int, last: int, columns: tuple[int, int] | None, leading: int
    ) -> Iterator[Tensor]:
        blocks_of = self._opened(name).read(self._name_in_file(name), first, last, leading)
        scales = scales_of(name)
        scales_file, scales = self._opened(scales), self._name_in_file(scales)
        for blocks in blocks_of:
            end = first + len(blocks)
            values = mxfp4.decode(blocks, next(scales_file.read(scales, first, end, leading)))
            yield values if columns is None else values[..., slice(*columns)]
            first = end

    def _raw_rows(self, name: str, first: int, last: int) -> Iterator[Tensor]:
        """Yield what the file holds of rows: of a weight in two tensors also the scales."""
        has_scales = self.tensors[name].dtype in (MXFP4, FLOAT8)
        for each in (name, scales_of(name)) if has_scales else (name,):
            yield from self._opened(each).read(self._name_in_file(each), first, last)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor as it is in the file; of MXFP4, name one of the two."""
        return self._opened(name).stored(self._name_in_file(name))

    def _opened(self, name: str) -> SafetensorsFile:
        return self._file_of[self._name_in_file(name)]

    def _refuse_nonfinite(self, name: str, stored: Tensor, dtype: torch.dtype) -> NoReturn:
        if is_finite(stored):
            what = f"holds values too large for {dtype}; load it in a dtype with a larger range"
        else:
            what = (
                "holds NaN or infinite values; pass allow_nonfinite=True to accept them "
                "(--allow-nonfinite of convert, generate and evaluate)"
            )
        raise CheckpointError(f"{self.tensors[name].path}: {self._name_in_file(name)!r} {what}")

    def dtype_of(self, entry: Entry) -> torch.dtype:
        """Return the dtype that can hold the stored values of a parameter."""
        spans = self._entries.get(entry.name, entry).spans
        return reduce(torch.promote_types, {self._dtype(span.source) for span in spans})

    def _dtype(self, name: str) -> torch.dtype:
        dtype = self.tensors[name].dtype
        if dtype == FLOAT8:
            name = scales_of(name)
            dtype = self._opened(name).tensors[self._name_in_file(name)].dtype
        return torch.bfloat16 if dtype == MXFP4 else DTYPES[dtype]


# By float dtype: the integers of its size, without and with a sign, and the bits of +infinity.
_BITS: dict[torch.dtype, tuple[type[np.unsignedinteger], type[np.signedinteger], int]] = {
    torch.float64: (np.uint64, np.int64, 0x7FF << 52),
    torch.float32: (np.uint32, np.int32, 0xFF << 23),
    torch.float16: (np.uint16, np.int16, 0x1F << 10),
    torch.bfloat16: (np.uint16, np.int16, 0xFF << 7),
}


def is_finite(values: Tensor) -> bool:
    """Return whether a float tensor on the CPU contains neither NaN nor an infinity."""
    return _are_finite(byte_view(values.contiguous()), values.dtype)


def _are_finite(data: np.ndarray, dtype: torch.dtype) -> bool:
    """Return whether the bytes of floats contain neither NaN nor an infinity.

    The bits of positive floats, read as integers, have the order of the floats, and NaN comes
    after infinity. Negative floats have the same bits below a sign bit: they are negative as signed
    integers, and larger than all positive ones as unsigned integers. Two integer maxima therefore
    decide. They need no memory, and take a quarter of the time of `isfinite` or `aminmax`.
    """
    unsigned, signed, infinity = _BITS[dtype]
    minus_infinity = infinity | 1 << (8 * dtype.itemsize - 1)
    return bool(
        np.maximum.reduce(data.view(signed), initial=0) < infinity
        and np.maximum.reduce(data.view(unsigned), initial=0) < minus_infinity
    )


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit, also of NaN and of -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _match_index(
    index: Path, promised: set[str], shard: Path, held: Mapping[str, TensorInfo]
) -> None:
    """Check that a shard holds exactly the tensors that the index maps to it."""
    if lacking := sorted(promised - held.keys()):
        raise CheckpointError(
            f"{shard}: {short_repr(lacking[0])} is missing, but {index.name} puts it there "
            f"({len(lacking)} such tensors)\n{listing(lacking)}"
        )
    if surplus := sorted(held.keys() - promised):
        raise CheckpointError(
            f"{index}: {short_repr(surplus[0])} is not mapped to {shard.name}, which holds it "
            f"({len(surplus)} such tensors)\n{listing(surplus)}"
        )


def _describe(faults: list[tuple[Path, str, str]]) -> str:
    path, name, what = faults[0]
    first = f"{path}: {short_repr(name)} {what}"
    if len(faults) == 1:
        return first
    lines = listing(f"{name} {what}" for _, name, what in faults)
    return f"{first} (the first of {len(faults)} faults)\n{lines}"


@dataclass
class Source:
    """The checkpoint that a model was loaded from; all fields are empty for a new model.

    Attributes:
        folder: the local folder that the weights were loaded from, or None.
        dtype: the dtype of the embedding when it was loaded, or None.
        layout: the name in `WeightMap.layouts` of the layout of its tensors, or None.
        spelling: the checkpoint's own names of tensors: see `Checkpoint.spelling`.
        constants: HF name -> a tensor of the checkpoint that the model does not need. `save_hf`
            writes it as it was.
        files: name -> content of the tokenizer and generation files that were in the folder.
            `save_hf` writes them.
        generation_config: the content of generation_config.json; {} without such a file.
        unread: the checkpoint of a model that `from_hf(device="meta")` has made, until its values
            are read.
    """

    folder: Path | None = None
    dtype: torch.dtype | None = None
    layout: str | None = None
    spelling: dict[str, str] = field(default_factory=dict)
    constants: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    unread: Checkpoint | None = None

    def of_text_model(self) -> "Source":
        """Return the source of a model that is saved without the other towers."""
        names = {theirs: name for name, theirs in self.spelling.items()}
        own = {k: x for k, x in self.constants.items() if not isinstance(x, FileTensor)}
        constants = {names.get(name, name): x for name, x in own.items()}
        return replace(self, spelling={}, constants=constants)
