"""Tests of the offloader on a GPU: exact gradients, released memory, and no waiting host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory import offload
from ligermodels.memory.byte_sizes import MIB
from ligermodels.memory.offload import Offloader
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.models.base import DecoderModel
from ligermodels.models.llama import LigerLlama, LlamaConfig
from tests.gpu.synchronisation import no_synchronisation
from tests.memory.test_offload import Chain, assert_equal

pytestmark = pytest.mark.gpu

LAYERS, TOKENS, WIDTH = 6, 512, 512
KEPT = MemoryPlan.uniform(LAYERS, "all")
MIXED = MemoryPlan.of(
    [
        LayerPlan("all", host=True),
        LayerPlan("attention", host=True),
        LayerPlan("no_gate_up"),
        LayerPlan("input", host=True),
        LayerPlan("no_gate_up", host=True),
        LayerPlan("all"),
    ],
    host_budget=2**31,
)
PLANS = [
    MemoryPlan.uniform(LAYERS, LayerPlan(k, host=True), host_budget=2**31) for k in POLICIES
] + [MIXED]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Let equal runs give equal bits: attention without atomic additions."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
    )
    return LigerLlama(config).to("cuda")


def step(model: DecoderModel, plan: MemoryPlan | None) -> list[Tensor]:
    model.set_memory_plan(plan)
    return again(model)


def again(model: DecoderModel) -> list[Tensor]:
    model.zero_grad()
    ids = torch.arange(2 * TOKENS, device="cuda").view(2, TOKENS) * 7919 % 512
    model(ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("slow", [None, "to_host", "to_device", "compute"])
def test_gradients_are_bitwise_equal(
    model: DecoderModel, slow: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of the streams is far behind the others."""
    expected = step(model, None)
    assert_equal(step(model, None), expected)
    if slow in ("to_host", "to_device"):
        delay(monkeypatch, slow)
    for plan in PLANS:
        model.set_memory_plan(plan)
        for _ in range(3):
            if slow == "compute":
                torch.cuda._sleep(100_000_000)
            assert_equal(again(model), expected)
        (offloader,) = model._offloaders.values()
        stats = offloader.stats()
        assert stats.in_use == 0 < stats.peak and stats.refused == 0


def delay(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """Make the copies of one direction wait for about 5 ms each."""
    pairs = offload.pairs

    def delayed(tensor: Tensor, parts: Any) -> Any:
        copies_to_host = torch.cuda.current_stream() in outward
        if copies_to_host == (direction == "to_host"):
            torch.cuda._sleep(10_000_000)
        return pairs(tensor, parts)

    outward: list[torch.cuda.Stream] = []
    make = offload.CudaCopies.__init__

    def made(copies: Any, device: torch.device) -> None:
        make(copies, device)
        outward.append(copies._outward)

    monkeypatch.setattr(offload.CudaCopies, "__init__", made)
    monkeypatch.setattr(offload, "pairs", delayed)


def test_memory_is_released(model: DecoderModel) -> None:
    ids = torch.zeros(2, TOKENS, dtype=torch.int64, device="cuda")

    def peak(plan: MemoryPlan) -> int:
        model.set_memory_plan(plan)
        for _ in range(2):
            model.zero_grad()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(ids, labels=ids).loss.backward()
        return torch.cuda.max_memory_allocated() - before

    everything = peak(KEPT)
    plan = MemoryPlan.of([LayerPlan("all", host=True)] * 5 + [LayerPlan("all")], host_budget=2**31)
    # Sums, q, k, v and gate_up, in float32. Forward holds three layers, and backward two.
    layer = (2 + 3 + 4) * 4 * 2 * TOKENS * WIDTH
    assert peak(plan) < everything - 3 * layer


@pytest.mark.parametrize("plan", PLANS)
def test_the_host_never_waits(model: DecoderModel, plan: MemoryPlan) -> None:
    ids = torch.zeros(2, TOKENS, dtype=torch.int64, device="cuda")
    model.set_memory_plan(plan)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
    model.zero_grad()
    with no_synchronisation():
        model(ids, labels=ids).loss.backward()


def test_backward_may_run_again() -> None:
    chain = Chain(layers=6, width=MIB).to("cuda")
    offloader = Offloader("cuda", 256 * MIB)
    x = torch.linspace(-1, 1, MIB, device="cuda")
    expected = chain.expected(x)
    loss = chain(x, offloader)
    for retain in (True, True, False):
        grads = torch.autograd.grad(loss, list(chain.weights), retain_graph=retain)
        assert_equal(grads, expected)
    assert offloader.stats().in_use == 0


def test_another_stream_may_compute() -> None:
    chain = Chain(layers=6, width=MIB).to("cuda")
    offloader = Offloader("cuda", 256 * MIB)
    x = torch.linspace(-1, 1, MIB, device="cuda")
    expected = chain.expected(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            grads = torch.autograd.grad(chain(x, offloader), list(chain.weights))
    torch.cuda.current_stream().wait_stream(side)
    assert_equal(grads, expected)


@pytest.mark.slow
def test_compiled_layers(model: DecoderModel) -> None:
    calls: list[Callable | None] = [layer._compiled_call_impl for layer in model.layers]
    for layer in model.layers:
        layer.compile()
    try:
        for plan in (PLANS[0], PLANS[-2]):
            expected = step(model, MemoryPlan.of(layer.policy for layer in plan.layers))
            assert_equal(step(model, plan), expected)
    finally:
        for layer, call in zip(model.layers, calls):
            layer._compiled_call_impl = call


def test_too_much_pinned_memory_is_refused() -> None:
    copies = offload.CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    with pytest.raises(ConfigError, match="bytes of host memory cannot be pinned"):
        copies.slab(2**46)
