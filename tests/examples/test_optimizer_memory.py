"""The recipes train as AdamW does, and hold the bytes that they should."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.common import RESULTS
from examples import optimizer_memory
from ligermodels import LigerLlama, LlamaConfig
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.optimizer import memory_of
from ligermodels.memory.plan import MemoryPlan
from ligermodels.memory.simulate import simulate


def tiny() -> LigerLlama:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    return LigerLlama(LlamaConfig(vocab_size=64, **sizes, **heads))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_optimizer_in_backward_trains_as_one_after_it(policy: str) -> None:
    """Under every policy, the weights that backward recomputes with are those of forward."""
    ids = torch.randint(64, (2, 24))
    usual, model = tiny(), tiny()
    usual_optimizer = optimizer_memory.adamw(list(usual.parameters()))
    model.set_memory_plan(MemoryPlan.uniform(4, policy))
    in_backward = optimizer_memory.OptimizerInBackward(model, optimizer_memory.adamw)
    for _ in range(3):
        usual(ids, labels=ids).loss.backward()
        usual_optimizer.step()
        usual_optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is None for p in model.parameters())
    for one, other in zip(usual.parameters(), model.parameters()):
        assert torch.equal(one, other)
    assert in_backward.state_bytes() == optimizer_memory.state_bytes(usual_optimizer)
    in_backward.remove()
    model(ids, labels=ids).loss.backward()
    for one, other in zip(usual.parameters(), model.parameters()):
        assert torch.equal(one, other) and other.grad is not None


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[pytest.mark.long] if i % 2 == 0 else [])
        for i, name in enumerate(optimizer_memory.RECIPES)
    ],
)
def test_the_planner_predicts_the_peaks_that_were_measured(recipe: str) -> None:
    """The planner is told of each recipe, and knows the step of AdamW in 8 bits."""
    pytest.importorskip("triton")
    if "8-bit" in recipe:
        pytest.importorskip("torchao")
    make, in_backward, frozen = optimizer_memory.RECIPES[recipe]
    with torch.device("meta"):
        model = LigerLlama(LlamaConfig.preset("llama-3-8b")).bfloat16().train()
    model.activation_checkpointing_enable()
    if frozen:
        optimizer_memory.freeze_lower_half(model)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    states, most = memory_of(optimizer)
    found = simulate(
        model,
        8,
        2048,
        device=torch.device("cuda"),
        gradients="freed" if in_backward else "new",
        step_bytes=0 if in_backward else most,
    )
    rows = json.loads((RESULTS / "memory.json").read_text())["recipes"]
    (measured,) = [row for row in rows if row["recipe"] == recipe]
    predicted = found.peak_bytes + states
    assert 0.995 < predicted / measured["peak bytes"] < 1.005
