"""RoPE, alone and after the norm of the heads."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.base import Case, Function, Implementation, Op, Random, compiled, liger, sizes
from benchmarks.cases.norms import eager_norm
from ligermodels import kernels
from ligermodels.kernels.dispatch import select


class Rotation:
    """The angles of RoPE, and its rotation of (batch, seq, heads, head_dim), eager and Liger."""

    def __init__(self, random: Random, seq: int, head_dim: int) -> None:
        self.cos, self.sin = random.angles(seq, head_dim // 2)
        self.wide_cos, self.wide_sin = (
            torch.cat((t, t), -1).to(random.dtype) for t in (self.cos, self.sin)
        )

    def eager(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.wide_cos[:, :, None] + torch.cat((-b, a), -1) * self.wide_sin[:, :, None]

    def liger(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k in place if they are contiguous, else on copies."""
        q, k = liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), self.wide_cos, self.wide_sin)
        return q.transpose(1, 2), k.transpose(1, 2)


class _RopeInPlace(torch.autograd.Function):
    """Rotate a linear's output in place, as `kernels.norm_qkv_rope` does; v is not copied."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        qkv = qkv.detach()
        select("rope", qkv).rope_forward(qkv, cos, sin, heads, kv_heads, True)
        return kernels.split_qkv(qkv, heads, kv_heads)

    @staticmethod
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = select("rope", grad_q).rope_backward(grad_q, grad_k, grad_v, cos, sin)
        return grad, *[None] * 4


def rope(random: Random, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    rotation = Rotation(random, seq, head_dim)

    def eager(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        return rotation.eager(q), rotation.eager(k), v

    def liger_packed(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        return *rotation.liger(q, k), v

    head_pass = batch * seq * head_dim * random.dtype.itemsize
    rotated = heads + kv_heads
    return Case(
        lambda: [random.normal(batch, seq, (rotated + kv_heads) * head_dim)],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "liger": liger_packed,
            # q and k are separate and v is absent, so it moves fewer bytes.
            "liger (in place)": Implementation(
                rotation.liger,
                lambda: [random.normal(batch, seq, n, head_dim) for n in (heads, kv_heads)],
                (2 * rotated * head_pass, 4 * rotated * head_pass),
            ),
            "ligermodels": lambda qkv: kernels.rope(
                qkv, rotation.cos, rotation.sin, heads, kv_heads
            ),
            "ligermodels (in place)": lambda qkv: _RopeInPlace.apply(
                qkv, rotation.cos, rotation.sin, heads, kv_heads
            ),
        },
        # Forward reads q, k and writes them; v need not move. Backward reads dq, dk, dv and writes
        # them packed.
        (2 * rotated * head_pass, (4 * rotated + 2 * kv_heads) * head_pass),
    )


def qk_norm_rope(
    random: Random, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int
) -> Case:
    rotation = Rotation(random, seq, head_dim)

    def eager(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        return (
            rotation.eager(eager_norm(q, q_weight)),
            rotation.eager(eager_norm(k, k_weight)),
            v,
        )

    def liger_two(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        norm = liger.liger_rms_norm
        return *rotation.liger(norm(q, q_weight, 1e-6), norm(k, k_weight, 1e-6)), v

    head_pass = batch * seq * head_dim * random.dtype.itemsize
    return Case(
        lambda: [
            random.normal(batch, seq, (heads + 2 * kv_heads) * head_dim),
            random.normal(head_dim),
            random.normal(head_dim),
        ],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "liger (norm, then rope)": liger_two,
            "ligermodels": lambda qkv, q_weight, k_weight: kernels.qk_norm_rope(
                qkv, q_weight, k_weight, rotation.cos, rotation.sin, heads, kv_heads
            ),
        },
        # Forward reads q, k and writes them; backward reads q, k, dq, dk, dv and writes all three.
        (
            2 * (heads + kv_heads) * head_pass,
            (5 * (heads + kv_heads) + 2 * kv_heads) * head_pass,
        ),
    )


def _op(label: str, build: Function, *table: tuple[int, ...]) -> Op:
    names = "batch seq heads kv_heads head_dim"
    tokens = (1, 1024, 4096, 16384, 131072)
    return Op(
        label,
        build,
        dict(zip(names.split(), (1, 16, 8, 2, 64))),
        sizes(names, *table),
        sizes(names, *((1, seq, 32, 8, 128) for seq in tokens)),
    )


OPS = {
    "rope": _op("RoPE", rope, (2, 8192, 32, 8, 128)),
    "qk_norm_rope": _op(
        "q/k norm + RoPE", qk_norm_rope, (2, 8192, 32, 8, 128), (1, 8192, 8, 4, 256)
    ),
}
