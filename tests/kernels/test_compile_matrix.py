"""Every kernel, every flag that is used and every launch of the tables, compiled for the GPUs.

No GPU takes part: the launchers run on meta tensors, what they would launch is recorded, and
Triton compiles it for sm_80, sm_90, sm_100, gfx942 and gfx90a.
"""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from ligermodels.kernels.checks import ACTIVATIONS
from ligermodels.kernels.launch import Launches
from ligermodels.kernels.loss_options import CrossEntropyOptions, StatsScale, TokenStats
from tests.kernels.launches import (
    Recorded,
    Recording,
    compile_for,
    kernels_of,
    launch_configs,
    modules,
    recorder,
)

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


def is_without_divisibility(launch: Recorded) -> bool:
    """Whether this is qk_norm_rope's backward as torch.compile passes it."""
    return launch.kernel.__name__ == "qk_norm_rope_backward_kernel" and not launch.attributes


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


WIDTHS = (576, 1024, 2048, 2304, 3072, 3584, 4096, 5120, 8192, 16384)
VOCABS = (2048, 32000, 128256, 151936, 256000, 262208)
PASSES = ("loss", "gradient", "both")
ROWS = 64


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm_forward(
    width: int, dtype: torch.dtype, out: torch.dtype, residual: bool, casting_mode: str
):
    from ligermodels.kernels.triton.rms_norm import rms_norm_forward

    x, weight = meta(ROWS, width, dtype=dtype), meta(width, dtype=dtype)
    rms_norm_forward(x, x if residual else None, weight, 1e-6, 0.0, casting_mode, out)


def norm_backward(
    width: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    flags: tuple[bool, bool, bool],
    casting_mode: str,
):
    from ligermodels.kernels.triton.rms_norm import rms_norm_backward

    has_grad_s, want_weight, want_y = flags
    s, weight = meta(ROWS, width, dtype=dtype), meta(width, dtype=dtype)
    grad_y, rstd = meta(ROWS, width, dtype=grad_dtype), meta(ROWS, dtype=torch.float32)
    grad_s = s if has_grad_s else None
    rms_norm_backward(grad_y, grad_s, s, weight, rstd, 0.0, casting_mode, want_weight, want_y)


def layer_norm(
    width: int,
    dtype: torch.dtype,
    flags: tuple[bool, bool, bool] = (True, True, True),
    out: torch.dtype | None = None,
):
    from ligermodels.kernels.triton.layer_norm import layer_norm_backward, layer_norm_forward

    has_residual, has_weight, has_bias = flags
    s, row = meta(ROWS, width, dtype=dtype), meta(ROWS, dtype=torch.float32)
    x = s if out is None else meta(ROWS, width, dtype=out)
    weight = meta(width, dtype=dtype) if has_weight else None
    bias = meta(width, dtype=dtype) if has_bias else None
    residual = s if has_residual else None
    layer_norm_forward(x, residual, weight, bias, 1e-5)
    grads = [dtype if wanted else None for wanted in (has_weight, has_bias)]
    layer_norm_backward(x, residual, s, weight, row, row, *grads)


def rope(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, in_place: bool):
    from ligermodels.kernels.rope import split_qkv
    from ligermodels.kernels.triton.rope import rope_backward, rope_forward

    packed = meta(2, ROWS, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos = meta(1, ROWS, head_dim // 2, dtype=torch.float32)
    rope_forward(packed, cos, cos, heads, kv_heads, in_place)
    rope_backward(*split_qkv(packed, heads, kv_heads), cos, cos)


def qk_norm_rope(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    casting_mode: str = "llama",
    want_weights: bool = True,
):
    from ligermodels.kernels.rope import split_qkv
    from ligermodels.kernels.triton.qk_norm_rope import qk_norm_rope_backward, qk_norm_rope_forward

    packed = meta(2, ROWS, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos = meta(1, ROWS, head_dim // 2, dtype=torch.float32)
    weight = meta(head_dim, dtype=dtype)
    q, k, v = split_qkv(packed, heads, kv_heads)
    angles = (weight, weight, cos, cos)
    qk_norm_rope_forward(q, k, *angles, 1e-6, 0.0, casting_mode)
    qk_norm_rope_backward(q, k, v, q, k, *angles, 1e-6, 0.0, casting_mode, want_weights)


def glu(width: int, dtype: torch.dtype):
    from ligermodels.kernels.triton.glu import glu_backward, glu_forward

    gate_up, grad = meta(ROWS, 2 * width, dtype=dtype), meta(ROWS, width, dtype=dtype)
    for activation in ACTIVATIONS:
        glu_forward(gate_up, activation)
        for want_out in (False, True):
            glu_backward(gate_up, grad, activation, want_out)


def cross_entropy(
    vocab: int,
    dtype: torch.dtype,
    passes: str,
    features: tuple[bool, bool, bool] = (True, True, True),
    stats: bool = True,
):
    from ligermodels.kernels.triton.cross_entropy import cross_entropy_rows

    weights, smoothing, softcap = features
    options = CrossEntropyOptions(
        label_smoothing=0.1 if smoothing else 0.0, softcap=30.0 if softcap else None
    )
    row = meta(ROWS, dtype=torch.float32)
    logits, again = meta(ROWS, vocab, dtype=dtype), passes == "gradient"
    cross_entropy_rows(
        logits,
        meta(ROWS, dtype=torch.int64),
        None if passes == "loss" else row,
        row if again else None,
        meta(vocab, dtype=torch.float32) if weights else None,
        options,
        True,
        stats=TokenStats.empty(ROWS, logits) if stats and not again else None,
        stats_scale=StatsScale(row, row, row) if stats and again else None,
    )


def token_gradient(dtype: torch.dtype, log_probs: bool, entropy: bool) -> None:
    """The gradient for upstream gradients of statistics alone: the loss has one zero for all."""
    from ligermodels.kernels.triton.cross_entropy import cross_entropy_rows

    row = meta(ROWS, dtype=torch.float32)
    cross_entropy_rows(
        meta(ROWS, 32000, dtype=dtype),
        meta(ROWS, dtype=torch.int64),
        meta(1, dtype=torch.float32),
        row,
        None,
        CrossEntropyOptions(),
        True,
        stats_scale=StatsScale(row if log_probs else None, row if entropy else None, row),
    )


def every_flag(dtype: torch.dtype) -> None:
    """All combinations of flags, at the length where a program holds most."""
    for residual, casting_mode in product((False, True), ("llama", "gemma")):
        norm_forward(16384, dtype, dtype, residual, casting_mode)
    for *flags, casting_mode in product(*[(False, True)] * 3, ("llama", "gemma")):
        norm_backward(16384, dtype, dtype, tuple(flags), casting_mode)
    for flags in product((False, True), repeat=3):
        layer_norm(16384, dtype, flags)
    for passes in PASSES:
        for features in product((False, True), repeat=3):
            cross_entropy(32000, dtype, passes, features, stats=False)
        cross_entropy(32000, dtype, passes, (False, False, False), stats=True)
    for upstream in product((False, True), repeat=2):
        token_gradient(dtype, *upstream)
    for in_place in (False, True):
        rope(32, 8, 128, dtype, in_place)
    for casting_mode, want_weights in product(("llama", "gemma"), (False, True)):
        qk_norm_rope(32, 8, 128, dtype, casting_mode, want_weights)
    glu(14336, dtype)
    for flags in product((False, True), repeat=2):
        mean_loss(*flags)


def scaled(dtype: torch.dtype, out: torch.dtype) -> None:
    from ligermodels.kernels.triton.scaled import scaled as launch_scaled

    launch_scaled(meta(ROWS, 4096, dtype=dtype), meta(dtype=torch.float32), out)


def mean_loss(class_weights: bool, divisor: bool) -> None:
    from ligermodels.kernels.triton.mean_loss import mean_loss as launch_mean_loss

    row, targets = meta(ROWS, dtype=torch.float32), meta(ROWS, dtype=torch.int64)
    weights = meta(1000) if class_weights else None
    launch_mean_loss(row, row, meta(dtype=row.dtype) if divisor else None, targets, weights)


def every_length(dtype: torch.dtype) -> None:
    """All launches of the tables at real sizes, with the flags that hold most."""
    for width in WIDTHS:
        norm_forward(width, dtype, dtype, True, "llama")
        for residual in (False, True):
            norm_backward(width, dtype, dtype, (residual, True, True), "llama")
            layer_norm(width, dtype, (residual, True, True))
    for vocab in VOCABS:
        for passes in PASSES:
            cross_entropy(vocab, dtype, passes)
        for passes in ("loss", "both"):
            cross_entropy(vocab, dtype, passes, (False, False, False), stats=False)
    for heads, kv_heads, head_dim in ((9, 3, 64), (32, 8, 64), (8, 4, 256), (64, 8, 128)):
        rope(heads, kv_heads, head_dim, dtype, False)
    for heads, kv_heads, head_dim in ((4, 1, 256), (16, 8, 128), (32, 16, 128), (9, 3, 64)):
        qk_norm_rope(heads, kv_heads, head_dim, dtype)
    for width in (1536, 8192, 28672):
        glu(width, dtype)
    mean_loss(True, False)
    for out in {dtype, torch.bfloat16}:
        scaled(dtype, out)


def mixed() -> None:
    """What autocast and float32 weights make: float32 in, bfloat16 out; float16; odd lengths."""
    norm_forward(4096, torch.float16, torch.float16, True, "llama")
    norm_backward(4096, torch.float16, torch.float16, (True, True, True), "llama")
    layer_norm(4096, torch.float16)
    rope(32, 8, 128, torch.float16, False)
    qk_norm_rope(32, 8, 128, torch.float16)
    glu(14336, torch.float16)
    cross_entropy(128256, torch.float16, "both")
    scaled(torch.float32, torch.float16)
    scaled(torch.float16, torch.float16)
    norm_forward(4096, torch.float32, torch.bfloat16, True, "llama")
    norm_backward(4096, torch.float32, torch.bfloat16, (True, True, True), "llama")
    layer_norm(4096, torch.float32, out=torch.bfloat16)
    for length in (1, 33, 1000):
        norm_forward(length, torch.bfloat16, torch.bfloat16, True, "llama")
        norm_backward(length, torch.bfloat16, torch.bfloat16, (True, True, True), "llama")
        layer_norm(length, torch.bfloat16)
        cross_entropy(length, torch.bfloat16, "both")
    rope(1, 1, 2, torch.bfloat16, False)
    for head_dim in (2, 20):
        qk_norm_rope(3, 1, head_dim, torch.bfloat16)
    glu(1, torch.bfloat16)
    glu(100, torch.float32)


def record(monkeypatch: pytest.MonkeyPatch, vendor: str, full: bool) -> Recording:
    recording = recorder(monkeypatch, vendor)
    recorded = recording.launches
    if full:
        mixed()
        # torch.compile passes Python floats as float64 and leaves divisibility out.
        recorded += [launch.as_torch_compile_passes_it() for launch in recorded]
        every_flag(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        every_length(dtype)
    return recording


def launches(monkeypatch: pytest.MonkeyPatch, vendor: str, full: bool) -> list[Recorded]:
    recorded = record(monkeypatch, vendor, full).launches
    return list({launch.key(): launch for launch in recorded}.values())


@pytest.mark.parametrize("vendor", Launches._fields)
@pytest.mark.parametrize("full", [False, True])
def test_every_kernel_and_every_launch_config_is_compiled(monkeypatch, vendor, full) -> None:
    kernels = {name for module in modules() for name in kernels_of(module)}
    recording = record(monkeypatch, vendor, full)
    assert {launch.kernel.__name__ for launch in recording.launches} == kernels
    assert recording.configs == {
        (name, limit)
        for name, launches in launch_configs().items()
        for limit, _ in getattr(launches, vendor)
    }


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("arch", AMD_ARCHES)
def test_amd(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    wrong = []
    for launch in launches(monkeypatch, "amd", full=arch == "gfx942"):
        usage = compile_for(launch, "hip", arch, 64)
        may_spill = AMD_SCALAR_SPILL if is_without_divisibility(launch) else 0
        if usage.threads > AMD_THREADS or usage.shared > AMD_SHARED or usage.spilled > may_spill:
            wrong.append((usage, launch.describe()))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
@pytest.mark.parametrize("arch", NVIDIA_ARCHES)
def test_nvidia(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    wrong = []
    for launch in launches(monkeypatch, "nvidia", full=arch == 90):
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
