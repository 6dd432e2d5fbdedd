"""The decoder with shared keys and values learns under a plan, generates, and comes back."""

from __future__ import annotations

import re

import pytest
import torch

from examples import shared_keys
from ligermodels import AutoLiger, KVCache, MemoryPlan, register
from ligermodels.layers.recompute import KEEPS
from ligermodels.models import auto
from tests.models.pairs import gradients


@pytest.fixture(scope="module")
def data() -> torch.Tensor:
    return torch.tensor(list(shared_keys.TEXT.read_bytes()[:60_000]))


@pytest.fixture
def model() -> shared_keys.SharedKeys:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4}
    config = shared_keys.SharedKeysConfig(**sizes, num_attention_heads=4, sliding_window=8)
    return shared_keys.SharedKeys(config)


def test_it_learns_the_same_under_every_plan(model, data):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    histories = []
    for keep in (None, *KEEPS):
        model.load_state_dict(before)
        model.set_memory_plan(None if keep is None else MemoryPlan.uniform(4, keep))
        histories.append(shared_keys.train(model, data, steps=3, seq=64))
    assert all(history == histories[0] for history in histories)
    history = shared_keys.train(model, data, steps=50, seq=64)
    assert sum(history[-5:]) / 5 < 3.1


def test_every_parameter_gets_a_gradient(model, data):
    model.loss(data[None, :64], data[None, :64]).backward()
    assert all(grad.count_nonzero() for grad in gradients(model).values())


def test_generation_keeps_half_of_the_layers_and_the_last_tokens(model, data):
    ids = data[None, :20]
    cache = KVCache.of(model, 1, 32)
    found = model.generate(ids, max_new_tokens=12, cache=cache)
    held = [0 if keys is None else keys.shape[2] for keys in cache.keys]
    assert held == [8, 0, 32, 0]
    with torch.no_grad():
        for _ in range(12):
            logits = model.head.logits(model(ids)[:, -1])
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, ids)


def test_packed_documents_are_computed_apart(model, data):
    packed = model(data[None, :40], cu_seqlens=torch.tensor([0, 25, 40]))
    alone = torch.cat([model(data[None, :25]), model(data[None, 25:40])], 1)
    torch.testing.assert_close(packed, alone)


def test_it_is_saved_with_its_config(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "_registered", dict(auto._registered))
    register(shared_keys.SharedKeys)
    model.save_hf(tmp_path)
    again = AutoLiger.from_hf(tmp_path)
    assert again.config.sliding_window == 8
    assert torch.equal(again(data[None, :64]), model(data[None, :64]))


def test_the_whole_example_runs(tmp_path, capsys):
    shared_keys.main(tmp_path / "run", steps=2)
    printed = capsys.readouterr().out
    assert re.search(r"step +1  loss \d\.\d+\nCaptain Wentworth ", printed)
