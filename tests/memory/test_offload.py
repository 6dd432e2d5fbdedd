"""Tests of the offloader with copies on the CPU that run as late as the events allow."""

from __future__ import annotations

import dataclasses
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory import offload
from ligermodels.memory.byte_sizes import MIB
from ligermodels.memory.offload import Copies, HostBlock, Offloader, PinnedPool, pairs
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.models.base import DecoderModel
from tests.models.pairs import gradients
from tests.models.test_families import batch, make
from tests.pairwise import pairwise

GARBAGE = 255  # a byte; float32 numbers of it are NaN


class Queue:
    """A stream: copies run in order, but none before a stream waits for it."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], None]] = []
        self.done = 0

    def add(self, copy: Callable[[], None]) -> tuple[Queue, int]:
        self.copies.append(copy)
        return self, len(self.copies)

    def run_until(self, position: int) -> None:
        while self.done < position:
            self.copies[self.done]()
            self.done += 1


class LateCopies(Copies):
    """Copies on the CPU. A copy fails if its tensor was released before any stream waited."""

    def __init__(self, count: Callable[[bool, int], None] = lambda *_: None) -> None:
        super().__init__(count)
        self.outward, self.inward = Queue(), Queue()
        self.slabs: list[Tensor] = []

    def slab(self, nbytes: int) -> Tensor:
        self.slabs.append(torch.full((nbytes,), GARBAGE, dtype=torch.uint8))
        return self.slabs[-1]

    def to_host(self, source: Tensor, host_blocks: list[HostBlock]) -> Any:
        super().to_host(source, host_blocks)
        reloads, ref = len(self.inward.copies), weakref.ref(source)

        def copy() -> None:
            self.inward.run_until(reloads)
            for source_bytes, host_bytes in pairs(alive(ref), host_blocks):
                host_bytes.copy_(source_bytes)

        return self.outward.add(copy)

    def to_device(self, target: Tensor, host_blocks: list[HostBlock], after: Any) -> Any:
        super().to_device(target, host_blocks, after)
        target.fill_(GARBAGE)
        ref = weakref.ref(target)

        def copy() -> None:
            self.wait(None, after)
            for source_bytes, host_bytes in pairs(alive(ref), host_blocks):
                # The version was read when the copy was issued, as on a GPU.
                with torch.autograd._unsafe_preserve_version_counter(source_bytes):
                    source_bytes.copy_(host_bytes)

        return self.inward.add(copy)

    def wait(self, stream: None, event: Any) -> None:
        queue, position = event
        queue.run_until(position)


def alive(ref: weakref.ref[Tensor]) -> Tensor:
    tensor = ref()
    assert tensor is not None, "released while a copy was under way"
    return tensor


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_LEAST_BYTES", 1)


@pytest.fixture
def wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill pinned memory with garbage when it is given back."""
    give_back = PinnedPool.give_back

    def wipe(pool: Any, blocks: list) -> None:
        for slab, offset, size in pool.host_blocks(blocks):
            slab[offset : offset + size] = GARBAGE
        give_back(pool, blocks)

    monkeypatch.setattr(PinnedPool, "give_back", wipe)


def make_offloader(budget: int = 64 * MIB, **options: Any) -> Offloader:
    return Offloader("cpu", budget, LateCopies(**options))


class Chain(nn.Module):
    """Layers x -> sin(weight * x). Each one saves x, and weight * x."""

    def __init__(self, layers: int = 5, width: int = 1000) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.rand(width, generator=generator) + 0.5) for _ in range(layers)
        )
        self.products: list[weakref.ref[Tensor]] = []  # of the latest forward

    def forward(
        self, x: Tensor, offloader: Offloader | None = None, host: Callable = lambda i: True
    ) -> Tensor:
        self.products = []
        if offloader is not None:
            offloader.forward_pass()
        for i, weight in enumerate(self.weights):
            if offloader is None:
                x = self.run(x, weight)
            else:
                with offloader.layer(i, host=host(i)):
                    x = self.run(x, weight)
        return x.sum()

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        product = weight * x
        self.products.append(weakref.ref(product.untyped_storage()))
        return torch.sin(product)

    def on_device(self) -> list[int]:
        return [i for i, ref in enumerate(self.products) if ref() is not None]

    def expected(self, *inputs: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(sum(self(x) for x in inputs), list(self.weights)))


def assert_equal(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


X = torch.linspace(-1, 1, 1000)


def test_each_storage_leaves_once_and_returns_a_layer_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "HOLD", 1)
    copied: list[tuple[str, int]] = []
    chain = Chain()
    offloader = make_offloader(
        count=lambda to_host, nbytes: copied.append(("out" if to_host else "back", nbytes)),
    )
    loss = chain(X, offloader)
    assert copied == [("out", 4000)] * 10  # the first x, five products, four other inputs
    visits = []
    for i, weight in enumerate(chain.weights):
        weight.register_post_accumulate_grad_hook(
            lambda _, i=i: visits.append((i, sum(way == "back" for way, _ in copied)))
        )
    loss.backward()
    # The last layer never left. While it runs, the layer below it returns, and so on.
    assert visits == [(4, 2), (3, 4), (2, 6), (1, 8), (0, 8)]


@pytest.mark.parametrize("seed", range(12))
def test_steps_drawn_at_random_have_exact_gradients_and_leave_nothing(
    seed: int, wiped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes overlap, fail or have no backward; backward visits some layers, in any thread."""
    draw = random.Random(seed)
    width = draw.choice([1000, 75_000])
    chain, x = Chain(layers=draw.randint(1, 6), width=width), torch.linspace(-1, 1, width)
    count = len(chain.weights)
    offloader = make_offloader(draw.choice([MIB, 64 * MIB]))
    monkeypatch.setattr(offload, "HOLD", draw.randint(1, 3))
    hosts = [draw.random() < 0.7 for _ in range(count)]
    waiting: list[tuple[Tensor, list[Tensor]]] = []  # losses, and their gradients
    for step in range(12):
        kind = draw.choice(["forward", "forward", "fails", "evaluates", "some", "all", "all"])
        given = x + step
        if kind == "forward":
            expected = chain.expected(given)
            waiting.append((chain(given, offloader, hosts.__getitem__), expected))
        elif kind == "evaluates":
            with torch.no_grad():
                chain(given, offloader)
            assert chain.on_device() == []
        elif kind == "fails":
            last = draw.randrange(count)

            def fails(i: int, last: int = last) -> bool:
                if i == last:
                    raise KeyError
                return hosts[i]

            with pytest.raises(KeyError):
                chain(given, offloader, fails)
        elif waiting:
            loss, expected = waiting[draw.randrange(len(waiting))]
            some = draw.sample(range(count), draw.randint(1, count) if kind == "some" else count)
            weights, found = [chain.weights[i] for i in some], []

            def backward(loss: Tensor = loss, weights: Any = weights, found: Any = found) -> None:
                found += torch.autograd.grad(loss, weights, retain_graph=True)

            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
            assert_equal(found, [expected[i] for i in some])
            if draw.random() < 0.5:
                waiting = [each for each in waiting if each[0] is not loss]
            del loss, backward, thread
    waiting.clear()
    stats = offloader.stats()
    assert stats.in_use == 0 and stats.peak <= stats.pinned
    loss = chain(x, offloader)
    torch.autograd.grad(loss, list(chain.weights))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, list(chain.weights))
    assert offloader.stats().in_use == 0


def test_a_tensor_that_backward_overwrote_is_loaded_again() -> None:
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return x.mul_(2).mul_(grad)

    offloader = make_offloader()
    x = torch.rand(100, requires_grad=True)
    offloader.forward_pass()
    with offloader.layer(0):
        y = Overwrites.apply(x * 1)
    for _ in range(3):
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(grad, 2 * x)


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("layers_after", [0, 3])
def test_a_change_in_place_raises(host: bool, layers_after: int) -> None:
    """Also after the tensor has left the GPU, as autograd itself would."""
    offloader = make_offloader()
    offloader.forward_pass()
    x = torch.ones(100, requires_grad=True)
    with offloader.layer(0, host):
        y = x.exp()
    for i in range(layers_after):
        with offloader.layer(i + 1, host):
            x.sin()
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1"):
        y.sum().backward()


def test_what_was_changed_between_two_uses_is_stored_twice() -> None:
    offloader = make_offloader()
    offloader.forward_pass()
    x, y = torch.ones(100), torch.ones(100, requires_grad=True)
    with offloader.layer(0):
        first = x * y
        offloader.copies.outward.run_until(1)
        x.add_(1)
        second = x * y
    for index in (1, 2):
        with offloader.layer(index):
            pass
    (grad,) = torch.autograd.grad(second.sum(), y)
    assert torch.equal(grad, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_views_share_one_copy_and_keep_their_form() -> None:
    copied: list[int] = []
    offloader = make_offloader(count=lambda _, nbytes: copied.append(nbytes))
    offloader.forward_pass()
    packed = torch.randn(6, 20, dtype=torch.complex64)
    views = [packed[1:3, ::2], packed.t(), packed, torch.view_as_real(packed), packed[:, 5:]]
    with offloader.layer(0):
        handles = [offloader.pack(view) for view in views]
        assert copied == [packed.nbytes]
    for index in range(1, offload.HOLD + 2):
        with offloader.layer(index):
            pass
    for handle, view in zip(handles, views):
        found = offloader.unpack(handle)
        assert torch.equal(found, view) and found.stride() == view.stride()
        assert found.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr()
    assert copied == [packed.nbytes] * 2


def test_what_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_LEAST_BYTES", 4000)
    offloader = make_offloader()
    outside = torch.randn(1000)
    assert offloader.unpack(offloader.pack(outside)).data_ptr() == outside.data_ptr()
    angles, half = torch.randn(1000), torch.randn(1000)
    offloader.forward_pass(shared=[angles])
    weight = nn.Parameter(torch.randn(10, 100), requires_grad=False)
    stay = [weight, weight.t(), weight[2:], torch.randn(999), angles, angles[3:]]
    stay += [torch.randn(1000).to_sparse(), torch.randn(1000, dtype=torch.complex64).conj()]
    with offloader.layer(0, host=False):
        stay.append(half)
        handles = [offloader.pack(tensor) for tensor in stay]
    with offloader.layer(1):
        handles += [offloader.pack(tensor) for tensor in stay[:-1]]
        assert offloader.stats().in_use == 0
        offloader.pack(half)
        assert offloader.stats().in_use == 0, "a handle that is gone still takes memory"
        handle = offloader.pack(half)
        assert offloader.stats().in_use == 4096
    for kept, tensor in zip(handles, stay + stay):
        found = offloader.unpack(kept)
        assert found.data_ptr() == tensor.data_ptr() if not tensor.is_sparse else True
    assert torch.equal(offloader.unpack(handle), half)


def test_what_exceeds_the_budget_stays() -> None:
    offloader = make_offloader(MIB + 1000)
    offloader.forward_pass()
    large = torch.zeros(2 * MIB, dtype=torch.uint8)
    with offloader.layer(0):
        handles = [offloader.pack(large), offloader.pack(large[MIB:])]
    assert [offloader.unpack(handle).data_ptr() - large.data_ptr() for handle in handles] == [
        0,
        MIB,
    ]
    assert offloader.stats().refused == 2 * MIB, "the same tensor is counted twice"


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda has no pinned host memory"):
        Offloader("cuda", MIB)
    with pytest.raises(ConfigError, match="host_budget=1000 bytes"):
        make_offloader(1000)


def run_with(
    model: DecoderModel, plan: MemoryPlan, offloader: Offloader | None, **inputs: Any
) -> dict[str, Tensor]:
    """Return the gradients of a step whose kept tensors go to an offloader."""
    device = next(model.parameters()).device
    if offloader is not None:
        plan = dataclasses.replace(plan, host_budget=offloader.host_budget)
        model._offloaders[device] = offloader
    model.apply_memory_plan(plan)
    model.zero_grad()
    ids, labels = batch()
    model(ids.to(device), labels=labels.to(device), **inputs).loss.backward()
    return gradients(model)


PACKED = {"position_ids": torch.tensor([[*range(5), *range(6), *range(3)]] * 2)}
MIXED = MemoryPlan.of(
    [LayerPlan("attention", True), LayerPlan("no_gate_up"), LayerPlan("all", True)]
)
PLANS = [MemoryPlan.uniform(3, LayerPlan(policy, host=True)) for policy in POLICIES] + [MIXED]


@pytest.mark.parametrize("budget", [64 * MIB, MIB])
def test_a_simulation_copies_the_same_bytes_in_the_same_order(budget: int) -> None:
    found = []
    for device in ("cpu", "meta"):
        counted: list[tuple[bool, int]] = []
        copies = LateCopies if device == "cpu" else Copies
        offloader = Offloader(device, budget, copies(lambda *copy, to=counted: to.append(copy)))
        chain = Chain(layers=5, width=75_000).to(device)
        loss = chain(torch.ones(75_000, device=device), offloader)
        on_device, stats = chain.on_device(), offloader.stats()
        loss.backward()
        found.append((counted, on_device, stats, offloader.stats()))
    assert found[0] == found[1] and found[0][0]


# Blocks of the other families hold the same tensors as one of these.
BLOCKS = ("llama", "gemma2", "gemma3_text")


@pairwise(family=BLOCKS, inputs=[{}, PACKED], autocast=[False, True])
def test_gradients_of_models_are_bitwise_equal(
    family: str, inputs: dict[str, Tensor], autocast: bool, wiped: None
) -> None:
    model, draw = make(family), random.Random(family)
    drawn = [LayerPlan(draw.choice(POLICIES), draw.random() < 0.5) for _ in range(2)]
    plans = [*PLANS, MemoryPlan.of([LayerPlan("all", True), *drawn])]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = run_with(model, MemoryPlan.uniform(3, "all"), None, **inputs)
        for plan in plans:
            offloader = make_offloader()
            for _ in range(2):
                found = run_with(model, plan, offloader, **inputs)
                assert_equal(list(found.values()), list(expected.values()))
            assert offloader.stats().in_use == 0 < offloader.stats().peak
