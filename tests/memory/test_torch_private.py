"""What PyTorch allocates by itself; test_sharding.py compares real steps."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ligermodels.memory.byte_sizes import MIB
from ligermodels.memory.torch_private import (
    CHECKED,
    SCRATCH,
    CachingAllocator,
    expandable_segments,
)
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]


def test_this_torch_was_checked() -> None:
    """What torch allocates without a GPU is compared in this folder; the rest needs a GPU."""
    version = ".".join(torch.__version__.split(".")[:2])
    assert version in CHECKED, (
        f"torch {version} may allocate otherwise: run tests/memory, and on a GPU "
        "`python -m benchmarks.memory --predict 40` and `pytest -m gpu tests/memory tests/gpu`; "
        "then add the version to ligermodels.memory.torch_private.CHECKED"
    )


def test_operators_take_the_arguments_from_which_their_scratch_is_told() -> None:
    for name in SCRATCH:
        if name.startswith("torch_attn"):
            from torch.nn.attention import varlen  # noqa: F401  it registers the operator
        room, _, operator = name.partition("::")
        schema = getattr(getattr(torch.ops, room), operator).default._schema
        first = [argument.name for argument in schema.arguments][:3]
        assert first[1] in ("query", "indices") and first[0].startswith("grad")
        assert first[1] == "indices" or first[2] == "key"


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("torch_tells", [True, False])
def test_expandable_segments_are_seen(monkeypatch, torch_tells: bool) -> None:
    settings = {"": False, "max_split_size_mb:64, expandable_segments: True": True}
    settings["expandable_segments:False"] = False
    name = "_accelerator_getAllocatorSettings"
    for text, expected in settings.items():
        if torch_tells:
            monkeypatch.setattr(torch._C, name, lambda text=text: text, raising=False)
        else:
            monkeypatch.delattr(torch._C, name, raising=False)
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
        assert expandable_segments() is expected


@pytest.mark.parametrize(
    "size, allocated, reserved",
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # a rest of at most 1 MiB stays in the block
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_one_block(size, allocated, reserved) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, reserved)


def requests(seed: int, steps: int = 2000):
    """Yield random requests: ("allocate", index, size) and ("free", index, 0)."""
    generator, live = random.Random(seed), []
    for index in range(steps):
        if live and generator.random() < 0.5:
            yield "free", live.pop(generator.randrange(len(live))), 0
        else:
            live.append(index)
            yield "allocate", index, int(2 ** generator.uniform(0, 26))


def test_an_expandable_segment_grows_at_its_end() -> None:
    allocator = CachingAllocator(expandable=True)
    first, second, third = (allocator.allocate(size * MIB) for size in (30, 20, 15))
    assert allocator.reserved == 80 * MIB  # 65, in parts of 20
    allocator.free(second)
    allocator.free(third)
    assert allocator.allocate(60 * MIB).address == second.address
    assert allocator.reserved == 100 * MIB
    allocator.free(first)
    # The last block is as long as it may become, so another one is taken.
    assert allocator.allocate(5 * MIB).address == first.address
    assert allocator.allocate(MIB // 2).size == MIB // 2
    assert allocator.reserved == 102 * MIB


def compare_with_the_gpu() -> None:
    allocator, live = CachingAllocator(expandable=expandable_segments()), {}
    for action, index, size in requests(1, 500):
        if action == "free":
            block, tensor = live.pop(index)
            allocator.free(block)
            del tensor
        else:
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            live[index] = allocator.allocate(size), tensor
        assert torch.cuda.memory_allocated() == allocator.allocated
    assert torch.cuda.memory_reserved() == allocator.reserved


@pytest.mark.gpu
@pytest.mark.parametrize("expandable", [False, True])
def test_the_same_bytes_as_on_a_gpu(expandable: bool) -> None:
    """In a process of its own, since free parts of earlier segments would be used first."""
    command = [sys.executable, "-m", "tests.memory.test_torch_private"]
    given = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS, env=os.environ | given
    )
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    compare_with_the_gpu()
