"""Read one safetensors file: check its header, then read its tensors without mmap.

The format: https://github.com/huggingface/safetensors#format
"""

import contextlib
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from ligermodels.converters.files import FLOAT_DTYPES, OpenFile, parse_json
from ligermodels.errors import CheckpointError, short_repr

DTYPES: dict[str, torch.dtype] = {key: getattr(torch, name) for key, name in FLOAT_DTYPES.items()}
# What can be read: an optimizer's state in 8 bits, too.
READABLE = DTYPES | {"U8": torch.uint8}
# Dtypes that the format defines but no model here uses for weights, with their bits per value.
# Quantised checkpoints hold integers, and floats of at most 8 bits.
_OTHER_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32}
_OTHER_BITS |= {"U64": 64, "I64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_OTHER_BITS |= {f"F8_{kind}": 8 for kind in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}
_NAMES = {dtype: name for name, dtype in READABLE.items()}
_NAMES |= {torch.bool: "BOOL", torch.int32: "I32", torch.int64: "I64"}
_MAX_HEADER = 100_000_000  # The format sets this limit, in bytes.
_MAX_DIMS = 64  # torch sets this limit.
# This many bytes, a multiple of the largest itemsize, are read at a time. They fit in a core's L2
# cache, so that the caller finds them there: a second pass over them costs a quarter of a pass over
# memory. Smaller pieces cost more of Python's time, in which no other thread of Python runs.
_PIECE = 1 << 20
# Smaller tensors have no mapping of their own: they would waste most of its last page of 4 KiB.
_LEAST_MAPPED = 1 << 16  # bytes
_LFS_POINTER = b"version https://git-lfs"
# The first bytes of other formats: the two formats of torch.save, and GGUF.
_OTHER_FORMATS = {
    b"PK\x03\x04": "the file holds pickled weights under another name; they are never unpickled",
    b"\x80\x02": "the file holds pickled weights under another name; they are never unpickled",
    b"GGUF": "the file is a GGUF file under another name",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header's entry for one tensor.

    Attributes:
        path: the file that holds the tensor.
        dtype: the format's name of the dtype, such as "BF16".
        begin: the position of the tensor's first byte, counted from the end of the header.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file holds it: the format's name of its dtype, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return len(self.data)

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return how a file holds a tensor."""
        values = tensor.detach().to("cpu").contiguous()
        data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        return cls(_NAMES[tensor.dtype], tuple(tensor.shape), data)

    def is_close(self, tensor: Tensor) -> bool:
        """Whether it holds a tensor's values, up to 1%: 16 bit round by up to 0.4%."""
        dtype = {name: dtype for dtype, name in _NAMES.items()}.get(self.dtype)
        if dtype is None or self.shape != tuple(tensor.shape):
            return False
        held = torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)
        return torch.allclose(held.double(), tensor.double().cpu(), 1e-2, 0.0, equal_nan=True)


class SafetensorsFile:
    """A safetensors file. The constructor opens it, and reads the header and nothing else.

    Unlike `safetensors.safe_open`, this class reads tensors and does not map the file. If another
    process truncates a mapped file, an access to the mapping kills this process. The class also
    detects that the file was changed after its header was read.

    Attributes:
        tensors: the name of each tensor -> its header entry.
        metadata: the texts in the header, by key.
    Raises:
        CheckpointError: the file is absent, truncated or damaged. The message names the file and,
            if one tensor is at fault, that tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # It stays open: if a save replaces the checkpoint, this is still the file of the header.
        self._file = OpenFile(path, CheckpointError)
        self._identity = self._file.identity()
        self._data, self.tensors, self.metadata = _read_header(path, self._file.file)

    def read(
        self, name: str, first: int = 0, last: int | None = None, leading: int = 1
    ) -> Iterator[Tensor]:
        """Yield the rows `first` to `last` of a tensor in their stored dtype, piece by piece.

        The size of a piece is bounded. Each piece overwrites the memory of the previous one.

        Args: leading: how many dimensions the number of a row counts, as if they were one.
        Raises:
            CheckpointError: the file cannot be read, or was changed after its header was read.
        """
        shape = self.tensors[name].shape or (1,)
        width = shape[leading:]
        last = math.prod(shape[:leading]) if last is None else last
        dtype = READABLE[self.tensors[name].dtype]
        per_piece = max(1, _PIECE // max(1, math.prod(width) * dtype.itemsize))
        buffer = torch.empty(min(per_piece, last - first), *width, dtype=dtype)
        for row in range(first, last, per_piece):
            piece = buffer[: last - row]
            for _ in self.read_into(byte_view(piece), name, row, leading):
                pass
            yield piece

    def read_into(
        self, memory: np.ndarray, name: str, first: int = 0, leading: int = 1
    ) -> Iterator[np.ndarray]:
        """Fill memory with the rows of a tensor from `first` on; yield its pieces, once filled.

        Args: memory: the bytes of whole rows of the stored dtype, as `byte_view` returns them;
            leading: as in `read`.
        Raises: what `read` raises.
        """
        info = self.tensors[name]
        row_bytes = info.nbytes // max(1, math.prod(info.shape[:leading]))
        start = self._data + info.begin + first * row_bytes
        for at in range(0, len(memory), _PIECE):
            piece = memory[at : at + _PIECE]
            self._fill(name, start + at, piece.data)
            yield piece

    def stored(self, name: str) -> StoredTensor:
        """Return a whole tensor as it is, of any dtype of the format."""
        info = self.tensors[name]
        data: np.ndarray = np.empty(info.nbytes, np.uint8)
        for _ in self.read_into(data, name):
            pass
        return StoredTensor(info.dtype, info.shape, data.tobytes())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of floats in its stored dtype, as a new tensor.

        Raises:
            CheckpointError: as `read`, or the dtype is another one.
        """
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {short_repr(name)} has the dtype {info.dtype}; expected one of "
                f"{', '.join(DTYPES)}"
            )
        out = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        for _ in self.read_into(byte_view(out), name):
            pass
        return out

    def read_columns(
        self, name: str, first: int, last: int, columns: tuple[int, int]
    ) -> Iterator[Tensor]:
        """Yield the given columns of the rows `first` to `last` of matrices, as `read` does.

        Only these columns are read from the file.
        """
        info, (begin, end) = self.tensors[name], columns
        dtype = READABLE[info.dtype]
        row_bytes, size = info.shape[-1] * dtype.itemsize, (end - begin) * dtype.itemsize
        buffer = torch.empty(
            min(last - first, max(1, _PIECE // max(1, size))), end - begin, dtype=dtype
        )
        memory = byte_view(buffer).data
        start = self._data + info.begin + begin * dtype.itemsize
        for row in range(first, last, len(buffer)):
            rows = buffer[: last - row]
            for at in range(len(rows)):
                offset = start + (row + at) * row_bytes
                self._fill(name, offset, memory[at * size : (at + 1) * size])
            yield rows

    def _fill(self, name: str, offset: int, rest: memoryview) -> None:
        try:
            while rest and (count := self._file.read_at(offset, rest)):
                rest, offset = rest[count:], offset + count
            changed = bool(rest) or self._file.identity() != self._identity
        except OSError as fault:
            raise CheckpointError(
                f"{self.path}: {short_repr(name)} cannot be read: {fault.strerror}"
            ) from None
        if changed:
            raise CheckpointError(
                f"{self.path}: {short_repr(name)} cannot be read: the file was changed after its "
                "header was read"
            )


class FileTensor(StoredTensor):
    """A tensor that stays in its file until `data` is asked for.

    The file stays open. A copy has the same file, and a pickle holds the bytes.

    Args: file: the file; name: the name of one of its tensors.
    """

    __slots__ = ("file", "info")
    file: SafetensorsFile
    info: tuple[str, int]

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        info = file.tensors[name]
        fields = {"file": file, "info": (name, info.nbytes), "dtype": info.dtype}
        for field, value in (fields | {"shape": info.shape}).items():
            object.__setattr__(self, field, value)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.info[1]

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes, which are read now; `SafetensorsFile.read` has the errors."""
        return self.file.stored(self.info[0]).data

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return StoredTensor, (self.dtype, self.shape, self.data)


def byte_view(values: Tensor) -> np.ndarray:
    """Return the bytes of a contiguous tensor on the CPU. Both share the memory."""
    flat = values.detach().as_strided((values.numel(),), (1,))  # A single value has any stride.
    return flat.view(torch.uint8).numpy()


def _read_header(path: Path, file: FileIO) -> tuple[int, dict[str, TensorInfo], dict[str, str]]:
    """Return where the data begins, the entries, checked against the file's size, and the texts."""
    try:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_LFS_POINTER)) or b""
        if start == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: the file is a git-lfs pointer, not the weights; fetch the weights with "
                "`git lfs pull`"
            )
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            why = next(
                (what for magic, what in _OTHER_FORMATS.items() if start.startswith(magic)), ""
            )
            raise CheckpointError(
                f"{path}: {why or 'the file is truncated or is not a safetensors file'}: its first "
                f"8 bytes declare a header of {length} bytes, too many for a file of {size} bytes"
            )
        file.seek(8)
        text = file.read(length) or b""
    except OSError as fault:
        raise CheckpointError(f"{path}: the file cannot be read: {fault.strerror}") from None
    header = parse_json(text, f"{path} (header)", CheckpointError)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: '__metadata__' is not an object whose values are strings")

    tensors = {name: _tensor_info(path, name, value) for name, value in header.items()}
    expected = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if info.begin != expected:
            raise CheckpointError(
                f"{path}: {short_repr(name)} begins at byte {info.begin} of the data, expected "
                f"{expected}; the tensors overlap, or there is a gap between them"
            )
        expected += info.nbytes
    held = size - 8 - length
    if held < expected:
        raise CheckpointError(
            f"{path}: the file is truncated: the header declares {expected} bytes of tensors, "
            f"but only {held} bytes follow the header"
        )
    if held > expected:
        raise CheckpointError(
            f"{path}: {held - expected} bytes follow the last tensor, expected none"
        )
    return 8 + length, tensors, metadata


_HEADER_KEYS = {"dtype", "shape", "data_offsets"}


def _tensor_info(path: Path, name: str, value: Any) -> TensorInfo:
    """Check the header's entry for one tensor."""

    def fault(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {short_repr(name)} {what}")

    if not isinstance(value, dict) or value.keys() != _HEADER_KEYS:
        raise fault("needs exactly the keys dtype, shape and data_offsets in the header")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in _OTHER_BITS):
        raise fault(f"has dtype {short_repr(dtype)}, which the format does not define")
    if not _sizes(shape) or len(shape) > _MAX_DIMS:
        raise fault(f"has shape {short_repr(shape)}, expected a list of sizes that torch accepts")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault(f"has data_offsets {short_repr(offsets)}, expected [begin, end]")
    begin, end = offsets
    bits = DTYPES[dtype].itemsize * 8 if dtype in DTYPES else _OTHER_BITS[dtype]
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise fault(
            f"has {end - begin} bytes, which is not the size of {dtype} values of shape "
            f"{short_repr(shape)}"
        )
    return TensorInfo(path, dtype, tuple(shape), end - begin, begin)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def empty_in_huge_pages(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return a new tensor without values, as `torch.empty` does.

    A large one on the CPU has its own mapping, in pages of 2 MiB where Linux has them. Linux
    provides the memory of a page when it is first written, and 2 MiB at once take less than half of
    the time of 512 pages of 4 KiB. A loaded checkpoint is written once, so this is a large part of
    the time of a load. Linux joins adjacent mappings to one area, in
    which a huge page may hold parts of several tensors. The memory of malloc is no such area: it
    writes a header before each tensor, and the small page of the header takes the place of a huge
    one. Where the administrator has disabled huge pages, the tensor lies in small ones. The storage
    of a mapping cannot be resized.

    Args: shape, dtype: of the tensor; device: on another device than the CPU, this is torch.empty.
    Raises: what `torch.empty` raises, such as RuntimeError if there is not enough memory.
    """
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    wanted = torch.device(device).type == "cpu" and nbytes >= _LEAST_MAPPED
    if not wanted or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # torch's error names the bytes that it needs
        return torch.empty(shape, dtype=dtype, device=device)
    with contextlib.suppress(OSError):  # The kernel was built without huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
