"""The gated delta rule. "eager" is the chunk form in plain PyTorch, differentiated by autograd."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.base import Case, Op, Random, compiled, peer, sizes
from ligermodels import kernels
from ligermodels.kernels.checks import DeltaRule
from ligermodels.kernels.reference.gated_delta import gated_delta_forward

sys.modules["fla"] = None  # type: ignore[assignment]  # transformers would take its functions
qwen = peer("transformers.models.qwen3_5.modeling_qwen3_5")
del sys.modules["fla"]
fla = peer("fla.ops.gated_delta_rule")


def gated_delta(
    random: Random, batch: int, seq: int, key_heads: int, heads: int, head_dim: int
) -> Case:
    def start() -> list[Tensor]:
        keys = [random.normal(batch, seq, key_heads, head_dim) for _ in "qk"]
        keys = [F.normalize(x.detach(), dim=-1).requires_grad_() for x in keys]
        v = random.normal(batch, seq, heads, head_dim)
        g, beta = (random.normal(batch, seq, heads, dtype=torch.float32) for _ in "gb")
        beta = beta.detach().sigmoid().to(v.dtype).requires_grad_()
        return [*keys, v, (F.softplus(g.detach() - 3) * -2).requires_grad_(), beta]

    def wide(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return *(x.repeat_interleave(heads // key_heads, 2) for x in (q, k)), *rest

    def eager(*inputs: Tensor) -> Tensor:
        rows = [x.flatten(0, 1) for x in inputs]
        ends = torch.arange(batch + 1, device=rows[0].device) * seq
        out, _ = gated_delta_forward(DeltaRule(*rows, ends, None), head_dim**-0.5)
        return out.view(batch, seq, heads, head_dim)

    def transformers(*inputs: Tensor) -> Tensor:
        return qwen.torch_chunk_gated_delta_rule(*wide(*inputs))[0]

    size = batch * seq * random.dtype.itemsize * head_dim
    q, v = size * key_heads, size * heads
    return Case(
        start,
        {
            "eager": eager,
            "transformers": transformers,
            "fla": lambda *inputs: fla.chunk_gated_delta_rule(*inputs)[0],
            "ligermodels": lambda *inputs: kernels.gated_delta(*inputs)[0],
        },
        # Forward reads q, k, v and writes the output. Backward reads them and its gradient, and
        # writes three gradients.
        (2 * q + 2 * v, 6 * q + 5 * v),
    )


def gated_delta_layer(
    random: Random, batch: int, seq: int, key_heads: int, heads: int, head_dim: int
) -> Case:
    keys, channels = key_heads * head_dim, (2 * key_heads + heads) * head_dim
    rule = gated_delta(random, batch, seq, key_heads, heads, head_dim)

    def eager(qkv: Tensor, b: Tensor, a: Tensor, weight: Tensor, *gates: Tensor) -> Tensor:
        x = F.conv1d(qkv.mT, weight[:, None], padding=3, groups=channels)[..., :seq].mT.contiguous()
        q, k, v = F.silu(x).split((keys, keys, channels - 2 * keys), -1)
        q, k = (x.unflatten(-1, (key_heads, head_dim)).float() for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        g = -gates[0].float().exp() * F.softplus(a.float() + gates[1])
        v = v.unflatten(-1, (heads, head_dim))
        run = rule.implementation("eager").function
        return run(q.to(v.dtype), k.to(v.dtype), v, g, b.sigmoid())  # type: ignore[no-any-return]

    def ours(*inputs: Tensor) -> Tensor:
        return kernels.gated_delta_layer(*inputs, key_heads, head_dim)[0]

    size = batch * seq * random.dtype.itemsize * head_dim
    made, values = size * (2 * key_heads + heads), size * heads
    shapes = (batch, seq, channels), *[(batch, seq, heads)] * 2, (channels, 4), *[(heads,)] * 2
    return Case(
        lambda: [random.normal(*shape) for shape in shapes],
        {"eager": eager, "ligermodels": ours},
        # Forward reads the channels and writes the output. Backward reads both and writes one.
        (made + values, 3 * made + 2 * values),
    )


def output_gate(random: Random, rows: int, heads: int, head_dim: int, normed: bool) -> Case:
    def eager(x: Tensor, gate: Tensor, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            return x * gate.sigmoid()
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (weight * wide.to(x.dtype) * F.silu(gate.float())).to(x.dtype)

    def ours(*inputs: Tensor) -> Tensor:
        return kernels.output_gate(*inputs, activation="silu" if normed else "sigmoid")

    one_pass = rows * heads * head_dim * random.dtype.itemsize
    weights = [head_dim] if normed else []
    return Case(
        lambda: [
            *(random.normal(1, rows, heads, head_dim) for _ in range(2)),
            *(random.normal(width) for width in weights),
        ],
        {"eager": eager, "torch.compile": compiled(eager), "ligermodels": ours},
        # Forward reads x and the gate and writes y; backward reads three and writes two.
        (3 * one_pass, 8 * one_pass),
    )


def gate_linear(random: Random, rows: int, heads: int, head_dim: int, out: int) -> Case:
    def eager(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return F.linear((x * gate.sigmoid()).flatten(-2), weight)

    return Case(
        lambda: [
            *(random.normal(1, rows, heads, head_dim) for _ in range(2)),
            random.normal(out, heads * head_dim, scale=(heads * head_dim) ** -0.5),
        ],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "ligermodels": lambda x, gate, weight: kernels.gate_linear(x, gate, None, weight),
        },
        products=(rows, heads * head_dim, out),
    )


SIZES = sizes("batch seq key_heads heads head_dim", (1, 8192, 16, 32, 128), (8, 2048, 16, 32, 128))
SMALL = {"batch": 1, "seq": 70, "key_heads": 1, "heads": 2, "head_dim": 16}
OPS = {
    "gated_delta": Op("Gated delta rule", gated_delta, SMALL, SIZES, [], scratch=True),
    "gated_delta_layer": Op("Its layer", gated_delta_layer, SMALL, SIZES, []),
    "output_gate": Op(
        "Gate of heads",
        output_gate,
        {"rows": 40, "heads": 2, "head_dim": 16, "normed": True},
        sizes("rows heads head_dim normed", (8192, 32, 128, True), (8192, 16, 256, False)),
        [],
    ),
    "gate_linear": Op(
        "Gate and linear",
        gate_linear,
        {"rows": 40, "heads": 2, "head_dim": 16, "out": 24},
        sizes("rows heads head_dim out", (8192, 16, 256, 4096)),
        [],
    ),
}
