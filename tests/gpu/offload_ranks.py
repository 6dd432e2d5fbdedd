"""Two processes on one GPU train under plans with host memory: the cases of test_plans_on_gpu."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.pinned_pool import MIB
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.models.base import DecoderModel
from ligermodels.models.llama import LigerLlama, LlamaConfig
from tests.parallel.ranks import Case

LAYERS, TOKENS, VOCAB = 6, 512, 512
STEPS, EARLY = 12, 4  # memory is compared after the step EARLY and after the last one
PLENTY, LITTLE = 512 * MIB, 8 * MIB
DEVICE = "cuda"
MIXED = MemoryPlan.of(
    [LayerPlan(policy, host=True) for policy in POLICIES] + [LayerPlan("no_gate_up"), LayerPlan()]
)


def make() -> DecoderModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
    )
    return LigerLlama(config).to(DEVICE)


def rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCAB, (2, TOKENS), generator=generator).to(DEVICE)


def update(model: DecoderModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad


def expected(model: DecoderModel, ranks: int) -> list[Tensor]:
    """Train in one process without a plan on the mean of the ranks' gradients.

    Returns: the last gradients, and the parameters after it.
    """
    for step in range(STEPS):
        total: list[Tensor] = []
        for rank in range(ranks):
            model.zero_grad()
            ids = rows(step, rank)
            model(ids, labels=ids).loss.backward()
            grads = [parameter.grad / ranks for parameter in model.parameters()]
            total = [a + b for a, b in zip(total, grads)] if total else grads
        for parameter, grad in zip(model.parameters(), total):
            parameter.grad = grad
        update(model)
    return [*total, *(parameter.detach() for parameter in model.parameters())]


def memory(model: DecoderModel) -> list[Any]:
    """Return the bytes of this process: pinned, and on the GPU."""
    torch.cuda.synchronize()
    (offloader,) = model._offloaders.values()
    host = torch.cuda.host_memory_stats()
    return [
        offloader.stats(),
        torch.cuda.memory_reserved(),
        torch.cuda.memory_allocated(),
        host["allocated_bytes.current"],
        host["allocations.current"],
    ]


def trained(
    rank: int, folder: Path, *, ranks: int, plan: MemoryPlan, budgets: tuple[int, ...]
) -> dict[str, float]:
    """Return how many numbers differ from those of one process, and what memory did."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make()
    with sdpa_kernel(SDPBackend.MATH):  # the others add in an order that varies
        wanted = expected(copy.deepcopy(model), ranks)
        budget = budgets[rank]
        model.set_memory_plan(MemoryPlan(plan.layers, host_budget=budget))
        # One bucket, so that gloo needs the same pinned memory in each step.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
        found = []
        for step in range(STEPS):
            wrapped.zero_grad()
            ids = rows(step, rank)
            wrapped(ids, labels=ids).loss.backward()
            update(model)
            if step + 1 in (EARLY, STEPS):
                found.append(memory(model))
    grads = [parameter.grad for parameter in model.parameters()]
    parts = [*grads, *model.parameters()]
    assert len(parts) == len(wanted)
    stats = found[0][0]
    assert 0 < stats.peak <= stats.pinned <= budget and stats.in_use == 0, stats
    # A rank whose part is too small leaves the rest on the GPU; the other ranks do not notice.
    assert (stats.refused > 0) == (budget == LITTLE), stats
    return {
        "gradients and parameters": float(
            sum(int((a != b).sum()) for a, b in zip(parts, wanted, strict=True))
        ),
        "memory": float(found[0] != found[1]),
    }


def cases(ranks: int) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, plan in (
        *((policy, MemoryPlan.uniform(LAYERS, policy, host=True)) for policy in POLICIES),
        ("mixed", MIXED),
    ):
        found[name] = partial(trained, ranks=ranks, plan=plan, budgets=(PLENTY,) * ranks)
    uneven = (PLENTY, *(LITTLE,) * (ranks - 1))
    found["uneven parts"] = partial(trained, ranks=ranks, plan=MIXED, budgets=uneven)
    return found
