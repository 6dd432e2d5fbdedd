"""The gated delta rule. "eager" is the chunk form in plain PyTorch, differentiated by autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.base import Case, Op, Random, peer, sizes
from ligermodels import kernels
from ligermodels.kernels.reference.gated_delta import gated_delta_forward

fla = peer("fla.ops.gated_delta_rule")
qwen = peer("transformers.models.qwen3_5.modeling_qwen3_5")


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
        out, _ = gated_delta_forward(*rows, ends, None, head_dim**-0.5)
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


OPS = {
    "gated_delta": Op(
        "Gated delta rule",
        gated_delta,
        {"batch": 1, "seq": 70, "key_heads": 1, "heads": 2, "head_dim": 16},
        sizes("batch seq key_heads heads head_dim", (1, 8192, 16, 32, 128), (8, 2048, 16, 32, 128)),
        [],
        scratch=True,
    )
}
