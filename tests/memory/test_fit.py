"""Planning a real model: the plan fits, is used and printed, and all ranks have the same one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ligermodels import ConfigError, LigerLlama, LlamaConfig, MemoryPlan
from ligermodels.memory import simulate as simulation
from ligermodels.memory.fit import Planner
from ligermodels.memory.simulate import simulate
from ligermodels.models.auto import families
from tests.models.pairs import tiny_model
from tests.tiny_models import random_model

pytestmark = pytest.mark.usefixtures("rows_at_once")

CPU = torch.device("cpu")


def small(layers: int = 3) -> LigerLlama:
    """A model whose activations are larger than its weights."""
    return tiny_model(num_hidden_layers=layers, max_position_embeddings=512)


# A block with one norm before each part, and one with two; the long run has all families.
BLOCKS = ("gemma3_text", "llama")


@pytest.mark.parametrize(
    "family",
    [x if x in BLOCKS else pytest.param(x, marks=pytest.mark.long) for x in sorted(families())],
)
def test_the_least_bytes_are_enough_and_one_byte_less_is_not(family: str) -> None:
    model = random_model(family, num_hidden_layers=2)
    planner = Planner(model, 10**9)
    planner.budget = least = planner.least_bytes(4, 64)
    plan = planner.plan(4, 64)
    assert plan.recomputes and model.memory_plan is None  # the model keeps its own plan
    planner.budget -= 1
    with pytest.raises(ConfigError, match=f"at least {least} bytes"):
        planner.plan(4, 64)


def test_a_plan_fits_and_more_bytes_are_never_slower() -> None:
    model = small()
    planner = Planner(model, 10**9)
    with torch.inference_mode():  # the step has gradients all the same
        assert copy.deepcopy(model).plan_memory(4, 128, "1GB") == planner.plan(4, 128)
    least, most = planner.least_bytes(4, 128), planner.plan(4, 128).prediction
    assert most is not None and not planner.plan(4, 128).recomputes
    times = []
    for step in range(6):
        planner.budget = least + step * (most.peak_bytes - least) // 4
        plan = planner.plan(4, 128)
        said = plan.prediction
        assert said is not None and said.peak_bytes + said.reserve_bytes <= planner.budget
        model.set_memory_plan(plan)
        assert simulate(model, 4, 128, device=CPU).peak_bytes + said.optimizer_bytes == (
            said.peak_bytes
        )
        times.append(said.seconds)
    assert times == sorted(times, reverse=True) and len(set(times)) > 3


def test_what_the_step_consists_of_counts() -> None:
    model = small()

    def peak(**options: Any) -> int:
        said = model.plan_memory(4, 128, 10**9, **options).prediction
        assert said is not None
        return said.peak_bytes

    weights = sum(p.nbytes for p in model.parameters())
    assert peak() - peak(optimizer_bytes=0) == 2 * weights
    assert peak(gradients="kept") > peak() > peak(gradients="freed", optimizer_bytes=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert peak(optimizer_bytes=optimizer) == peak(optimizer_bytes=0)
    greedy = torch.optim.AdamW(model.parameters(), foreach=True)
    greedy.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2**24, device="meta"))]})
    # The step of the optimizer is the peak, whatever the layers keep.
    assert peak(optimizer_bytes=greedy) > 3 * 2**26
    model.layers.requires_grad_(False)
    assert peak() < peak(optimizer_bytes=2 * weights)


def test_the_largest_batch_and_length_fit() -> None:
    model = small(1)
    budget = Planner(model, 10**9).least_bytes(4, 128)
    batch = model.largest_batch(128, budget)
    assert batch == 4
    length = model.largest_seq(4, budget)
    assert 125 <= length <= 128
    model.plan_memory(4, length, budget)
    assert model.largest_batch(128, "10kB") == 0


def test_a_real_size_is_planned_for_a_gpu_without_one() -> None:
    sizes = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LigerLlama(sizes).to(torch.bfloat16)
    pytest.importorskip("triton")
    plan = model.plan_memory(8, 2048, "26GiB", host_budget="2GiB")
    said = plan.prediction
    assert said is not None and 0 < said.host_bytes <= 2 * 2**30
    assert 23 * 2**30 < said.peak_bytes < 26 * 2**30
    assert plan.uses_host and said.gains
    assert plan.head_chunk == 4096 and "the loss head handles 4096 tokens" in str(plan)
    assert MemoryPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    model.apply_memory_plan(plan)
    assert model.head.planned_chunk_size == 4096
    model.set_memory_plan(None)
    assert model.head.planned_chunk_size is None


class Around(torch.nn.Module):
    """Holds the model, and makes something of its loss."""

    def __init__(self, model: torch.nn.Module, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.model, self.change = model, change

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.change(self.model(*args, **options).loss)


def test_impossible_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = tiny_model()
    reads = Around(model, lambda loss: loss if loss.item() > 0 else -loss)
    in_a_dict = Around(model, lambda loss: {"loss": loss})
    for given, complaint in (
        ({"reserve": 2}, "reserve=2; expected a number in"),
        ({"batch": 0}, "batch=0; expected an integer of 1"),
        ({"batch": 2**40}, "batch=1099511627776"),
        ({"count": "all"}, "count='all'"),
        ({"budget": "much"}, "budget='much': expected a number of bytes"),
        ({"budget": "auto", "device": "cuda"}, "free on a GPU, .* none to ask for cuda; give the"),
        ({"optimizer_bytes": -1}, "optimizer_bytes=-1"),
        (
            {"optimizer_bytes": torch.optim.AdamW},
            "optimizer_bytes=<class.*expected a number of bytes",
        ),
        ({"autocast": True}, "autocast=True; expected None, torch.bfloat16 or"),
        ({"max_seqlen": "x"}, "max_seqlen='x'; expected an integer of 1"),
        ({"step_module": reads}, r"Around reads the values of tensors .*MemoryPlan.of"),
        ({"step_module": in_a_dict}, "Around returned a dict; expected the loss, or a tuple"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            model.plan_memory(**{"batch": 1, "seq": 16, "budget": "1GiB"} | given)
    for method, name in ((model.largest_batch, "seq"), (model.largest_seq, "batch")):
        with pytest.raises(ConfigError, match=f"{name}='x'; expected an integer"):
            method("x", "1GiB")  # type: ignore[arg-type]


def test_a_gpu_is_planned_for_by_its_number_and_with_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    assert Planner(tiny_model(), "1GiB", device=1).device == torch.device("cuda:1")
    monkeypatch.setattr(simulation, "choose", lambda device: ("torch", "triton is not installed"))
    with pytest.raises(ConfigError, match="Triton kernels, but triton is not installed"):
        small(1).plan_memory(1, 8, 10**9, device="cuda")
