"""How kernels are launched: the type of a launch config and the choice among a kernel's configs.

The configs themselves stand at the head of each file of `kernels.triton`.
"""

from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """How a kernel is launched on one vendor's GPUs, for rows up to some length."""

    block: int  # elements of a row that a program handles at once; 0: the whole row
    num_warps: int
    num_stages: int = 2
    rows: int = 1  # rows that a program handles at once
    programs: int = 1  # for each multiprocessor, where a program handles many rows in turn
    pieces: int = 1  # of `block` elements that a program reads at once, where it takes more
    prefetch: bool = False  # whether the norms' backwards load 16-bit rows a tile ahead
    reload: bool = False  # whether they read a row again instead of holding it


# (largest row length, launch): the first that fits is taken, and None means any length.
Table = tuple[tuple[int | None, Launch], ...]


class Launches(NamedTuple):
    """The launch configs of one kernel, for each vendor.

    A warp has 32 lanes on NVIDIA and 64 on AMD, and a program at most 1024 lanes on both: on AMD
    num_warps is at most 16.
    """

    nvidia: Table
    amd: Table


def launch_for(table: Table, length: int) -> Launch:
    """The launch for rows of `length` elements; a block of 0 becomes the next power of two."""
    for limit, launch in table:
        if limit is None or length <= limit:
            if launch.block:
                return launch
            return Launch(1 << max(length - 1, 0).bit_length(), *launch[1:])
    raise AssertionError(f"no launch for rows of {length} elements: {table}")


def launch(launches: Launches, length: int) -> Launch:
    """The launch for rows of `length` elements on the GPU at hand."""
    return launch_for(launches.amd if torch.version.hip else launches.nvidia, length)


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
