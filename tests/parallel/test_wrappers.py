"""Models in PyTorch's own wrappers compute in two processes what one process computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ligermodels import ConfigError, LayerPlan, MemoryPlan
from ligermodels.layers.recompute import CheckpointingPolicy
from ligermodels.memory.fit import Planner
from ligermodels.models.base import DecoderModel
from tests.families import OWN
from tests.parallel.ranks import Case, check, run_ranks
from tests.parallel.steps import (
    BATCH,
    SEQ,
    data,
    differences,
    error_of_bytes,
    gradients,
    make,
    relative,
)

WORLD = 2
# Each level of keeping; the last one is what checkpointing means.
PLANS = (
    None,
    MemoryPlan.uniform(2, "no_gate_up"),
    MemoryPlan.of([LayerPlan("attention", tile=5), LayerPlan("no_gate_up", tile=5)]),
    MemoryPlan.of([LayerPlan("input", tile=5), LayerPlan(tile=5)]),
    MemoryPlan.uniform(2, "input"),
)


@pytest.mark.usefixtures("rows_at_once")
def test_two_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(run_ranks(__name__, WORLD, tmp_path), subtests)


def shard(model: DecoderModel, mesh: DeviceMesh, **options: Any) -> DecoderModel:
    """Call fully_shard as users do: on each block, on an untied head, then on the root."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if not model.config.tie_word_embeddings:
        fully_shard(model.head, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def every_linear(model: DecoderModel, mesh: DeviceMesh) -> DecoderModel:
    """fully_shard on the projections makes layers call them; taking their weight would fail."""
    for layer in model.layers:
        for part in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            fully_shard(part, mesh=mesh)
        fully_shard(layer.input_layernorm, mesh=mesh)
    if not model.config.tie_word_embeddings:
        fully_shard(model.head.proj, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def from_meta(model: DecoderModel, mesh: DeviceMesh) -> DecoderModel:
    """Build on the meta device, shard, materialise each shard, then load."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    with torch.device("meta"):
        sharded = shard(type(model)(model.config), mesh)
    sharded.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = model.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(sharded, state, options=options)
    return sharded


def colwise(model: DecoderModel, mesh: DeviceMesh) -> DecoderModel:
    """ColwiseParallel on a block's projections and the head adds hooks and DTensor weights."""
    names = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
    style = ColwiseParallel(output_layouts=Replicate())
    for layer in model.layers:
        parallelize_module(layer, mesh, dict.fromkeys(names, style))
    if not model.config.tie_word_embeddings:
        parallelize_module(model.head, mesh, {"proj": style})
    return model


def compare(
    wrap: Callable[[DecoderModel], nn.Module],
    tied: bool,
    rank: int,
    folder: Path,
    *,
    family: str = "llama",
    steps: int = 1,
    plan: MemoryPlan | None = None,
    ranks: int = WORLD,
    **inputs: Tensor,
) -> dict[str, float]:
    """Compare the wrapped model's step with that of one process that sees the whole batch.

    Wrappers average gradients over ranks, so the normalizer is the mean count of the ranks.
    """
    model = make(tied, family)
    wrapped = wrap(copy.deepcopy(model))
    inner: Any = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    inner.set_memory_plan(plan)
    ids, labels = data()
    expected = model(ids, labels=labels, **inputs)
    expected.loss.backward()
    total = torch.zeros(())
    for rows in torch.arange(BATCH).chunk(ranks)[rank % ranks].chunk(steps):
        part = {name: tensor[rows] for name, tensor in inputs.items()}
        part["normalizer"] = expected.num_valid / ranks
        out = wrapped(ids[rows], labels=labels[rows], **part)
        out.loss.backward()
        total += out.loss.detach()
    dist.all_reduce(total)
    result = {
        "loss": abs(total.item() / WORLD - expected.loss.item()),
        "gradient": differences(gradients(wrapped), gradients(model)),
    }
    with torch.no_grad():
        hidden = model(ids)
        result["hidden"] = relative(wrapped(ids), hidden)
        result["logits"] = relative(inner.head.logits(hidden), model.head.logits(hidden))
    return result


def bytes_of_a_step(
    mesh: DeviceMesh, policy: CheckpointingPolicy, rank: int, folder: Path
) -> dict[str, float]:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make(policy == "input"), mesh, mp_policy=precision)
    return error_of_bytes(model, policy, SEQ, 0.01)


def head_alone(mesh: DeviceMesh, tied: bool, rank: int, folder: Path) -> dict[str, float]:
    """Before the root has run, logits are right; a tied head's loss names the call to make."""
    model = make(tied)
    wrapped = shard(copy.deepcopy(model), mesh)
    ids, labels = data()
    with torch.no_grad():
        hidden = model(ids)
        result = {"logits": relative(wrapped.head.logits(hidden), model.head.logits(hidden))}
    wrapped = shard(copy.deepcopy(model), mesh)
    if tied:
        with pytest.raises(RuntimeError, match=r"model\(input_ids, labels=labels\)"):
            wrapped.head(hidden, labels)
        return result
    loss = wrapped.head(hidden, labels).loss
    return result | {"loss": abs(loss.item() - model.head(hidden, labels).loss.item())}


def planned_together(rank: int, folder: Path) -> dict[str, float]:
    """The smallest budget of the ranks counts: all have the same plan, or the same error."""
    model = make(True)
    least = Planner(model, 10**9).least_bytes(8, 64)
    plan = model.plan_memory(8, 64, least * (1 + 2 * rank))
    plans: list[Any] = [None] * WORLD
    dist.all_gather_object(plans, plan)
    assert plans == [plan] * WORLD and plan.recomputes and plan.prediction is not None
    with pytest.raises(ConfigError, match=f"at least {least} bytes"):
        model.plan_memory(8, 64, least - rank)
    return {"budget": plan.prediction.budget - least}


def cases(ranks: int) -> dict[str, Case]:
    mesh = init_device_mesh("cpu", (ranks,))
    positions = torch.cat([torch.arange(5), torch.arange(SEQ - 5)]).expand(BATCH, -1).clone()
    positions[1] = torch.arange(SEQ)
    found: dict[str, Case] = {"a memory plan": planned_together}
    wrappers: dict[str, Callable[[DecoderModel], nn.Module]] = {
        "ddp": DistributedDataParallel,
        "fsdp": partial(shard, mesh=mesh),
        "fsdp, reshard": partial(shard, mesh=mesh, reshard_after_forward=True),
    }
    # Each family in one of the wrappers; tied heads, plans and micro-batches in turn.
    for number, family in enumerate(sorted(OWN)):
        name, wrap = [*wrappers.items()][number % 3]
        tied, plan = (number // 2) % 2 == 0, PLANS[number % len(PLANS)]
        found[f"{name}, {family}"] = partial(
            compare, wrap, tied, family=family, plan=plan, steps=1 + number % 2
        )
    small = {"family": "small gemma4", "plan": MemoryPlan.uniform(4, "attention")}
    found["fsdp, small gemma4"] = partial(compare, wrappers["fsdp"], True, **small)
    for tied in (False, True):
        head = "tied" if tied else "untied"
        packed = partial(compare, wrappers["fsdp"], tied, position_ids=positions)
        found |= {
            f"packed documents, {head}": packed,
            f"every linear, {head}": partial(
                compare, partial(every_linear, mesh=mesh), tied, plan=PLANS[2]
            ),
            f"from the meta device, {head}": partial(compare, partial(from_meta, mesh=mesh), tied),
            f"tensor parallel projections, {head}": partial(
                compare, partial(colwise, mesh=mesh), tied, ranks=1
            ),
            f"head outside the model, {head}": partial(head_alone, mesh, tied),
        }
    return found | {
        f"bytes, {policy}": partial(bytes_of_a_step, mesh, policy) for policy in ("all", "input")
    }
