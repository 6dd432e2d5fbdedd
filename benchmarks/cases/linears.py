"""Linears that are fused with the op before them, at the shapes of a decoder block.

Their floor is the time of the matrix products alone.
"""

import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.base import Case, Implementation, Op, Random, compiled, liger, sizes
from benchmarks.cases.norms import eager_norm
from benchmarks.cases.ropes import Rotation
from ligermodels import kernels


def _liger_norm(x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    return liger.liger_fused_add_rms_norm(x, residual, norm, 1e-6)


def norm_linear(random: Random, rows: int, width: int, out: int) -> Case:
    def eager(x: Tensor, residual: Tensor, norm: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.linear(eager_norm(total, norm), weight), total

    def liger_two(
        x: Tensor, residual: Tensor, norm: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, total = _liger_norm(x, residual, norm)
        return F.linear(y, weight), total

    return Case(
        lambda: [
            random.normal(rows, width),
            random.normal(rows, width),
            random.normal(width),
            random.normal(out, width, scale=width**-0.5),
        ],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "liger (in place)": liger_two,
            "ligermodels": kernels.norm_linear,
        },
        products=(rows, width, out),
    )


def norm_qkv_rope(
    random: Random,
    batch: int,
    seq: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> Case:
    rotation = Rotation(random, seq, head_dim)
    all_heads = heads + 2 * kv_heads

    def start() -> list[Tensor]:
        shape = (batch, seq, width)
        return [random.normal(*shape), random.normal(*shape), random.normal(width)]

    def weight(count: int) -> Tensor:
        return random.normal(count * head_dim, width, scale=width**-0.5)

    def eager(x: Tensor, residual: Tensor, norm: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        qkv = F.linear(eager_norm(total, norm), packed)
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        return rotation.eager(q), rotation.eager(k), v, total

    def liger_separate(
        x: Tensor, residual: Tensor, norm: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        y, total = _liger_norm(x, residual, norm)
        q, k, v = (F.linear(y, w).view(batch, seq, -1, head_dim) for w in weights)
        return *rotation.liger(q, k), v, total

    return Case(
        lambda: [*start(), weight(all_heads)],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            # There are three linears, as in transformers, so q and k are contiguous and are rotated
            # in place.
            "liger (in place)": Implementation(
                liger_separate, lambda: [*start(), *map(weight, (heads, kv_heads, kv_heads))]
            ),
            "ligermodels": lambda x, residual, norm, packed: kernels.norm_qkv_rope(
                x, residual, norm, packed, None, rotation.cos, rotation.sin, heads, kv_heads
            ),
        },
        products=(batch * seq, width, all_heads * head_dim),
    )


def glu_linear(random: Random, rows: int, width: int, out: int) -> Case:
    def eager(gate_up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.linear(F.silu(gate) * up, weight)

    def liger_glu(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return F.linear(liger.liger_swiglu(gate, up), weight)

    def weight() -> Tensor:
        return random.normal(out, width, scale=width**-0.5)

    return Case(
        lambda: [random.normal(rows, 2 * width), weight()],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "liger": lambda gate_up, w: liger_glu(*gate_up.chunk(2, -1), w),
            "liger (in place)": Implementation(
                liger_glu,
                lambda: [random.normal(rows, width), random.normal(rows, width), weight()],
            ),
            "ligermodels": kernels.glu_linear,
        },
        products=(rows, width, out),
    )


_QKV = "batch seq width heads kv_heads head_dim"

OPS = {
    "norm_linear": Op(
        "add + RMSNorm + linear",
        norm_linear,
        {"rows": 16, "width": 256, "out": 1024},
        sizes("rows width out", (8192, 4096, 28672)),
        sizes("rows width out", *((rows, 4096, 28672) for rows in (1, 1024, 131072))),
        rounds=4,
        scratch=True,
    ),
    "norm_qkv_rope": Op(
        "add + RMSNorm + qkv + RoPE",
        norm_qkv_rope,
        dict(zip(_QKV.split(), (1, 16, 256, 8, 2, 64))),
        sizes(_QKV, (1, 8192, 4096, 32, 8, 128)),
        sizes(_QKV, *((1, seq, 4096, 32, 8, 128) for seq in (1, 1024, 131072))),
        rounds=4,
        scratch=True,
    ),
    "glu_linear": Op(
        "SwiGLU + linear",
        glu_linear,
        {"rows": 16, "width": 1024, "out": 256},
        sizes("rows width out", (8192, 14336, 4096)),
        sizes("rows width out", *((rows, 14336, 4096) for rows in (1, 1024, 131072))),
        rounds=4,
        scratch=True,
    ),
}
