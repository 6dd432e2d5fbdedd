"""The cases of test_parallel.py, which each of two gloo processes runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ligermodels import ConfigError, LigerLlama, MemoryPlan
from ligermodels.layers.recompute import KEEPS, Keep
from ligermodels.memory.fit import Planner
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from tests.families import OWN
from tests.memory.step_bytes import error_of_prediction
from tests.parallel.ranks import Case

WORLD = 2
BATCH, SEQ = 4, 12
# The sizes are small and odd, so that the ranks' shards differ in rows; heads are grouped.
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 20,
    "intermediate_size": 27,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "pad_token_id": 2,
}


def make(tied: bool, family: str = "llama") -> DecoderModel:
    torch.manual_seed(7)
    cls = families()[family]
    config = cls.config_class(
        **SIZES, **OWN[family], tie_word_embeddings=tied, initializer_range=0.3
    )
    return cls(config)


def data() -> tuple[Tensor, Tensor]:
    """Make halves with different numbers of valid labels, so that a mean of means is wrong."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, SEQ), generator=generator)
    ids[:, 5] = SIZES["pad_token_id"]
    labels = ids.clone()
    labels[0, :7] = -100
    labels[1, 4:] = -100
    return ids, labels


def count(labels: Tensor) -> int:
    return int((labels[:, 1:] != -100).sum())


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{name} has no gradient"
        grads[name.removeprefix("module.")] = whole(p.grad)
    return grads


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def shard(model: DecoderModel, mesh: DeviceMesh, **options: Any) -> DecoderModel:
    """Call fully_shard as users do: on each block, on an untied head, then on the root."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if not model.config.tie_word_embeddings:
        fully_shard(model.head, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train_step(wrapped: nn.Module, rank: int, steps: int = 1, **inputs: Tensor) -> float:
    """Return the loss and set the gradients of this rank's rows, in `steps` micro-batches.

    Wrappers average gradients over ranks, so the normalizer is the mean count of the ranks.
    """
    ids, labels = data()
    normalizer = count(labels) / WORLD
    rows = BATCH // WORLD
    mine = slice(rank * rows, (rank + 1) * rows)
    total = torch.zeros(())
    for micro in torch.arange(BATCH)[mine].chunk(steps):
        part = {name: tensor[micro] for name, tensor in inputs.items()}
        out = wrapped(ids[micro], labels=labels[micro], normalizer=normalizer, **part)
        out.loss.backward()
        total += out.loss.detach().float()
    dist.all_reduce(total)
    return total.item() / WORLD


def compare(
    model: DecoderModel, wrapped: nn.Module, rank: int, steps: int = 1, **inputs: Tensor
) -> dict[str, float]:
    """Compare the wrapped model's step with that of one process that sees the whole batch."""
    ids, labels = data()
    expected = model(ids, labels=labels, **inputs)
    expected.loss.backward()
    loss = train_step(wrapped, rank, steps, **inputs)
    ours, reference = gradients(wrapped), gradients(model)
    assert ours.keys() == reference.keys()
    result = {
        "loss": abs(loss - expected.loss.item()),
        "gradient": max(relative(ours[name], reference[name]) for name in reference),
    }
    with torch.no_grad():
        hidden = model(ids)
        inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        result["hidden"] = relative(wrapped(ids), hidden)
        result["logits"] = relative(inner.head.logits(hidden), model.head.logits(hidden))
    return result


def ddp(
    rank: int,
    mesh: DeviceMesh,
    tied: bool,
    steps: int = 1,
    family: str = "llama",
    plan: MemoryPlan | None = None,
) -> dict[str, float]:
    model = make(tied, family)
    wrapped = copy.deepcopy(model)
    wrapped.set_memory_plan(plan)
    return compare(model, DistributedDataParallel(wrapped), rank, steps)


def fsdp(
    rank: int,
    mesh: DeviceMesh,
    tied: bool,
    steps: int = 1,
    checkpointing: bool = False,
    family: str = "llama",
    plan: MemoryPlan | None = None,
    **options: Any,
) -> dict[str, float]:
    model = make(tied, family)
    wrapped = shard(copy.deepcopy(model), mesh, **options)
    if checkpointing:
        wrapped.activation_checkpointing_enable()
    if plan is not None:
        wrapped.set_memory_plan(plan)
    return compare(model, wrapped, rank, steps)


def fsdp_packed(rank: int, mesh: DeviceMesh, tied: bool) -> dict[str, float]:
    model = make(tied)
    positions = torch.cat([torch.arange(5), torch.arange(SEQ - 5)]).expand(BATCH, -1).clone()
    positions[1] = torch.arange(SEQ)
    ids, labels = data()
    expected = model(ids, labels=labels, position_ids=positions)
    wrapped = shard(copy.deepcopy(model), mesh)
    rows = slice(2 * rank, 2 * rank + 2)
    out = wrapped(
        ids[rows],
        labels=labels[rows],
        position_ids=positions[rows],
        normalizer=expected.num_valid.item() / WORLD,
    )
    expected.loss.backward()
    out.loss.backward()
    total = out.loss.detach().clone()
    dist.all_reduce(total)
    ours, reference = gradients(wrapped), gradients(model)
    return {
        "loss": abs(total.item() / WORLD - expected.loss.item()),
        "gradient": max(relative(ours[name], reference[name]) for name in reference),
    }


def fsdp_bf16(
    rank: int, mesh: DeviceMesh, tied: bool, family: str = "llama", **options: Any
) -> dict[str, float]:
    """Each rank's step equals that of a bf16 model; FSDP averages the gradients in float32."""
    model = make(tied, family)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = shard(copy.deepcopy(model), mesh, mp_policy=policy, **options)
    ids, labels = data()
    normalizer = count(labels) / WORLD
    expected, reference = 0.0, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for half in range(WORLD):
        low = copy.deepcopy(model).to(torch.bfloat16)
        rows = slice(2 * half, 2 * half + 2)
        out = low(ids[rows], labels=labels[rows], normalizer=normalizer)
        out.loss.backward()
        expected += out.loss.item() / WORLD
        for name, grad in gradients(low).items():
            reference[name] += grad.float() / WORLD
    loss = train_step(wrapped, rank)
    ours = gradients(wrapped)
    assert all(grad.dtype == torch.float32 for grad in ours.values())
    with torch.no_grad():
        hidden = wrapped(ids)
        assert hidden.dtype == torch.bfloat16
        low = copy.deepcopy(model).to(torch.bfloat16)
        result = {
            "hidden": relative(hidden, low(ids)),
            "logits": relative(wrapped.head.logits(hidden), low.head.logits(hidden)),
        }
    return result | {
        "loss": abs(loss - expected),
        "gradient": max(relative(ours[name], reference[name]) for name in reference),
    }


def fsdp_memory(rank: int, mesh: DeviceMesh, tied: bool, keep: Keep) -> dict[str, float]:
    """A simulation of sharded parameters predicts the bytes that FSDP2's step takes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make(tied), mesh, mp_policy=policy)
    model.set_memory_plan(MemoryPlan.uniform(len(model.layers), keep))
    # A thread of gloo may hold the tensors of a collective a moment longer.
    return {"bytes": max(0.0, abs(error_of_prediction(model, SEQ, steps=4)) - 0.01)}


def fsdp_every_linear(rank: int, mesh: DeviceMesh, tied: bool) -> dict[str, float]:
    """fully_shard on the projections makes layers call them; taking their weight would fail."""
    model = make(tied)
    wrapped = copy.deepcopy(model)
    for layer in wrapped.layers:
        for part in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            fully_shard(part, mesh=mesh)
        fully_shard(layer.input_layernorm, mesh=mesh)
    if not tied:
        fully_shard(wrapped.head.proj, mesh=mesh)
    return compare(model, fully_shard(wrapped, mesh=mesh), rank)


def fsdp_two_steps(rank: int, mesh: DeviceMesh, tied: bool) -> dict[str, float]:
    """Compare the weights after each of two optimizer steps on sharded parameters."""
    model = make(tied)
    wrapped = shard(copy.deepcopy(model), mesh)
    ids, labels = data()
    result = {"loss": 0.0, "weight": 0.0}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (model, wrapped)]
    for _ in range(2):
        expected = model(ids, labels=labels).loss
        expected.backward()
        loss = train_step(wrapped, rank)
        result["loss"] = max(result["loss"], abs(loss - expected.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ours = {name: whole(p) for name, p in wrapped.named_parameters()}
        for name, p in model.named_parameters():
            result["weight"] = max(result["weight"], relative(ours[name], p.detach()))
    return result


def fsdp_logits_first(rank: int, mesh: DeviceMesh, tied: bool) -> dict[str, float]:
    """Call head.logits before the root has run."""
    model = make(tied)
    wrapped = shard(copy.deepcopy(model), mesh)
    ids, _ = data()
    with torch.no_grad():
        hidden = model(ids)
        return {"logits": relative(wrapped.head.logits(hidden), model.head.logits(hidden))}


def fsdp_head_outside(rank: int, mesh: DeviceMesh, tied: bool) -> dict[str, float]:
    """A head with its own FSDP unit works alone; a tied head's error names the call to make."""
    model = make(tied)
    wrapped = shard(copy.deepcopy(model), mesh)
    ids, labels = data()
    hidden = model(ids).detach()
    if not tied:
        loss = wrapped.head(hidden, labels).loss
        return {"loss": abs(loss.item() - model.head(hidden, labels).loss.item())}
    try:
        wrapped.head(hidden, labels)
    except RuntimeError as error:
        assert "model(input_ids, labels=labels)" in str(error), error
        return {"loss": 0.0}
    raise AssertionError("the head computed a loss with a sharded weight")


def fsdp_meta(rank: int, mesh: DeviceMesh, tied: bool) -> dict[str, float]:
    """Build on the meta device, shard, materialise each shard, then load."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = make(tied)
    with torch.device("meta"):
        wrapped = LigerLlama(model.config)
    shard(wrapped, mesh)
    wrapped.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = model.state_dict() if rank == 0 else {}
    set_model_state_dict(wrapped, state, options=options)
    return compare(model, wrapped, rank)


def tensor_parallel(rank: int, mesh: DeviceMesh, tied: bool) -> dict[str, float]:
    """ColwiseParallel on a block's projections and the head adds hooks and DTensor weights."""
    model = make(tied)
    wrapped = copy.deepcopy(model)
    colwise = ColwiseParallel(output_layouts=Replicate())
    for layer in wrapped.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "self_attn.qkv_proj": colwise,
                "mlp.gate_up_proj": colwise,
                "mlp.down_proj": colwise,
            },
        )
    if not tied:
        parallelize_module(wrapped.head, mesh, {"proj": colwise})
    ids, labels = data()
    expected, out = model(ids, labels=labels), wrapped(ids, labels=labels)
    expected.loss.backward()
    out.loss.backward()
    ours, reference = gradients(wrapped), gradients(model)
    with torch.no_grad():
        hidden = model(ids)
        logits = relative(wrapped.head.logits(hidden), model.head.logits(hidden))
    return {
        "loss": abs(out.loss.item() - expected.loss.item()),
        "gradient": max(relative(ours[name], reference[name]) for name in reference),
        "logits": logits,
    }


def planned_together(rank: int, mesh: DeviceMesh, tied: bool) -> dict[str, float]:
    """The smallest budget of the ranks counts: all have the same plan, or the same error."""
    model = make(tied)
    least = Planner(model, 10**9).least_bytes(8, 64)
    plan = model.plan_memory(8, 64, least * (1 + 2 * rank))
    plans: list[Any] = [None] * WORLD
    dist.all_gather_object(plans, plan)
    assert plans == [plan] * WORLD and plan.recomputes
    try:
        model.plan_memory(8, 64, least - rank)
    except ConfigError as error:
        assert f"at least {least} bytes" in str(error), error
        assert plan.prediction is not None
        return {"budget": plan.prediction.budget - least}
    raise AssertionError("the smallest budget of the ranks is too small")


CASES: dict[str, Callable[[int, DeviceMesh, bool], dict[str, float]]] = {
    "ddp": ddp,
    "ddp, two accumulation steps": lambda *args: ddp(*args, steps=2),
    "fsdp": fsdp,
    "fsdp, two accumulation steps": lambda *args: fsdp(*args, steps=2),
    "fsdp, reshard after forward": lambda *args: fsdp(*args, reshard_after_forward=True),
    "fsdp, reshard, two accumulation steps": lambda *args: fsdp(
        *args, steps=2, reshard_after_forward=True
    ),
    "fsdp, checkpointing, reshard": lambda *args: fsdp(
        *args, checkpointing=True, reshard_after_forward=True
    ),
    "fsdp, packed documents": fsdp_packed,
    "fsdp, bf16 compute": fsdp_bf16,
    "fsdp, bf16 compute, reshard": lambda *args: fsdp_bf16(*args, reshard_after_forward=True),
    "fsdp, every linear": fsdp_every_linear,
    "fsdp, two optimizer steps": fsdp_two_steps,
    "fsdp, logits before the first forward": fsdp_logits_first,
    "fsdp, head outside the model": fsdp_head_outside,
    "fsdp, from the meta device": fsdp_meta,
    "tensor parallel projections": tensor_parallel,
    "a memory plan": planned_together,
}
RUNS = [(name, tied) for name in CASES for tied in (False, True)]
# Each level under each wrapper; tied and untied models take turns.
for number, plan in enumerate(
    [
        MemoryPlan.uniform(2, "no_gate_up"),
        MemoryPlan.uniform(2, "attention"),
        MemoryPlan.of(["input", "all"], mlp_tile=5),
        MemoryPlan.of(["attention", "no_gate_up"], mlp_tile=5),
    ]
):
    CASES |= {
        f"ddp, plan {number}": partial(ddp, plan=plan),
        f"fsdp, plan {number}": partial(fsdp, plan=plan),
        f"fsdp, reshard, plan {number}": partial(
            fsdp, plan=plan, steps=2, reshard_after_forward=True
        ),
    }
    RUNS += [(name, (number + step) % 2 == 0) for step, name in enumerate(list(CASES)[-3:])]
for number, keep in enumerate(KEEPS):
    CASES[f"fsdp, bytes, {keep}"] = partial(fsdp_memory, keep=keep)
    RUNS.append((f"fsdp, bytes, {keep}", number % 2 == 0))
# The wrapper, the family and the tied head do not interact: every pair of them occurs. Each family
# has two levels under each wrapper.
for number, family in enumerate(sorted(OWN.keys() - {"llama"})):
    low, high = (MemoryPlan.of(keeps) for keeps in (["input", "no_gate_up"], ["attention", "all"]))
    CASES |= {
        f"ddp, {family}": partial(ddp, family=family, plan=low),
        f"fsdp, plan, {family}": partial(fsdp, plan=high, family=family),
        f"fsdp, bf16 compute, {family}": partial(fsdp_bf16, family=family),
    }
    RUNS += [(name, (number + step) % 2 == 0) for step, name in enumerate(list(CASES)[-3:])]
# Half of them; of each case that has both, tied and untied models take turns. Of the families,
# which come last, one with each wrapper.
ALL_FAMILIES = 3 * (len(OWN) - 1)
SAMPLE = [
    run
    for number, run in enumerate(RUNS)
    if (number // 2 + number) % 2 == 0
    and (number < len(RUNS) - ALL_FAMILIES or (number + number // 3) % 3 == 0)
]


def cases(ranks: int, whole: bool) -> dict[str, Case]:
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        f"{name}, {'tied' if tied else 'untied'}": partial(run, name, mesh, tied)
        for name, tied in (RUNS if whole else SAMPLE)
    }


def run(name: str, mesh: DeviceMesh, tied: bool, rank: int, place: Path) -> dict[str, float]:
    return CASES[name](rank, mesh, tied)
