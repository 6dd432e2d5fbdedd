"""Read one safetensors file: its header, then its tensors without mmap.

The format: https://github.com/huggingface/safetensors#format
"""

import contextlib
import json
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
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import Self

from ligermodels.converters.files import FLOAT_DTYPES, open_regular
from ligermodels.errors import CheckpointError, first_line, printable, short_repr

DTYPES: dict[str, torch.dtype] = {key: getattr(torch, name) for key, name in FLOAT_DTYPES.items()}
# What can be read: an optimizer's state in 8 bits, and weights in float8, too.
READABLE = DTYPES | {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
_NAMES = {dtype: name for name, dtype in READABLE.items()}
_NAMES |= {torch.bool: "BOOL", torch.int32: "I32", torch.int64: "I64"}
# This many bytes, a multiple of the largest itemsize, are read at a time. They fit in a core's L2
# cache, so that the caller finds them there: a second pass over them costs a quarter of a pass over
# memory. Smaller pieces cost more of Python's time, in which no other thread of Python runs.
_PIECE = 1 << 20
# Smaller tensors have no mapping of their own: they would waste most of its last page of 4 KiB.
_LEAST_MAPPED = 1 << 16  # bytes
_LFS_POINTER = b"version https://git-lfs"


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
        self._file = open_regular(path, CheckpointError)
        self._identity = self._identify()
        self._data, self.tensors, self.metadata = _read_header(path, self._file)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def _identify(self) -> tuple[int, ...]:
        """Return numbers that change if the file is changed."""
        status = os.fstat(self._file.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

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
            # Several threads may read: this moves no position in the file.
            while rest and (count := os.preadv(self._file.fileno(), [rest], offset)):
                rest, offset = rest[count:], offset + count
            changed = bool(rest) or self._identify() != self._identity
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
    """Return where the data begins, the entries and the texts; safetensors checks the header."""
    try:
        start = file.read(len(_LFS_POINTER)) or b""
        if start == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: the file is a git-lfs pointer, not the weights; fetch the weights with "
                "`git lfs pull`"
            )
        with safe_open(path, "np"):
            pass
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        header = json.loads(file.read(length) or b"")
    except OSError as fault:
        raise CheckpointError(f"{path}: the file cannot be read: {fault.strerror}") from None
    except (SafetensorError, ValueError) as fault:
        raise CheckpointError(
            f"{path}: the file is truncated or damaged, or is not a safetensors file: "
            f"{printable(first_line(fault))}"
        ) from None
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = TensorInfo(path, entry["dtype"], tuple(entry["shape"]), end - begin, begin)
    return 8 + length, tensors, metadata


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
