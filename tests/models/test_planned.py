"""Activation checkpointing: transformers' arguments, and the blocks that backward recomputes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ligermodels import ConfigError, LayerPlan, MemoryPlan
from ligermodels.memory import offload
from ligermodels.memory.offload import Copies
from tests.models.pairs import tiny_model, tiny_pair, tokens


def computed_again(model: nn.Module) -> list[bool]:
    """Return for each block whether it runs a second time in backward."""
    ids, labels = tokens()
    runs = [0] * len(model.layers)
    for index, layer in enumerate(model.layers):

        def count(*_: Any, index: int = index) -> None:
            runs[index] += 1

        layer.register_forward_pre_hook(count)
    model(ids, labels=labels).loss.backward()
    assert set(runs) <= {1, 2}
    return [run == 2 for run in runs]


def test_every_nth_layer_is_the_one_that_transformers_takes() -> None:
    for every in (1, 2, 5, 9):
        theirs, ours = tiny_pair(num_hidden_layers=5)
        theirs.activation_checkpointing_enable(every_n_layers=every)
        ours.activation_checkpointing_enable(every_n_layers=every)
        expected = [layer.gradient_checkpointing for layer in theirs.model.layers]
        assert computed_again(ours) == expected == [index % every == 0 for index in range(5)]


@pytest.mark.parametrize("spelling", ["activation_checkpointing", "gradient_checkpointing"])
def test_both_spellings(spelling: str) -> None:
    model = tiny_model()
    enable = getattr(model, f"{spelling}_enable")
    disable = getattr(model, f"{spelling}_disable")
    told = f"is_{spelling}"
    for options in (None, {}, {"use_reentrant": False}):
        assert not getattr(model, told)
        enable(options)
        assert getattr(model, told)
        disable()
    for arguments, complaint in (
        ({"offload": True}, "the model is on cpu, which has no pinned memory"),
        ({"kwargs": {"use_reentrant": True}}, "only use_reentrant=False is implemented"),
        ({"kwargs": {"debug": True}}, "{'debug': True}; only use_reentrant"),
        ({"every_n_layers": 0}, "every_n_layers=0; expected an integer of 1 or more"),
    ):
        with pytest.raises(ValueError, match=complaint):
            enable(**{x.replace("kwargs", f"{spelling}_kwargs"): v for x, v in arguments.items()})
        assert not getattr(model, told)
    enable(**{f"{spelling}_kwargs": {"use_reentrant": False}}, every_n_layers=2, offload=False)
    assert computed_again(model) == [True, False, True]
    disable()
    assert computed_again(model) == [False] * 3


def test_one_offloader_serves_all_passes_and_no_compiled_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(offload, "CudaCopies", lambda _: Copies(lambda *_: None))
    with torch.device("meta"):
        model = tiny_model()
    device, plan = torch.device("cuda", 0), MemoryPlan.uniform(3, LayerPlan("input", host=True))
    model.set_memory_plan(plan)
    store = model._offloader(device, [])
    assert store is not None and model._offloader(device, []) is store
    other = copy.deepcopy(store)
    assert other is not store and other.host_budget == store.host_budget
    with torch.no_grad():
        assert model._offloader(device, []) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ConfigError, match="a compiled model cannot keep tensors in host memory"):
        model._offloader(device, [])
