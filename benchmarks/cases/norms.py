"""RMSNorm and LayerNorm, alone and after the residual add."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.base import Case, Function, Op, Random, compiled, liger, sizes
from ligermodels import kernels


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_norm(random: Random, rows: int, width: int) -> Case:
    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, width), random.normal(width)],
        {
            "eager": eager_norm,
            "F.rms_norm": lambda x, w: F.rms_norm(x, (width,), w, 1e-6),
            "torch.compile": compiled(eager_norm),
            "liger": lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False),
            "liger (in place)": lambda x, w: liger.liger_rms_norm(x, w, 1e-6),
            "ligermodels": lambda x, w: kernels.rms_norm(x, w, 1e-6),
        },
        # Forward reads x and writes y; backward reads x and dy and writes dx.
        (2 * one_pass, 5 * one_pass),
    )


def add_rms_norm(random: Random, rows: int, width: int) -> Case:
    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager_norm(total, weight), total

    def add_then_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (width,), weight, 1e-6), total

    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, width), random.normal(rows, width), random.normal(width)],
        {
            "eager": eager,
            "F.rms_norm": add_then_norm,
            "torch.compile": compiled(eager),
            "liger": lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6, in_place=False),
            "liger (in place)": lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6),
            "ligermodels": lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-6),
        },
        # Forward reads x, residual and writes y, sum; backward reads sum, dy, dsum and writes one
        # gradient, which is the gradient of both inputs.
        (4 * one_pass, 8 * one_pass),
    )


def layer_norm(random: Random, rows: int, width: int) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, 1e-5)

    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, width), random.normal(width), random.normal(width)],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "liger": lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5),
            "ligermodels": lambda x, w, b: kernels.layer_norm(x, w, b, 1e-5),
        },
        (2 * one_pass, 5 * one_pass),
    )


def add_layer_norm(random: Random, rows: int, width: int) -> Case:
    def eager(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.layer_norm(total, (width,), w, b, 1e-5), total

    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [
            random.normal(rows, width),
            random.normal(rows, width),
            random.normal(width),
            random.normal(width),
        ],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "ligermodels": lambda x, r, w, b: kernels.add_layer_norm(x, r, w, b, 1e-5),
        },
        (4 * one_pass, 8 * one_pass),
    )


def _op(label: str, build: Function, table: list[int]) -> Op:
    widths = [width for width in (576, 2048, 4096, 8192, 16384) if width not in table]
    rows = (1, 256, 131072)
    return Op(
        label,
        build,
        {"rows": 16, "width": 1024},
        sizes("rows width", *((16384, width) for width in table)),
        sizes("rows width", *((16384, w) for w in widths), *((n, 4096) for n in rows)),
    )


OPS = {
    "rms_norm": _op("RMSNorm", rms_norm, [2048, 4096, 8192]),
    "add_rms_norm": _op("add + RMSNorm", add_rms_norm, [4096]),
    "layer_norm": _op("LayerNorm", layer_norm, [4096]),
    "add_layer_norm": _op("add + LayerNorm", add_layer_norm, [4096]),
}
