"""Models with experts, sharded by FSDP2 or by experts, compute what one process computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ligermodels import ConfigError, MemoryPlan, mean_over_ranks, shard
from ligermodels.adapters.adapted_model import adapter_of, add_adapters, quantize
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.expert import expert_parallel
from tests.parallel import test_shard
from tests.parallel.ranks import Case, check, run_ranks
from tests.parallel.steps import (
    count,
    data,
    differences,
    error_of_bytes,
    gradients,
    make,
    mesh_of,
    relative,
)
from tests.parallel.test_shard import own_rows
from tests.parallel.test_tensor import Mesh

BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
# Two ranks have 3 and 2 experts, and four ranks 2, 1, 1 and 1. Those of gpt-oss have biases.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 12, "mlp_only_layers": []},
    "gpt_oss": {"num_local_experts": 5},
    "qwen3_5_moe_text": {},
}


@pytest.mark.usefixtures("rows_at_once")
def test_two_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(run_ranks(__name__, 2, tmp_path), subtests)


@pytest.mark.long
def test_four_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(run_ranks(__name__, 4, tmp_path), subtests)


def make_experts(tied: bool, family: str = "qwen3_moe", **changes: Any) -> DecoderModel:
    if family == "gemma4_text":  # whose config has no such losses
        model = make(tied, family, **changes)
        model.router_losses = BALANCE["router_aux_loss_coef"], BALANCE["router_z_loss_coef"]
        return model
    name = family if family in EXPERTS else "qwen3_moe"
    return make(tied, name, **({"num_experts_per_tok": 2} | BALANCE | EXPERTS[name] | changes))


def cases(ranks: int) -> dict[str, Case]:
    layouts = {"ep": mesh_of(ep=ranks)}
    if ranks == 4:
        layouts |= {
            "fsdp and ep": mesh_of(dp_shard=2, ep=2),
            "ep and fsdp": mesh_of(ep=2, dp_shard=2),
            "ddp and ep": mesh_of(dp_replicate=2, ep=2),
            "ep and cp": mesh_of(ep=2, cp=2),
        }
    else:
        layouts["fsdp"] = mesh_of(dp_shard=2)
    found: dict[str, Case] = {}
    for layout, mesh in layouts.items():
        steps: dict[str, dict[str, Any]] = {
            "a step": {"reshard_after_forward": True, "dtype": torch.float32},
            "micro-batches": {"steps": 2, "tied": True},
            "a memory plan": {"plan": MemoryPlan.of(["input", "attention"])},
            "all to one rank": {"skewed": True},
            "compiled": {
                "compiles": "aot_eager" if ranks == 4 else "eager",
                "plan": MemoryPlan.of(["attention", "no_gate_up"]),
            },
            "biases": {"family": "gpt_oss"},
            "an MLP for all tokens": {"family": "qwen3_5_moe_text"},
            "beside an MLP": {"family": "gemma4_text"},
        }
        for name, how in steps.items():
            if layout == "ep and cp" and "MLP for" in name:
                continue  # gated delta nets take whole rows
            if name == "compiled" and layout != ("ep" if ranks == 2 else "fsdp and ep"):
                continue  # it takes seconds
            if layout != "fsdp" or "micro" in name:  # test_shard.py has the others
                found[f"{layout}, {name}"] = partial(step, mesh, **how)
        case: Callable[..., dict[str, float]]
        others = [test_shard.save, test_shard.clipping, test_shard.training_state]
        if layout != "ep and cp":  # the rows are too short
            for case in others[: 1 if layout == "fsdp" else None]:
                found[f"{layout}, {case.__name__}"] = partial(with_experts, partial(case, mesh))
            load = partial(test_shard.load, mesh, False)
            found[f"{layout}, load"] = partial(with_experts, load)
        if "cp" not in layout:
            found[f"{layout}, adapters"] = partial(adapters, mesh)
        if layout == "ep" and ranks == 2:
            found["bytes"] = partial(memory, mesh)
        if layout != "fsdp":
            state = partial(test_shard.state_dict, mesh)
            found[f"{layout}, state dict"] = partial(with_experts, state)
    return found


def memory(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    """A simulation takes loads to be even, which they are if each token gets every expert."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
    return error_of_bytes(shard(make_experts(True, **sizes), mesh), "input", 64, 0.02)


def adapters(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    """Adapters on all linears and on experts of 4 bits, and the tensors of their export."""
    model = make_experts(False)
    quantize(model, 4, torch.device("cpu"))
    add_adapters(model, 2, 4.0)
    for name, weight in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(weight, std=0.1)
    sharded = shard(copy.deepcopy(model), mesh)
    ids, labels = data()
    expected = model(ids, labels=labels)
    expected.loss.backward()
    rows = own_rows(mesh)
    normalizer = mean_over_ranks(sharded, count(labels[rows]))
    loss = sharded(ids[rows], labels=labels[rows], normalizer=normalizer).loss
    loss.backward()
    dist.all_reduce(loss.detach())
    (written, config), (whole, expected_config) = adapter_of(sharded), adapter_of(model)
    assert written.keys() == whole.keys() and config == expected_config
    return {
        "loss": relative(loss / mesh.size(), expected.loss),
        "gradient": differences(gradients(sharded), gradients(model)),
        "factors": max(relative(written[name], x) for name, x in whole.items()),
    }


def with_experts(case: Case, rank: int, folder: Path) -> dict[str, float]:
    """Run a case of test_shard.py on a model with experts."""
    with mock.patch.object(test_shard, "make", make_experts):
        return case(rank, folder)


def step(
    mesh: DeviceMesh,
    rank: int,
    folder: Path,
    *,
    family: str = "qwen3_moe",
    tied: bool = False,
    steps: int = 1,
    plan: MemoryPlan | None = None,
    skewed: bool = False,
    compiles: str | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, float]:
    """The balance of a step is that of one batch, although ranks have other rows and loads.

    In float32, the order of sums alone may change a gradient by more than 1e-6, but all of them
    together by less, unless keys come from other ranks.
    """
    model = make_experts(tied, family).to(dtype)
    sharded = copy.deepcopy(model)
    if compiles:
        torch._dynamo.reset()  # beyond a number of compilations, a frame runs in eager mode
        sharded.layers[0].compile(backend=compiles)  # it takes seconds, so one is enough
    shard(sharded, mesh, **options)
    sharded.set_memory_plan(plan)
    ids, labels = data()
    given = torch.tensor([1, 0]).expand(*ids.shape, 2, 2) if skewed else None  # all to rank 0
    expected = model(ids, labels=labels, routed_experts=given)
    expected.loss.backward()
    rows = own_rows(mesh)
    micros, counts = rows.chunk(steps), None
    normalizer = mean_over_ranks(sharded, count(labels[rows]))
    if steps > 1:
        with torch.no_grad():
            counts = sum(sharded(ids[x], return_routing=True)[1].counts for x in micros)
    total = torch.zeros(2, dtype=torch.float64)
    for micro in micros:
        routes = None if given is None else given[micro]
        how = {"expert_counts": counts, "routed_experts": routes}
        out = sharded(ids[micro], labels=labels[micro], normalizer=normalizer, **how)
        out.loss.backward()
        total += torch.stack([out.loss.detach(), out.auxiliary_loss.detach()])
    dist.all_reduce(total)
    loss, auxiliary = total / mesh.size()
    ours, theirs = gradients(sharded), gradients(model)
    learned = {
        "loss": relative(loss, expected.loss),
        "auxiliary loss": relative(auxiliary, expected.auxiliary_loss),
        "gradient" if dtype is torch.float32 else "each grad": differences(ours, theirs),
    }
    if "cp" not in (mesh.mesh_dim_names or ()):
        both = (torch.cat([x.flatten() for x in each.values()]) for each in (ours, theirs))
        learned["all grads"] = relative(*both)
    if compiles:
        return learned
    with torch.no_grad():
        hidden, routing = sharded(ids, return_routing=True)
        whole, same = model(ids, return_routing=True)
        again = sharded(ids, routed_experts=same.experts)
    return learned | {
        "hidden": relative(hidden, whole),
        "hidden, given routes": relative(again, whole),
        "experts": float((routing.experts != same.experts).sum()),
    }


def test_what_cannot_be_split_is_refused() -> None:
    model = make_experts(True)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"5 experts of layers.0.mlp cannot be split over 6"):
        expert_parallel(model, Mesh(6))  # type: ignore[arg-type]
    model.layers[1].mlp.shared = torch.nn.Linear(20, 20)
    with pytest.raises(ConfigError, match=r"layers.1.mlp.shared \(Linear\) cannot be split"):
        expert_parallel(model, Mesh(2))  # type: ignore[arg-type]
    del model.layers[1].mlp.shared
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match="no layer of LigerLlama has experts"):
        expert_parallel(make(True), Mesh(2))  # type: ignore[arg-type]
