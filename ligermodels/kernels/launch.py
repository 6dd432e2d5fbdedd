"""Launch settings of every Triton kernel, one table per vendor. Change them here and only here."""

from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """How a kernel is launched; `Table` says for which rows."""

    block: int  # elements of a row that a program handles at once
    num_warps: int
    num_stages: int = 2
    rows: int = 1  # rows that a program handles at once
    programs: int = 1  # for each multiprocessor, where a program handles many rows in turn
    pieces: int = 1  # of `block` elements that a program reads at once, where it takes more
    prefetch: bool = False  # whether the norms' backwards load 16-bit rows a tile ahead
    reload: bool = False  # whether they read a row again instead of holding it


# Op -> (largest row length, launch), first fit wins; None means any length.
# Block 0 stands for the row length rounded up to a power of two.
# An AMD warp has 64 lanes and a workgroup at most 1024: num_warps stays at 16 or below there.
Table = dict[str, tuple[tuple[int | None, Launch], ...]]

NVIDIA: Table = {
    "rms_norm_forward": (
        (768, Launch(0, 2, rows=2)),
        (2048, Launch(0, 2)),
        (4096, Launch(0, 8)),
        (8192, Launch(0, 4)),
        (None, Launch(0, 8)),
    ),
    "rms_norm_backward": (
        (1024, Launch(0, 4, rows=4, programs=3, prefetch=True)),
        (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
        (4096, Launch(0, 8, programs=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    "add_rms_norm_backward": (
        (1024, Launch(0, 4, rows=2, programs=4, prefetch=True)),
        (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
        (4096, Launch(0, 8, programs=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    "layer_norm_forward": (
        (768, Launch(0, 1, rows=2)),
        (2048, Launch(0, 2)),
        (8192, Launch(0, 4)),
        (None, Launch(0, 8)),
    ),
    "layer_norm_backward": (
        (1024, Launch(0, 4, 1, rows=4, programs=4)),
        (2048, Launch(0, 8, 1, rows=4, programs=2)),
        (4096, Launch(0, 8, programs=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    "add_layer_norm_backward": (
        (1024, Launch(0, 4, rows=2, programs=4, prefetch=True)),
        (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
        (4096, Launch(0, 16, rows=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    "column_sums": ((None, Launch(16, 4, rows=64)),),
    "mean_loss": ((None, Launch(4096, 8)),),
    "scaled": ((None, Launch(4096, 8)),),
    "rope": ((512, Launch(512, 1)), (1024, Launch(1024, 2)), (None, Launch(1024, 4))),
    "qk_norm_rope_forward": ((64, Launch(512, 4)), (None, Launch(1024, 2))),
    "qk_norm_rope_backward": ((None, Launch(512, 1, programs=8)),),
    "glu_forward": ((None, Launch(512, 2)),),
    "glu_backward": ((None, Launch(512, 2)),),
    "cross_entropy_loss": ((None, Launch(1024, 4, pieces=4)),),
    "cross_entropy_statistics": ((4096, Launch(1024, 4)), (None, Launch(2048, 8, pieces=2))),
    "cross_entropy_gradient": ((4096, Launch(1024, 4)), (None, Launch(4096, 16))),
    "cross_entropy_both": (
        (4096, Launch(1024, 4)),
        (65536, Launch(2048, 8, pieces=4)),
        (None, Launch(4096, 16, pieces=4)),
    ),
}

# The norms' backwards have registers for one tile only on AMD; more programs hide the latency.
_AMD_NORM_BACKWARD = (
    (1024, Launch(0, 2, 1, programs=4)),
    (4096, Launch(0, 8, 1, programs=4)),
    (None, Launch(0, 16, 1, programs=4)),
)

AMD: Table = {
    "rms_norm_forward": (
        (1024, Launch(0, 2)),
        (4096, Launch(0, 4)),
        (8192, Launch(0, 8)),
        (None, Launch(0, 16)),
    ),
    "rms_norm_backward": _AMD_NORM_BACKWARD,
    "add_rms_norm_backward": _AMD_NORM_BACKWARD,
    "layer_norm_forward": (
        (1024, Launch(0, 2)),
        (4096, Launch(0, 4)),
        (8192, Launch(0, 8)),
        (None, Launch(0, 16)),
    ),
    "layer_norm_backward": _AMD_NORM_BACKWARD,
    "add_layer_norm_backward": _AMD_NORM_BACKWARD,
    "column_sums": ((None, Launch(32, 4, rows=64)),),
    "mean_loss": ((None, Launch(4096, 8)),),
    "scaled": ((None, Launch(4096, 8)),),
    "rope": ((None, Launch(1024, 4)),),
    "qk_norm_rope_forward": ((None, Launch(512, 4)),),
    "qk_norm_rope_backward": ((None, Launch(512, 4, programs=8)),),
    # A lane takes eight elements: HIP counts threads of a launch in 32 bits, 2^35 elements here.
    "glu_forward": ((None, Launch(2048, 4)),),
    "glu_backward": ((None, Launch(2048, 4)),),
    "cross_entropy_loss": ((4096, Launch(1024, 4)), (None, Launch(4096, 8))),
    "cross_entropy_statistics": ((4096, Launch(1024, 4)), (None, Launch(2048, 8))),
    "cross_entropy_gradient": ((4096, Launch(1024, 4)), (None, Launch(4096, 8))),
    "cross_entropy_both": ((4096, Launch(1024, 4)), (None, Launch(4096, 8))),
}

MAX_NORM_WIDTH = 65536


def check_norm_width(op: str, columns: int) -> None:
    """Raise ValueError for rows longer than the norms' kernels hold at once."""
    if columns > MAX_NORM_WIDTH:
        raise ValueError(
            f"{op}: rows of {columns} elements; the kernel holds a row at once and takes "
            f"at most {MAX_NORM_WIDTH}"
        )


def launch_for(table: Table, op: str, length: int) -> Launch:
    """The launch of `op` for rows of `length` elements."""
    for limit, launch in table[op]:
        if limit is None or length <= limit:
            if launch.block:
                return launch
            return Launch(1 << max(length - 1, 0).bit_length(), *launch[1:])
    raise AssertionError(f"{op} has no launch without a limit")


def launch(op: str, length: int) -> Launch:
    """The launch of `op` on the GPU at hand."""
    return launch_for(AMD if torch.version.hip else NVIDIA, op, length)


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number where there is none (the interpreter)."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device.index).multi_processor_count


def cdiv(length: int, block: int) -> int:
    """Blocks that cover a length. triton.cdiv on the host costs some microseconds a call."""
    return -(-length // block)


def num_programs(setting: Launch, rows: int, device: torch.device) -> int:
    """Programs to launch where each handles many tiles of rows in turn."""
    return min(cdiv(rows, setting.rows), setting.programs * num_sms(device))
