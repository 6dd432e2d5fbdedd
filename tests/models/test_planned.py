"""Activation checkpointing: transformers' arguments, and the blocks that backward recomputes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ligermodels import ConfigError, MemoryPlan
from tests.layers.saved import SavedBytes
from tests.models.pairs import gradients, relative, step, tiny_model, tiny_pair, tokens


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


def test_every_nth_layer_is_the_one_that_transformers_takes(subtests: pytest.Subtests) -> None:
    for every in (1, 2, 3, 5, 9):
        with subtests.test(str(every)):
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
    assert not getattr(model, told)
    for options in (None, {}, {"use_reentrant": False}):
        enable(options)
        assert getattr(model, told)
        disable()
        assert not getattr(model, told)
    enable(**{f"{spelling}_kwargs": {"use_reentrant": False}}, every_n_layers=2, offload=False)
    assert computed_again(model) == [True, False, True]
    disable()
    assert computed_again(model) == [False] * 3


def test_gradients_are_the_same_with_every_second_layer() -> None:
    model = tiny_model(num_hidden_layers=4)
    ids, labels = tokens()
    model.loss(ids, labels).backward()
    expected = gradients(model)
    model.zero_grad()
    model.activation_checkpointing_enable(every_n_layers=2)
    model.loss(ids, labels).backward()
    for name, grad in gradients(model).items():
        assert relative(grad, expected[name]) <= 1e-6, name


def test_unsupported_arguments_are_refused(subtests: pytest.Subtests) -> None:
    for spelling in ("activation_checkpointing", "gradient_checkpointing"):
        for arguments, complaint in (
            ({"offload": True}, "the model is on cpu, which has no pinned memory"),
            ({"kwargs": {"use_reentrant": True}}, "use_reentrant=True is not implemented"),
            ({"kwargs": {"debug": True, "context_fn": None}}, "context_fn, debug: not implemented"),
            ({"kwargs": ["use_reentrant"]}, "expected a dict or None"),
            ({"every_n_layers": 0}, "every_n_layers=0; expected an integer of 1 or more"),
            ({"every_n_layers": 2.5}, "every_n_layers=2.5; expected an integer of 1 or more"),
        ):
            with subtests.test(f"{spelling}: {arguments}"):
                model = tiny_model()
                arguments = {
                    f"{spelling}_kwargs" if name == "kwargs" else name: value
                    for name, value in arguments.items()
                }
                with pytest.raises(ValueError, match=complaint):
                    getattr(model, f"{spelling}_enable")(**arguments)
                assert not model.is_gradient_checkpointing


def test_nothing_is_computed_again_without_gradients() -> None:
    model = tiny_model()
    model.activation_checkpointing_enable()
    ids, _ = tokens()
    with torch.no_grad():
        assert not model(ids).requires_grad


def test_one_hidden_state_is_kept_for_each_block() -> None:
    """The gradients are the same; one hidden state is kept for each block."""
    model = tiny_model()
    ids, labels = tokens()
    with SavedBytes(model) as plain:
        step(model, ids, labels=labels)
    reference = gradients(model)
    model.activation_checkpointing_enable()
    model.zero_grad()
    with SavedBytes(model) as checkpointed:
        out = model(ids, labels=labels)
    out.loss.backward()
    for name, grad in gradients(model).items():
        assert relative(grad, reference[name]) <= 1e-6, name
    per_block = model.config.hidden_size * 4 * ids.numel()
    blocks = model.config.num_hidden_layers
    shallow = tiny_model(num_hidden_layers=1)
    shallow.activation_checkpointing_enable()
    with SavedBytes(shallow) as rest:
        shallow(ids, labels=labels)
    assert checkpointed.total - rest.total == (blocks - 1) * per_block
    assert checkpointed.total < 0.5 * plain.total
    model.activation_checkpointing_disable()
    with SavedBytes(model) as again:
        model(ids, labels=labels)
    assert again.total == plain.total


def test_one_offloader_serves_all_passes_and_no_compiled_one(monkeypatch) -> None:
    with torch.device("meta"):
        model = tiny_model()
    device, plan = torch.device("meta"), MemoryPlan.uniform(3, "input", host=True)
    model.set_memory_plan(plan)
    store = model._offloader(device, {})
    assert store is not None and model._offloader(device, {}) is store
    other = copy.deepcopy(store)
    assert other is not store and other.host_budget == store.host_budget
    with torch.no_grad():
        assert model._offloader(device, {}) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ConfigError, match="a compiled model cannot keep tensors in host memory"):
        model._offloader(device, {})
