"""Every kernel, every flag that is used and every launch config, compiled for GPUs.

This needs no GPU: the ops of the table run on meta tensors, which records what they would launch.
Triton compiles the launches for sm_90 and gfx942, reduced to those that hold each feature (a
constant, an option, a pointer's dtype). For sm_80, sm_100 and gfx90a it compiles the largest launch
of each kernel. That takes minutes, so the default run compiles one launch of each kernel for sm_90,
one of every third kernel for gfx942, and one of every ninth for each of the other three. The long
tests compile all, and each pair of two features.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from math import prod

import pytest
import torch

from ligermodels.kernels import dispatch
from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.decode_attention import decode_attention
from ligermodels.kernels.dequantize import dequantize
from ligermodels.kernels.expert_mlp import expert_mlp
from ligermodels.kernels.float8_cast import absolute_maximum, float8_cast
from ligermodels.kernels.gated_delta_decode import gated_delta_decode
from ligermodels.kernels.launch import Launches, entries
from ligermodels.kernels.wide_attention import wide_attention
from tests.kernels import ops_table
from tests.kernels.checks import as_tuple
from tests.kernels.conftest import Place
from tests.kernels.launches import (
    Recorded,
    Recording,
    Usage,
    compile_for,
    kernels_of,
    launch_configs,
    modules,
    recorder,
    sample_of_features,
)
from tests.kernels.ops_table import CASES, Case, Inputs, differentiable, leaves, upstreams

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

ARCHES = [("nvidia", 90), ("amd", "gfx942")]
SAMPLED_ARCHES = [("nvidia", 80), ("nvidia", 100), ("amd", "gfx90a")]
# GPUs that convert to float8; the others have no products of it.
FLOAT8_TYPES = {
    "nvidia": (torch.float8_e4m3fn, torch.float8_e5m2),
    "amd": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
FLOAT8_KERNELS = ("float8_cast_kernel",)
FLOAT8_ARCHES = (90, 100, "gfx942")
KERNELS = sorted({name for module in modules() for name in kernels_of(module)})
# Every NVIDIA GPU from sm_80 on gives a block at least this much; sm_86 gives 99 KiB.
NVIDIA_SHARED = 99 * 1024
# The kernels that run on no other NVIDIA GPU, and what a block may have there.
HOPPER_KERNELS = tuple(f"wide_attention_{x}_kernel" for x in ("forward", "scores", "sums"))
HOPPER_SHARED = 227 * 1024
# Sums of 128 registers a thread leave few. The launch configs are the fastest ones, and those that
# spill nothing take longer.
HOPPER_SPILL = 264
# On GPUs with less than Hopper's shared memory, these have other launch configs.
# There, a chunk has fewer tokens.
OF_LARGE_SHARED = (
    *("gated_delta_forward_kernel", "gated_delta_backward_kernel"),
    "expert_gate_up_kernel",
)
CHUNK_OF_LARGE_SHARED = 64
STAGES_OF_LARGE_SHARED = 4  # of expert_gate_up_kernel
AMD_SHARED, MAX_THREADS = 65536, 1024
# The norms' backward kernels hold up to five arrays of a tile's size. From 8192 elements on, that
# is more than the threads' registers hold, and a little may spill to the L1 cache. In float32 it is
# more, because the launch config is the fastest one for bfloat16.
NORM_BACKWARD = "norm_backward_kernel"
# The kernels of the gated delta rule hold tiles of 64 x 128 and more. They spill most in float32,
# and on sm_80 with the launch config of larger GPUs.
GATED_DELTA_SPILL = 832
# Several options at once take a few registers too many, because the launch config is the fastest
# one for the options that models train with.
CROSS_ENTROPY_SPILL = 16
# Sixteen strides of unknown divisibility, or pointers, need more scalar registers than exist. They
# spill to vector registers, not to memory.
AMD_SCALAR_SPILL = 12
AMD_POINTER_SPILL = 20  # the gradients of the delta rule have sixteen pointers in nested loops
# The masks of several queries, each of which sees other keys, take some registers too many.
AMD_MASK_SPILL = 16
# On sm_100, those of heads of 256 with a window take two registers too many.
MASK_SPILL = 8
# Norms of rows of 33 to 64 elements, which no model has. The compiler keeps values needlessly.
AMD_SHORT_ROW_SPILL = 64


def allowed_amd_spill(launch: Recorded) -> int:
    """Return how many registers and bytes a thread may spill on AMD."""
    name = launch.kernel.__name__
    if name == "gated_delta_gradients_kernel":
        return AMD_POINTER_SPILL
    if name == "gated_delta_decode_kernel":
        return AMD_SCALAR_SPILL
    if name == "decode_attention_kernel" and launch.constants["QUERIES"] > 1:
        return AMD_MASK_SPILL
    if name == "wide_attention_scores_kernel":
        return AMD_MASK_SPILL
    short = name == "norm_forward_kernel" and launch.constants["BLOCK"] == 64
    return AMD_SHORT_ROW_SPILL if short else 0


def allowed_spill(launch: Recorded, arch: int | str) -> int:
    """Return how many bytes a thread may spill on NVIDIA."""
    if launch.kernel.__name__ == "decode_attention_kernel" and arch == 100:
        constants = launch.constants
        windowed = constants["HAS_WINDOW"] and constants["QUERIES"] > 1
        return MASK_SPILL if windowed and constants["HEAD_DIM"] == 256 else 0
    if launch.kernel.__name__ == "cross_entropy_kernel":
        given = ("log_prob_ptr" in launch.pointers, "class_weights_ptr" in launch.pointers)
        options = (launch.constants["HAS_SMOOTHING"], launch.constants["HAS_SOFTCAP"])
        several = sum((*given, *options)) > 1
        return CROSS_ENTROPY_SPILL if several else 0
    if launch.kernel.__name__ in HOPPER_KERNELS:
        return HOPPER_SPILL
    if launch.kernel.__name__.startswith("gated_delta"):
        return GATED_DELTA_SPILL
    if launch.kernel.__name__ != NORM_BACKWARD:
        return 0
    tile = launch.constants["ROWS"] * launch.constants["BLOCK"]
    if tile < 8192:
        return 0
    if launch.signature["s_ptr"] == "*fp32" and tile > 8192:
        return 448
    # LayerNorm after an addition, of rows that no model has.
    if {"mean_ptr", "grad_s_ptr"} <= launch.pointers and tile > 8192:
        return 168
    return 64


DTYPES = (torch.bfloat16, torch.float32)
LEADING = (2, 64)
CHUNK_SIZE = 64  # two chunks; more would launch the same again
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
    """Run an op on meta tensors, forward and backward through all its outputs or one of them."""
    made = leaves(case, case.inputs(LEADING, **arguments), Place("meta", dtype))
    if "chunk_size" in made:
        made["chunk_size"] = CHUNK_SIZE
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
    """Launch every case at the sizes that models have, without flags and with all flags."""
    for case in CASES.values():
        for size in case.sizes:
            for flags in ({}, *case.flags[-1:]):
                launch(case, dtype, size | flags)


def without_gradient(dtype: torch.dtype, vendor: str) -> None:
    """Launch the ops that have no gradient and therefore no case in the table."""
    for columns in (4096, 14336):
        whole = torch.empty(8, columns, dtype=torch.int8, device="meta")
        of_codes = dispatch.select("dequantize", whole)
        of_codes.dequantize_forward(whole, torch.empty(8, 1, device="meta"), None, dtype)
        codes = torch.empty(8, columns // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(8, columns // 64, dtype=torch.bfloat16, device="meta")
        dequantize(codes, scales, torch.empty(16, device="meta"), dtype)
    x = torch.empty(4096, 14336, dtype=dtype, device="meta")
    known = torch.empty(1, 1, device="meta")
    glu, norm = dispatch.select("glu", x), dispatch.select("norms", x)
    glu.glu_forward(x, "silu", known)
    glu.glu_forward(x, "silu", known, (FLOAT8_TYPES[vendor][0], known))
    glu.glu_backward(x, x[:, :7168], "silu", True, True, known)
    kept = torch.empty_like(x, dtype=FLOAT8_TYPES[vendor][0]), torch.empty(112, 4096, device="meta")
    glu.glu_forward(x, "silu", known, (kept[0].dtype, known), kept)
    glu.glu_backward(kept[0], x[:, :7168], "silu", True, True, known, scale=kept[1])
    turned = torch.empty(7168, 4096, dtype=FLOAT8_TYPES[vendor][0], device="meta"), known
    glu.glu_backward(x, x[:, :7168], "silu", False, True, known, turned)
    grad = torch.empty(14336, 4096, dtype=FLOAT8_TYPES[vendor][1], device="meta")
    operand = grad.view(4096, 14336), grad, known, known
    glu.glu_backward(x, x[:, :7168], "silu", False, True, None, turned, operand)
    glu.glu_backward(kept[0], x[:, :7168], "silu", False, True, None, turned, operand, kept[1])
    for width in (4096, 8192):
        options = NormOptions(1e-6, 0.0, "llama")
        for out, limit in ((dtype, None), (FLOAT8_TYPES[vendor][0], known)):
            norm.norm_forward(
                *(x[:, :width], x[:, :width], x[0, :width], None, options, False),
                *(out, known, limit),
            )
    step = torch.empty((), device="meta")
    dispatch.select("adamw", x).adamw(x, x, x, x, step, 1e-3, (0.9, 0.999), 1e-8, 0.01)
    with torch.no_grad():  # few rows of experts
        for hidden, inner in ((2048, 768), (60, 100)):
            down = torch.empty(128, hidden, inner, dtype=dtype, device="meta")
            gate_up = torch.empty(128, 2 * inner, hidden, dtype=dtype, device="meta")
            weights = torch.empty(16, 8, device="meta")
            rows = torch.empty(16, hidden, dtype=dtype, device="meta")
            expert_mlp(rows, gate_up, down, weights, weights.int())
    for axis in ("tensor", "rows", "columns"):
        amax = absolute_maximum(x, axis)
        for kind in FLOAT8_TYPES[vendor]:
            if axis != "columns":
                float8_cast(x, amax, kind)
            if axis != "rows":
                float8_cast(x, amax, kind, straight=axis == "tensor", transposed=True)
                float8_cast(x, amax, kind, straight=False, transposed=True)
    for kind in FLOAT8_TYPES[vendor]:  # a frozen weight
        float8_cast(grad.view(kind), known, kind, straight=False, transposed=True)
    for square in (False, True):
        float8_cast(x, None, FLOAT8_TYPES[vendor][0], square=square, transposed=True)
        float8_cast(x, None, FLOAT8_TYPES[vendor][0], square=square)
    of_experts = dispatch.select("frozen_experts", x)
    starts = torch.empty(129, dtype=torch.int32, device="meta")
    for bits, columns in ((4, 1024), (4, 1440), (8, 2048)):  # with a scale for each tile, or not
        codes = torch.empty(
            128 * 1536, columns, dtype=torch.uint8 if bits == 4 else torch.int8, device="meta"
        )
        scales = torch.empty(len(codes), columns // 32 if bits == 4 else 1, device="meta")
        weight = codes, scales, torch.empty(16, device="meta") if bits == 4 else None
        width = 2 * columns if bits == 4 else columns
        for rows in (x, x[:128]):  # few rows convert the weight in the tiles of the product
            of_experts.quantized_expert_linear(rows[:, :width], *weight, starts, True)
            of_experts.quantized_expert_linear(rows[:, :1536], *weight, starts, False)
        pairs = torch.empty(16, 8, dtype=torch.int32, device="meta")
        of_experts.quantized_expert_linear_few(x[:16, :width], *weight, pairs, 128)
    thin = torch.empty(128, 1536, 32, dtype=dtype, device="meta")
    for each in (thin, thin.mT):
        of_experts.expert_linear_add(x[:, : each.shape[2]], x[:, : each.shape[1]], each, starts)
    for key_heads, heads, dim in ((16, 32, 128), (2, 4, 16)):
        channels = (2 * key_heads + heads) * dim
        tokens = torch.empty(4, 2, channels + heads * (dim + 2), dtype=dtype, device="meta")
        of_heads = tokens[0, 0, :heads]
        weights = torch.empty(channels, 4, dtype=dtype, device="meta"), of_heads, of_heads
        memory = torch.empty(4, heads, dim, dim, device="meta")
        rows = torch.empty(4, 3, channels, dtype=dtype, device="meta")
        norm = tokens[0, 0, :dim]
        gated_delta_decode(tokens, (*weights, norm), (rows, memory), key_heads, dim)
    ends = torch.empty(2, dtype=torch.int64, device="meta")
    for head_dim, slots, queries, options in (
        (64, 8192, 1, {}),
        (64, 1024, 16, {}),
        (128, 8192, 1, {}),
        (128, 8192, 5, {}),
        (128, 16, 1, {}),
        (256, 8192, 1, {"window": 4096, "softcap": 50.0, "firsts": ends}),
        (256, 8192, 16, {"window": 1024, "softcap": 50.0, "firsts": ends}),
        (64, 8192, 1, {"sinks": torch.empty(8, dtype=dtype, device="meta")}),
        (512, 8192, 1, {}),
        (512, 1024, 5, {}),
    ):
        q = torch.empty(2, 8, queries, head_dim, dtype=dtype, device="meta")
        k = torch.empty(2, 2, slots, head_dim, dtype=dtype, device="meta")
        new = None if "window" in options and queries == 1 else (k[:, :, :queries],) * 2
        decode_attention(q, new, k, k, ends, scale=0.1, **options)


def wide_heads() -> None:
    """Launch attention with wide heads, which runs in 16 bit alone."""
    for queries, head_dim in ((1000, 512), (8192, 512), (1000, 320)):
        q = torch.empty(8, queries, 16, head_dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(8, queries, 4, head_dim, dtype=torch.bfloat16, device="meta")
        q, k = (x.transpose(1, 2).requires_grad_() for x in (q, k))
        ranges = (torch.empty(1, queries, dtype=torch.int32, device="meta"),) * 4
        ids = (torch.empty(8, queries, dtype=torch.int32, device="meta"),) * 2
        out = wide_attention(q, k, k, ranges, None if queries == 8192 else ids, scale=1.0)
        out.sum().backward()


def every_flag(dtype: torch.dtype) -> None:
    """Vary what else changes a kernel, at the size where a program holds most.

    That is which inputs need a gradient, which outputs have one, and the flags of the table.
    """
    for case in CASES.values():
        size = case.sizes[-1]
        names = differentiable(case)
        for count in range(1, len(names)):
            for frozen in combinations(names, count):
                launch(case, dtype, size, frozen=frozen)
        for flags in ({}, *case.flags):
            launch(case, dtype, size | flags)
            for used in range(8):
                launch(case, dtype, size | flags, used=used)


def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch each op once in float16, under autocast, with a wider residual, at odd lengths.

    The size is a middle one: in the longest rows, these additions do not fit into the registers.
    """
    for case in {case.op: case for case in reversed(CASES.values())}.values():
        size = case.sizes[(len(case.sizes) - 1) // 2]
        launch(case, torch.float16, size)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "autocast_dtype", lambda x: torch.bfloat16)
            launch(case, torch.float32, size)
        if "residual" in differentiable(case):
            launch(case, torch.float32, size, x_dtype=torch.bfloat16)
        (argument, usual), *_ = size.items()
        for length in ODD_LENGTHS:
            if length < usual:
                launch(case, torch.bfloat16, {argument: length})


@cache
def record(vendor: str, full: bool) -> Recording:
    """Return the launches and launch configs of every case of the table, without a GPU."""

    def meta(*shape: int, **_: float) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float64, device="meta")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
        monkeypatch.setattr(ops_table, "random", meta)
        recording = recorder(monkeypatch, vendor)
        recorded = recording.launches
        if full:
            mixed(monkeypatch)
            # torch.compile passes Python floats as float64 and gives no divisibility hints.
            recorded += [launch.as_torch_compile_passes_it() for launch in recorded]
            every_flag(torch.bfloat16)
        for dtype in DTYPES:
            every_length(dtype)
            without_gradient(dtype, vendor)
        wide_heads()
    return recording


def launches_of(kernel: str, vendor: str, full: bool) -> list[Recorded]:
    """Return the different launches of a kernel."""
    recorded = record(vendor, full).launches
    return list({x.key(): x for x in recorded if x.kernel.__name__ == kernel}.values())


def largest_launch(kernel: str, vendor: str, float8: bool) -> Recorded:
    """Return the launch whose tile is largest; among equals, the one with the most pointers.

    Without float8, it is one that writes none, and one for GPUs with less shared memory.
    """

    def size(launch: Recorded) -> tuple[int, int]:
        tile = (x for x in launch.constants.values() if type(x) is int)
        return prod(tile), len(launch.pointers)

    launches = launches_of(kernel, vendor, full=False)
    if not float8:
        launches = [x for x in launches if not any("fp8" in kind for kind in x.signature.values())]
        launches = [x for x in launches if x.constants.get("CHUNK") != CHUNK_OF_LARGE_SHARED]
        if kernel in OF_LARGE_SHARED[2:]:
            launches = [x for x in launches if x.options["num_stages"] < STAGES_OF_LARGE_SHARED]
    return max(launches, key=size)


def complaint(launch: Recorded, vendor: str, arch: int | str) -> tuple[Usage, str] | None:
    """Compile a launch and return what it uses, if that is more than is allowed."""
    if vendor == "amd":
        usage = compile_for(launch, "hip", arch, 64)
        shared, spilled = AMD_SHARED, allowed_amd_spill(launch)
    else:
        usage = compile_for(launch, "cuda", arch, 32)
        shared, spilled = NVIDIA_SHARED, allowed_spill(launch, arch)
        large = launch.kernel.__name__ in OF_LARGE_SHARED and launch.options["num_stages"] > 1
        if large or launch.kernel.__name__ in HOPPER_KERNELS:
            shared = HOPPER_SHARED
    fits = usage.threads <= MAX_THREADS and usage.shared <= shared and usage.spilled <= spilled
    return None if fits and not usage.narrow else (usage, launch.describe())


@pytest.mark.parametrize("vendor", Launches._fields)
def test_the_table_reaches_every_kernel_and_every_launch_config(vendor) -> None:
    recording = record(vendor, full=False)
    unreached = set(KERNELS) - {launch.kernel.__name__ for launch in recording.launches}
    assert not unreached, f"no case of tests/kernels/ops_table.py launches {unreached}"
    configs = {
        (name, limit)
        for name, launches in launch_configs().items()
        for limit, _ in entries(getattr(launches, vendor))
    }
    # An imported config also counts in the module that imports it, so each op needs its own.
    unreached = configs - recording.configs
    assert not unreached, f"no case of ops_table.py uses the launch configs {unreached}"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "together, vendor, arch, kernel",
    [
        *((1, *ARCHES[0], kernel) for kernel in KERNELS),
        *((1, *ARCHES[1], kernel) for kernel in KERNELS[::3]),
        *(
            pytest.param(2, *arch, kernel, marks=pytest.mark.long)
            for arch in ARCHES
            for kernel in KERNELS
        ),
    ],
)
def test_each_feature(together, vendor, arch, kernel) -> None:
    """Threads, shared memory and spills are within limits, and offsets have 64 bits."""
    # Recording every flag takes seconds for each vendor, in each process of the tests.
    chosen = sample_of_features(launches_of(kernel, vendor, together == 2), together)
    if together == 1:  # the first one holds most features, and the pairs of the long test hold all
        chosen = chosen[:1]
    found = [complaint(launch, vendor, arch) for launch in chosen]
    wrong = [str(x) for x in found if x is not None]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("vendor, arch", SAMPLED_ARCHES)
@pytest.mark.parametrize("share", [9, pytest.param(1, marks=pytest.mark.long)])
def test_the_largest_launch_of_each_kernel(share, vendor, arch) -> None:
    kernels = KERNELS[SAMPLED_ARCHES.index((vendor, arch)) % share :: share]
    if arch not in FLOAT8_ARCHES:
        kernels = [kernel for kernel in kernels if kernel not in FLOAT8_KERNELS]
    if vendor == "nvidia":
        kernels = [kernel for kernel in kernels if kernel not in HOPPER_KERNELS]
    float8 = arch in FLOAT8_ARCHES
    found = [complaint(largest_launch(kernel, vendor, float8), vendor, arch) for kernel in kernels]
    wrong = [str(x) for x in found if x is not None]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_float32_forward_of_the_delta_rule(arch) -> None:
    """Its walk over a document spills most, and by how much depends on three features at once."""
    launches = launches_of("gated_delta_forward_kernel", "nvidia", full=False)
    chosen = [x for x in launches if x.signature["k_ptr"] == "*fp32"]
    found = [complaint(launch, "nvidia", arch) for launch in chosen]
    wrong = [str(x) for x in found if x is not None]
    assert chosen and not wrong, "\n".join(wrong)
