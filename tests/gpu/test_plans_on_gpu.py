"""Memory plans on a GPU change no bit of a gradient where attention is deterministic.

    python -m tests.gpu.test_plans_on_gpu FAMILY...

It prints a JSON object: for each family, plan -> the parameters whose gradients differ in any bit
from those of no plan. The test starts it as a process of its own, because cuBLAS must be told
before its first product, and because torch fills all memory that it allocates with NaN meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from tests.families import DECODERS

LAYERS, ROWS, SEQ, VOCAB = 6, 2, 1024, 512
HOST = 2**30
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": None,
    "max_position_embeddings": SEQ,
}


def make(family: str, device: str) -> DecoderModel:
    torch.manual_seed(0)
    cls = families()[family]
    own = DECODERS[family]
    sizes = SIZES if own.takes_head_dim else {k: v for k, v in SIZES.items() if k != "head_dim"}
    return cls(cls.config_class(**{**sizes, **own.gpu})).to(device, torch.bfloat16)


def plans() -> dict[str, MemoryPlan]:
    """Return every policy with and without host memory, and one plan of all of them."""
    pairs = [(policy, host) for policy in POLICIES for host in (False, True)]
    found = {
        f"{policy}{', host' * host}": MemoryPlan.uniform(
            LAYERS, LayerPlan(policy, host), host_budget=HOST
        )
        for policy, host in pairs
    }
    layers = (LayerPlan(*pairs[(3 * i) % len(pairs)]) for i in range(LAYERS))
    return found | {"mixed": MemoryPlan(tuple(layers), host_budget=HOST)}


def gradients(model: DecoderModel, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    return {name: grad for name, grad in grads.items() if grad is not None}


def differing(family: str, device: str) -> dict[str, list[str]]:
    """Return the names of the gradients that each plan changes."""
    model = make(family, device)
    ids = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(1)).to(device)
    expected = gradients(model, ids)
    found: dict[str, list[str]] = {}
    for name, plan in {"no plan": None, **plans()}.items():
        model.set_memory_plan(plan)
        grads = gradients(model, ids)
        found[name] = [key for key in expected if not torch.equal(grads[key], expected[key])]
        if plan is not None and plan.uses_host:
            (offloader,) = model._offloaders.values()
            stats = offloader.stats()
            assert stats.in_use == 0 < stats.peak and stats.refused == 0, stats
    return found


# Whole rows, a window, capped scores: FlashAttention 2, varlen_attn, FlexAttention; and experts.
FAMILIES = ("llama", "mistral", "gemma2", "qwen3_moe")


@pytest.mark.gpu
def test_plans_change_no_bit_where_attention_is_deterministic() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_plans_on_gpu", *FAMILIES],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found = json.loads(line.removeprefix("RESULT"))
    same: dict[str, list[str]] = {name: [] for name in ("no plan", *plans())}
    assert found == dict.fromkeys(FAMILIES, same)


if __name__ == "__main__":
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    print("RESULT", json.dumps({family: differing(family, "cuda") for family in sys.argv[1:]}))
