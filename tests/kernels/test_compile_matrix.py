"""Every kernel, every flag that is used and every launch config, compiled for the GPUs.

No GPU takes part: the ops of the table run on meta tensors, what they would launch is recorded, and
Triton compiles it for sm_80, sm_90, sm_100, gfx942 and gfx90a.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations

import pytest
import torch

from ligermodels.kernels import autocast
from ligermodels.kernels.launch import Launches
from tests.kernels import ops_table
from tests.kernels.checks import as_tuple
from tests.kernels.conftest import Place
from tests.kernels.launches import (
    Recorded,
    Recording,
    compile_for,
    kernels_of,
    launch_configs,
    modules,
    recorder,
)
from tests.kernels.ops_table import CASES, Case, Inputs, differentiable, leaves, upstreams

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

NVIDIA_ARCHES = (90, 80, 100)  # the longest first
AMD_ARCHES = ("gfx942", "gfx90a")
# The least that a block may have on every NVIDIA GPU from sm_80 on (sm_86's 99 KiB).
NVIDIA_SHARED = 99 * 1024
AMD_SHARED, AMD_THREADS, NVIDIA_THREADS = 65536, 1024, 1024
# The norms' backwards hold up to five arrays of a tile's size: from 8192 elements on more than the
# threads have registers for. A little of it may go to the L1 cache there, and nowhere else; more
# in float32, where the launch is the one that is fastest for bfloat16.
NORM_BACKWARDS = ("rms_norm_backward_kernel", "layer_norm_backward_kernel")
# Several options at once take a few registers too many: the launch is the one that is fastest for
# what models train with.
CROSS_ENTROPY_SPILL = 16


# Sixteen strides that divide by nothing known take more scalar registers than there are. These
# spill to lanes of vector registers, not to memory.
AMD_SCALAR_SPILL = 12


# LayerNorm of rows of 33 to 64 elements, which no model has: the compiler keeps more than it must.
AMD_SHORT_ROW_SPILL = 64


def allowed_amd_spill(launch: Recorded) -> int:
    """Registers and bytes that a thread may spill on AMD."""
    name = launch.kernel.__name__
    if name == "qk_norm_rope_backward_kernel" and not launch.attributes:
        return AMD_SCALAR_SPILL
    short = name == "layer_norm_forward_kernel" and launch.constants["BLOCK"] == 64
    return AMD_SHORT_ROW_SPILL if short else 0


def allowed_spill(launch: Recorded) -> int:
    """Bytes a thread may spill on NVIDIA."""
    if launch.kernel.__name__ == "cross_entropy_kernel":
        given = ("log_prob_ptr" in launch.pointers, "class_weights_ptr" in launch.pointers)
        options = (launch.constants["HAS_SMOOTHING"], launch.constants["HAS_SOFTCAP"])
        several = sum((*given, *options)) > 1
        return CROSS_ENTROPY_SPILL if several else 0
    if launch.kernel.__name__ not in NORM_BACKWARDS:
        return 0
    tile = launch.constants["ROWS"] * launch.constants["BLOCK"]
    if tile < 8192:
        return 0
    if launch.signature["s_ptr"] == "*fp32" and tile > 8192:
        return 448
    return 64 if launch.attributes else 128


OPS = sorted({case.op for case in CASES.values()})
DTYPES = (torch.bfloat16, torch.float32)
LEADING = (2, 64)
ODD_LENGTHS = (1, 10, 33, 1000)


def launch(
    case: Case,
    dtype: torch.dtype,
    arguments: Inputs,
    *,
    frozen: Iterable[str] = (),
    used: int | None = None,
    x_dtype: torch.dtype | None = None,
) -> None:
    """An op on meta tensors, forward and backward through all its outputs or one of them."""
    made = leaves(case, case.inputs(LEADING, **arguments), Place("meta", dtype))
    if x_dtype is not None:
        made["x"] = made["x"].detach().to(x_dtype).requires_grad_()
    for name in frozen:
        made[name].requires_grad_(False)
    outputs = [x for x in as_tuple(case.function(**made)) if x.requires_grad]
    outputs = outputs if used is None else outputs[used : used + 1]
    inputs = [x for x in made.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, inputs, upstreams(outputs), allow_unused=True)


def every_length(dtype: torch.dtype) -> None:
    """Every case at the sizes that models have, and with all its flags."""
    for case in CASES.values():
        for size in case.sizes:
            for flags in ({}, *case.flags[-1:]):
                launch(case, dtype, size | flags)


def every_flag(dtype: torch.dtype) -> None:
    """What else changes a kernel, at the size where a program holds most.

    That is which gradients are needed, which outputs have one, and the flags of the table.
    """
    for case in CASES.values():
        size = case.sizes[-1]
        names = differentiable(case)
        for count in range(1, len(names)):
            for frozen in combinations(names, count):
                launch(case, dtype, size, frozen=frozen)
        for flags in ({}, *case.flags):
            launch(case, dtype, size | flags)
            for used in range(4):
                launch(case, dtype, size | flags, used=used)


def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One case of each op in float16, under autocast, with a wider residual, at odd lengths.

    At a size in the middle: what these add to the registers is too much for the longest rows.
    """
    for case in {case.op: case for case in reversed(CASES.values())}.values():
        size = case.sizes[(len(case.sizes) - 1) // 2]
        launch(case, torch.float16, size)
        with monkeypatch.context() as patch:
            patch.setattr(autocast, "autocast_dtype", lambda x: torch.bfloat16)
            launch(case, torch.float32, size)
        if "residual" in differentiable(case):
            launch(case, torch.float32, size, x_dtype=torch.bfloat16)
        (argument, usual), *_ = size.items()
        for length in ODD_LENGTHS:
            if length < usual:
                launch(case, torch.bfloat16, {argument: length})


def record(
    monkeypatch: pytest.MonkeyPatch, vendor: str, full: bool, op: str | None = None
) -> Recording:
    """The launches of every case, or of one op's."""

    def meta(*shape: int, **_: float) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float64, device="meta")

    monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    monkeypatch.setattr(ops_table, "random", meta)
    if op is not None:
        cases = {name: case for name, case in CASES.items() if case.op == op}
        monkeypatch.setitem(globals(), "CASES", cases)
    recording = recorder(monkeypatch, vendor)
    recorded = recording.launches
    if full:
        mixed(monkeypatch)
        # torch.compile passes Python floats as float64 and leaves divisibility out.
        recorded += [launch.as_torch_compile_passes_it() for launch in recorded]
        every_flag(torch.bfloat16)
    for dtype in DTYPES:
        every_length(dtype)
    return recording


def launches(monkeypatch: pytest.MonkeyPatch, vendor: str, full: bool, op: str) -> list[Recorded]:
    recorded = record(monkeypatch, vendor, full, op).launches
    return list({launch.key(): launch for launch in recorded}.values())


@pytest.mark.parametrize("vendor", Launches._fields)
@pytest.mark.parametrize("full", [False, True])
def test_every_kernel_and_every_launch_config_is_compiled(monkeypatch, vendor, full) -> None:
    kernels = {name for module in modules() for name in kernels_of(module)}
    recording = record(monkeypatch, vendor, full)
    unreached = kernels - {launch.kernel.__name__ for launch in recording.launches}
    assert not unreached, f"kernels that no case of tests/kernels/ops_table.py reaches: {unreached}"
    configs = {
        (name, limit)
        for name, launches in launch_configs().items()
        for limit, _ in getattr(launches, vendor)
    }
    # A config imported from another module counts there, too: give each op its own.
    unreached = configs - recording.configs
    assert not unreached, f"launch configs that no case of the table reaches: {unreached}"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", AMD_ARCHES)
def test_amd(monkeypatch: pytest.MonkeyPatch, arch: str, op: str) -> None:
    wrong = []
    for launch in launches(monkeypatch, "amd", arch == "gfx942", op):
        usage = compile_for(launch, "hip", arch, 64)
        if (
            usage.threads > AMD_THREADS
            or usage.shared > AMD_SHARED
            or usage.spilled > allowed_amd_spill(launch)
        ):
            wrong.append((usage, launch.describe()))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", NVIDIA_ARCHES)
def test_nvidia(monkeypatch: pytest.MonkeyPatch, arch: int, op: str) -> None:
    wrong = []
    for launch in launches(monkeypatch, "nvidia", arch == 90, op):
        usage = compile_for(launch, "cuda", arch, 32)
        if (
            usage.threads > NVIDIA_THREADS
            or usage.shared > NVIDIA_SHARED
            or usage.spilled > allowed_spill(launch)
        ):
            wrong.append((usage, launch.describe()))
    assert not wrong, "\n".join(map(str, wrong))


def test_every_table_ends_without_a_limit() -> None:
    for name, launches in launch_configs().items():
        for table, warp in ((launches.nvidia, 32), (launches.amd, 64)):
            limits = [limit for limit, _ in table]
            assert limits[-1] is None and None not in limits[:-1], name
            assert limits[:-1] == sorted(limits[:-1]), name
            assert all(launch.num_warps * warp <= 1024 for _, launch in table), name
