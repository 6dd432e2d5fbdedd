"""Read a checkpoint: first all headers, then compare names and shapes, then read the tensors."""

import os
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from ligermodels.converters.checkpoint_files import SAFE_WEIGHTS_INDEX_NAME, local_weight_files
from ligermodels.converters.safetensors_file import DTYPES, SafetensorsFile, TensorInfo
from ligermodels.converters.weight_map import Entry, Span, Towers, WeightMap
from ligermodels.errors import CheckpointError, listing, shown

# The tensors of a quantised weight have names with these endings. The first line is of GPTQ and
# AWQ, the second of bitsandbytes, the third of compressed-tensors and float8 checkpoints.
_QUANTISED = (
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
    *(".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map", ".SCB"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"),
)
_MAX_OPEN_FILES = 64  # A process may open far more files.


class Checkpoint:
    """The weights of a local HF folder. The constructor reads the headers and nothing else.

    Args:
        folder: the local folder.
        allow_nonfinite: whether `read` accepts NaN and infinite weights.
    Attributes:
        files: the weight files.
        tensors: HF name -> header entry. After `plan`, only the text model's tensors are in it.
        left_out: name prefix of another tower -> how many tensors that tower has.
    Raises:
        CheckpointError: the folder has no weights that can be read, a shard is missing or damaged,
            or the index does not match its shards. The message names the file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> None:
        self.folder = Path(folder)
        self.allow_nonfinite = allow_nonfinite
        self._open: list[SafetensorsFile] = []
        if not os.path.isdir(self.folder):
            raise CheckpointError(f"{self.folder}: there is no such folder; check the path")
        files, shard_of = local_weight_files(self.folder)
        index = self.folder / SAFE_WEIGHTS_INDEX_NAME
        # Messages about the whole checkpoint name this file.
        self.listing_file = self.folder / files[0] if shard_of is None else index
        self.files = [self.folder / name for name in files]
        self.tensors: dict[str, TensorInfo] = {}
        self.left_out: dict[str, int] = {}
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
        """Check that the checkpoint holds exactly the tensors of a weight map.

        Returns: native name -> stored dtype. If its HF tensors have different dtypes, this is the
            dtype that can hold the values of all of them.
        Raises:
            CheckpointError: tensors are quantised, missing or unexpected, or have a wrong shape.
                One message lists the faults.
        """
        if weight_map.towers is not None:
            self._leave_out(weight_map.towers)
        expected = weight_map.source_shapes()
        optional = {
            name: expected[original]
            for name, original in weight_map.aliases.items()
            if name in self.tensors
        }
        faults: list[tuple[Path, str, str]] = []
        absent = []
        for name, shape in {**expected, **optional}.items():
            found = self.tensors.get(name)
            if found is None:
                absent.append((self.listing_file, name, "is missing"))
            elif found.dtype not in DTYPES:
                what = f"is stored as {found.dtype}: quantised checkpoints are not supported"
                faults.append((found.path, self._name_in_file(name), what))
            elif found.shape != shape:
                what = f"has shape {list(found.shape)}, expected {list(shape)}"
                faults.append((found.path, self._name_in_file(name), what))
        unexpected = []
        for name, info in self.tensors.items():
            if name in expected or name in optional or name.endswith(weight_map.ignored):
                continue
            if name.endswith(_QUANTISED):
                what = "is part of a quantised weight: quantised checkpoints are not supported"
                faults.append((info.path, name, what))
            else:
                unexpected.append((info.path, name, "is unexpected"))
        if faults := [*faults, *absent, *unexpected]:
            raise CheckpointError(_describe(faults))
        return {entry.name: self._stored_dtype(entry) for entry in weight_map}

    def _leave_out(self, towers: Towers) -> None:
        """Drop the tensors of other towers, and give the others the text model's names."""
        text: dict[str, TensorInfo] = {}
        for name, info in self.tensors.items():
            if tower := next((start for start in towers.left_out if name.startswith(start)), None):
                self.left_out[tower] = self.left_out.get(tower, 0) + 1
                continue
            alone = towers.text_name(name)
            if alone in text:
                raise CheckpointError(
                    f"{info.path}: {shown(name)} and {shown(self._name_in_file(alone))} are two "
                    "spellings of one tensor; a checkpoint may hold only one of them"
                )
            if alone != name:
                self._stored_as[alone] = name
            text[alone] = info
        self.tensors = text

    def _name_in_file(self, name: str) -> str:
        """Return the name in the file of a tensor with this name in the text model."""
        return self._stored_as.get(name, name)

    def read(self, entry: Entry, out: Tensor, start: int = 0) -> None:
        """Copy native rows `start` to `start + len(out)` of a parameter into `out`.

        This reads only these rows from the files, one HF tensor at a time, and casts them on copy.

        Args: out has shape (rows, *entry.shape[1:]), any float dtype and any device.
        Raises:
            CheckpointError: a value is NaN or infinite, or overflows in the dtype of `out`; or the
                file was changed after its header was read.
        """
        rows = out.shape[0]
        assert out.shape[1:] == entry.shape[1:] and 0 <= start <= start + rows <= entry.shape[0]
        with torch.no_grad():
            for span in entry.spans:
                first, last = max(start, span.row), min(start + rows, span.row + span.rows)
                if first < last:
                    offset, at = span.source_row - span.row, first - start
                    for stored in self._rows(span.source, first + offset, last + offset):
                        if not self.allow_nonfinite:
                            self._check_finite(span, stored, out.dtype)
                        out[at : at + len(stored)].copy_(stored)
                        at += len(stored)

    def check_aliases(self, weight_map: WeightMap) -> None:
        """Compare each tensor that is stored twice, such as a tied head, with its original.

        Raises:
            CheckpointError: the two tensors differ.
        """
        for alias, original in weight_map.aliases.items():
            if alias in self.tensors and not self.bitwise_equal(alias, self, original):
                raise CheckpointError(
                    f"{self.tensors[alias].path}: {alias!r} differs from {original!r}, but "
                    "config.json ties them; if the model has a separate head, set "
                    "tie_word_embeddings to false in config.json"
                )

    def bitwise_equal(self, name: str, other: "Checkpoint", other_name: str) -> bool:
        """Return whether two stored HF tensors agree in dtype, shape and every bit."""
        a, b = self.tensors[name], other.tensors[other_name]
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        pieces = zip(self._rows(name), other._rows(other_name), strict=True)
        return all(bitwise_equal(mine, theirs) for mine, theirs in pieces)

    def tensor(self, name: str) -> Tensor:
        """Return an HF tensor in its stored dtype, as a new tensor."""
        info = self.tensors[name]
        return torch.cat([piece.clone() for piece in self._rows(name)]).view(info.shape)

    def _rows(self, name: str, first: int = 0, last: int | None = None) -> Iterator[Tensor]:
        name = self._name_in_file(name)
        file = self._file_of[name]
        if file not in self._open:
            if len(self._open) == _MAX_OPEN_FILES:
                self._open.pop(0).close()
            self._open.append(file)
        return file.read(name, first, last)

    def _check_finite(self, span: Span, stored: Tensor, dtype: torch.dtype) -> None:
        # The minimum and maximum are NaN if any value is NaN. isfinite() would allocate a mask.
        ends = torch.stack(stored.aminmax())
        if not ends.isfinite().all():
            what = "holds NaN or infinite values; pass allow_nonfinite=True to accept them"
        elif not ends.to(dtype).isfinite().all():
            what = f"holds values too large for {dtype}; load it in a dtype with a larger range"
        else:
            return
        raise CheckpointError(
            f"{self.tensors[span.source].path}: {self._name_in_file(span.source)!r} {what}"
        )

    def _stored_dtype(self, entry: Entry) -> torch.dtype:
        dtypes = (DTYPES[self.tensors[span.source].dtype] for span in entry.spans)
        return reduce(torch.promote_types, dtypes)


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
            f"{shard}: {shown(lacking[0])} is missing, but {index.name} puts it there "
            f"({len(lacking)} such tensors)\n{listing(lacking)}"
        )
    if surplus := sorted(held.keys() - promised):
        raise CheckpointError(
            f"{index}: {shown(surplus[0])} is not mapped to {shard.name}, which holds it "
            f"({len(surplus)} such tensors)\n{listing(surplus)}"
        )


def _describe(faults: list[tuple[Path, str, str]]) -> str:
    path, name, what = faults[0]
    first = f"{path}: {shown(name)} {what}"
    if len(faults) == 1:
        return first
    lines = listing(f"{name} {what}" for _, name, what in faults)
    return f"{first} (the first of {len(faults)} faults)\n{lines}"
