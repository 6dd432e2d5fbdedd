"""The bytes that are expected of an optimizer, beside those that it has after a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ligermodels.memory.optimizer import adam_bytes, memory_of
from ligermodels.memory.torch_private import plain
from ligermodels.training.config import OptimizerOptions
from ligermodels.training.optimizers import make_optimizer
from tests.memory.step_bytes import StorageTracker
from tests.tiny_models import random_model

STEP = 4  # bytes of the count of steps that many optimizers keep for each parameter


def model() -> Any:
    """Return a model of which the lower part is frozen."""
    made = random_model("llama", num_hidden_layers=2, hidden_size=64).train()
    made.embed_tokens.requires_grad_(False)
    made.layers[0].requires_grad_(False)
    return made.to(torch.bfloat16)


def after_a_step(optimizer: torch.optim.Optimizer) -> int:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    inner = getattr(optimizer, "inner_optimizers", [optimizer])
    states = [state for each in inner for state in each.state.values()]
    return sum(x.nbytes for state in states for x in plain(*state.values()))


def of_finetune(name: str, trained: Any) -> torch.optim.Optimizer:
    return make_optimizer(trained, OptimizerOptions(name=name))


# A function that makes an optimizer, and its states as a share of AdamW's, between two bounds.
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float, float]] = {
    "amsgrad": (lambda model: torch.optim.Adam(model.parameters(), amsgrad=True), 1.5, 1.5),
    "sgd": (lambda model: torch.optim.SGD(model.parameters()), 0, 0),
    "momentum": (lambda model: torch.optim.SGD(model.parameters(), momentum=0.9), 0.5, 0.5),
    "adamw": (partial(of_finetune, "adamw"), 1, 1),
    "adamw_8bit": (partial(of_finetune, "adamw_8bit"), 0.4, 0.9),
    "adafactor": (partial(of_finetune, "adafactor"), 0.001, 0.1),
    "muon": (partial(of_finetune, "muon"), 0.4, 0.7),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_before_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
        # Compiling its step takes half a minute.
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    trained, (make, low, high) = model(), OPTIMIZERS[name]
    optimizer = make(trained)
    expected, _ = memory_of(optimizer)
    count = sum(p.requires_grad for p in trained.parameters())
    assert 0 <= after_a_step(optimizer) - expected <= STEP * count
    assert low <= expected / adam_bytes(trained) <= high


def test_an_optimizer_whose_step_cannot_be_simulated_counts_as_adam() -> None:
    class Other(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            raise NotImplementedError

    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    assert memory_of(Other([parameter], {})) == (2 * parameter.nbytes, 0)


def test_the_optimizer_itself_makes_no_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, 8))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it replaces the optimizer's step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook has run"))
    assert memory_of(optimizer) == (2 * parameter.nbytes, 2 * parameter.nbytes)
    assert torch.equal(parameter, torch.ones(8, 8)) and not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, foreach=False),
        partial(torch.optim.SGD, momentum=0.9, foreach=True),
        torch.optim.Adafactor,
        torch.optim.Muon,
        torch.optim.RMSprop,
    ],
    ids=["fused", "foreach", "one by one", "sgd", "adafactor", "muon", "rmsprop"],
)
def test_what_a_step_allocates(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    parameters = [torch.nn.Parameter(torch.randn(rows, 64, dtype=dtype)) for rows in (64, 256, 128)]
    optimizer = make(parameters)
    after_a_step(optimizer)
    tracker = StorageTracker()
    held = [x for state in optimizer.state.values() for x in state.values()]
    tracker.hold(x for x in held if isinstance(x, torch.Tensor))
    tracker.hold([*parameters, *(p.grad for p in parameters if p.grad is not None)])
    before = tracker.bytes
    with tracker:
        optimizer.step()
    most = tracker.peak_now - before if tracker.peak_now else 0
    _, expected = memory_of(optimizer)
    assert 0.99 * expected <= most <= 1.01 * expected


class Around(torch.optim.Optimizer):
    """Steps another optimizer, as accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self) -> None:
        self.inner.step()


def test_an_optimizer_inside_makes_no_step() -> None:
    trained = model()
    inner = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=1.0)
    for p in trained.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    before = [p.clone() for p in trained.parameters()]
    assert memory_of(Around(inner))[0] == adam_bytes(trained)
    assert all(map(torch.equal, before, trained.parameters()))
