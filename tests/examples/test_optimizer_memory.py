"""The recipes train as AdamW does, and hold the bytes that they should."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch

from benchmarks.common import RESULTS
from examples import optimizer_memory
from ligermodels import LigerLlama, LlamaConfig
from ligermodels.layers.recompute import KEEPS
from ligermodels.memory.optimizer_states import state_bytes, step_bytes
from ligermodels.memory.plan import MemoryPlan
from ligermodels.memory.simulate import simulate


def tiny(*, tied: bool = False) -> LigerLlama:
    torch.manual_seed(0)
    return LigerLlama(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("keep", KEEPS)
def test_an_optimizer_in_backward_trains_as_one_after_it(keep, tied):
    """At every level, the weights that backward recomputes with are those of forward."""
    ids = torch.randint(64, (2, 24))
    usual, model = tiny(tied=tied), tiny(tied=tied)
    usual_optimizer = optimizer_memory.adamw(list(usual.parameters()))
    model.set_memory_plan(MemoryPlan.uniform(4, keep))
    in_backward = optimizer_memory.OptimizerInBackward(model, optimizer_memory.adamw)
    for _ in range(3):
        usual(ids, labels=ids).loss.backward()
        usual_optimizer.step()
        usual_optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is None for p in model.parameters())
    for one, other in zip(usual.parameters(), model.parameters()):
        assert torch.equal(one, other)
    expected = optimizer_memory.state_bytes(usual_optimizer)
    assert in_backward.state_bytes() == expected
    in_backward.remove()
    before = [p.detach().clone() for p in model.parameters()]
    model(ids, labels=ids).loss.backward()
    for one, other in zip(before, model.parameters()):
        assert torch.equal(one, other) and other.grad is not None


@pytest.mark.parametrize("recipe", ["AdamW", "AdamW in backward"])
def test_the_parameters_are_freed_after_a_recipe(recipe, monkeypatch):
    """Otherwise the peak of the next recipe would contain them."""
    held: list[weakref.ref] = []

    def make(config: LlamaConfig) -> LigerLlama:
        model = LigerLlama(config)
        held.extend(weakref.ref(p.untyped_storage()) for p in model.parameters())
        return model

    monkeypatch.setattr(optimizer_memory, "LigerLlama", make)
    optimizer_memory.run(recipe, tiny().config, 1, 8)
    gc.collect()
    assert held and not any(reference() is not None for reference in held)


def test_a_frozen_half_has_no_states_and_keeps_nothing():
    model = tiny()
    optimizer_memory.freeze_lower_half(model)
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.layers[0](torch.randn(1, 8, 32), None, model_context(model))
    assert kept == []
    trained = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in trained if name.startswith("layers")} == {"2", "3"}
    assert {"norm", "head.proj"} <= trained and "embed_tokens" not in trained


def model_context(model: LigerLlama):
    from ligermodels.layers import AttentionContext

    return AttentionContext(*model.rotary_emb(torch.arange(8)[None]))


def test_the_table_has_the_bytes_of_each_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(optimizer_memory.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "table.json"
    rows = optimizer_memory.main(["--seq", "16", "--out", str(file)])
    usual, in_backward, frozen = rows
    size = usual["parameter bytes"]
    assert usual["gradient bytes"] == size
    assert 2 * size < usual["state bytes"] == in_backward["state bytes"] < 2.1 * size
    assert in_backward["gradient bytes"] < size / 2
    assert frozen["gradient bytes"] < size * 0.7 and frozen["state bytes"] < 2 * size * 0.7
    assert in_backward["loss"] == pytest.approx(usual["loss"], rel=1e-3)
    assert json.loads(file.read_text())["rows"] == rows
    assert "AdamW in backward" in capsys.readouterr().out


def test_8_bit_states_take_a_quarter_of_the_bytes():
    """They are compared with float32 states. Each block of values has a scale of its own."""
    pytest.importorskip("torchao")
    weight = torch.nn.Parameter(torch.randn(128, 128))
    sizes = []
    for make in (optimizer_memory.adamw_8bit, optimizer_memory.adamw):
        optimizer = make([weight])
        weight.grad = torch.randn_like(weight)
        with torch.compiler.set_stance("force_eager"):  # inductor would take seconds
            optimizer.step()
        sizes.append(optimizer_memory.state_bytes(optimizer))
    assert 0.25 * sizes[1] < sizes[0] < 0.27 * sizes[1]


@pytest.mark.parametrize("recipe", optimizer_memory.RECIPES)
def test_the_planner_predicts_the_peaks_that_were_measured(recipe):
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
    found = simulate(
        model,
        8,
        2048,
        device=torch.device("cuda"),
        gradients="freed" if in_backward else "new",
        step_bytes=0 if in_backward else step_bytes(optimizer),
        num_sms=132,
    )
    rows = json.loads((RESULTS / "memory.json").read_text())["recipes"]
    (measured,) = [row for row in rows if row["recipe"] == recipe]
    predicted = found.peak_bytes + state_bytes(optimizer)
    assert 0.995 < predicted / measured["peak bytes"] < 1.005
