"""Launch configs of kernels: their type and the choice among the configs of a kernel.

The configs are at the top of each file of `kernels.triton`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import simulator_of


class Launch(NamedTuple):
    """A launch config of a kernel, for one vendor's GPUs and rows up to some length."""

    block: int  # elements of a row that a program handles at once; 0 means the whole row
    num_warps: int
    num_stages: int = 2
    rows: int = 1  # rows that a program handles at once
    programs: int = 1  # programs for each multiprocessor, if a program loops over rows
    pieces: int = 1  # how many times `block` elements a program reads at once
    prefetch: bool = False  # whether the backward of a norm loads 16-bit rows one tile ahead
    reload: bool = False  # whether it reads a row twice instead of keeping it in registers
    depth: int = 1  # elements of the summed dimension that a product reads at once
    precision: str = "ieee"  # of products of float32; "tf32" rounds them, and AMD may not have it


# (largest row length, launch config): the first entry that fits is used; None is any length. A
# single config is for rows of any length.
Table = tuple[tuple[int | None, Launch], ...] | Launch


class Launches(NamedTuple):
    """The launch configs of one kernel, for each vendor.

    A warp has 32 lanes on NVIDIA and 64 on AMD. A program has at most 1024 lanes on both, so
    num_warps is at most 16 on AMD.
    """

    nvidia: Table
    amd: Table


def entries(table: Table) -> tuple[tuple[int | None, Launch], ...]:
    """Return the entries of a table: a single config is one for rows of any length."""
    return ((None, table),) if isinstance(table, Launch) else table


def launch_for(table: Table, length: int) -> Launch:
    """Return the config for rows of `length` elements. Block 0 becomes the next power of two."""
    for limit, launch in entries(table):
        if limit is None or length <= limit:
            if launch.block:
                return launch
            return Launch(1 << max(length - 1, 0).bit_length(), *launch[1:])
    raise AssertionError(f"no launch config fits rows of {length} elements: {table}")


def launch(launches: Launches, length: int) -> Launch:
    """Return the config for rows of `length` elements, for the vendor of PyTorch's build."""
    return launch_for(launches.amd if torch.version.hip else launches.nvidia, length)


def keywords(launch: Launch) -> dict[str, int]:
    """Return the keyword arguments of a kernel that come from every launch config."""
    block, num_warps, num_stages, *_ = launch
    return {"BLOCK": block, "num_warps": num_warps, "num_stages": num_stages}


def strided(*tensors: Tensor) -> list[Any]:
    """Return each tensor, with the elements of its rows in order, and its strides but the last."""
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    return [each for x in rows for each in (x, *x.stride()[:-1])]


def num_sms(device: torch.device) -> int:
    """Return the multiprocessors of a GPU, or 2 for CPU tensors in Triton's interpreter."""
    if device.type != "cuda":
        simulator = simulator_of(device)
        return 2 if simulator is None else simulator.num_sms
    return torch.cuda.get_device_properties(device.index).multi_processor_count


def has_large_shared_memory(device: torch.device) -> bool:
    """Return whether a program may use 200 KB, as on an H100 or B200; meta tensors mean such."""
    if device.type != "cuda":
        return device.type == "meta" and not torch.version.hip
    properties: Any = torch.cuda.get_device_properties(device.index)
    return bool(properties.shared_memory_per_block_optin >= 200 * 1024)


def reusable(x: Tensor) -> Tensor:
    """Return an output like x: x itself, which its kernel reads before it writes, or a new tensor.

    torch.compile plans the memory of what it traces, and would copy a tensor that is overwritten.
    """
    return torch.empty_like(x) if torch.compiler.is_compiling() else x


def cdiv(length: int, block: int) -> int:
    """Return how many blocks cover a length. On the host, triton.cdiv takes microseconds."""
    return -(-length // block)


def num_programs(setting: Launch, rows: int, device: torch.device) -> int:
    """Return the number of programs for a kernel whose programs loop over tiles of rows."""
    return min(cdiv(rows, setting.rows), setting.programs * num_sms(device))
