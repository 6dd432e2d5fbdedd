"""The layer of experts: a router's logits to the sum over each token's experts.

Its floor is the time of three products of a dense linear with as many rows and weights. "eager" is
a sort and torch's grouped products.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.base import Case, Op, Random, peer, sizes
from ligermodels import kernels
from ligermodels.kernels.checks import ClampedSwiGLU

liger_moe = peer("liger_kernel.ops.fused_moe")
hf_moe = peer("transformers.integrations.moe")


def expert_mlp(
    random: Random,
    rows: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    skewed: bool,
    biased: bool,
) -> Case:
    """Return the case; biased experts have the activation of gpt-oss.

    With skewed routes, one expert gets a fifth of all rows, or, where a token has more than five
    experts, a row of each token.
    """
    clamped = ClampedSwiGLU()

    def start() -> list[Tensor]:
        logits = random.normal(rows, experts)
        if skewed:
            often = torch.rand(rows, device=random.device, generator=random.generator)
            with torch.no_grad():
                logits[:, 0] += 100 * ((often < 0.2 * top_k).to(logits.dtype) - 0.5)
        return [
            random.normal(rows, hidden),
            random.normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
            random.normal(experts, hidden, inner, scale=inner**-0.5),
            logits,
            *([random.normal(experts, 2 * inner), random.normal(experts, hidden)] * biased),
        ]

    def activated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if not biased:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
        return gate * torch.sigmoid(clamped.alpha * gate) * (up + 1)

    def chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = logits.softmax(-1, torch.float32).topk(top_k)
        return weights / weights.sum(-1, keepdim=True), index

    def eager(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, *biases: Tensor) -> Tensor:
        weights, index = chosen(logits)
        order = index.flatten().argsort(stable=True)
        token = order // top_k
        ends = torch.bincount(index.flatten(), minlength=experts).cumsum(0, dtype=torch.int32)
        owner = index.flatten()[order]
        made = F.grouped_mm(x[token], gate_up.mT, offs=ends)
        made = activated(made + biases[0][owner] if biases else made)
        y = F.grouped_mm(made, down.mT, offs=ends)
        y = y + biases[1][owner] if biases else y
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y)

    def transformers(
        x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, *biases: Tensor
    ) -> Tensor:
        weights, index = chosen(logits)
        layer = SimpleNamespace(
            gate_up_proj=gate_up,
            down_proj=down,
            num_experts=experts,
            has_gate=True,
            has_bias=biased,
            is_transposed=False,
            act_fn=F.silu,
            has_post_expert_norm=False,
            _is_expert_parallel=False,
            _apply_gate=activated,
        )
        if biases:
            layer.gate_up_proj_bias, layer.down_proj_bias = biases
        return hf_moe.grouped_mm_experts_forward(layer, x, index, weights.to(x.dtype))

    def liger(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor) -> Tensor:
        weights, index = chosen(logits)
        return liger_moe.LigerFusedMoEFunction.apply(x, gate_up, down, index, weights.to(x.dtype))

    def ours(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, *biases: Tensor) -> Tensor:
        weights, index = kernels.routing(logits, top_k, normalize=True)
        options = dict(zip(("gate_up_bias", "down_bias"), biases))
        activation = clamped if biased else "silu"
        return kernels.expert_mlp(x, gate_up, down, weights, index, activation, **options)

    peers = {"eager": eager, "transformers": transformers}
    # Liger's does not end within minutes at Mixtral's sizes, and has no biases.
    if experts > 8 and not biased:
        peers["liger"] = liger
    return Case(start, peers | {"ligermodels": ours}, products=(rows * top_k, hidden, 3 * inner))


OPS = {
    "expert_mlp": Op(
        "Experts with routing",
        expert_mlp,
        {"rows": 16, "hidden": 128, "inner": 64, "experts": 16, "top_k": 2}
        | {"skewed": False, "biased": False},
        sizes(
            "rows hidden inner experts top_k skewed biased",
            (8192, 2048, 768, 128, 8, False, False),
            (8192, 2048, 768, 128, 8, True, False),
            (32768, 2048, 768, 128, 8, False, False),
            (32768, 2048, 768, 128, 8, True, False),
            (8192, 4096, 14336, 8, 2, False, False),
            (8192, 4096, 14336, 8, 2, True, False),
            (8192, 2880, 2880, 32, 4, False, True),
            (8192, 2880, 2880, 32, 4, True, True),
        ),
        [],
        scratch=True,
    )
}
