"""Models that `shard` has spread over processes compute what one process computes."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from ligermodels import (
    AutoLiger,
    ConfigError,
    LayerPlan,
    MemoryPlan,
    clip_grad_norm_,
    families,
    mean_over_ranks,
    shard,
    sharded_state,
)
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.heads.classifier import classifier_class
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import splits_of
from tests import outside
from tests.families import FAMILIES, OWN
from tests.parallel.ranks import Case, check, run_ranks
from tests.parallel.steps import (
    SIZES,
    count,
    data,
    differences,
    gradients,
    make,
    mesh_of,
    outputs,
    relative,
    upstream,
)
from tests.rounding import ADAM_EPSILON

OUTSIDE = "cohere"  # a family from outside, whose modules tensor parallelism can cut


def test_two_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(run_ranks(__name__, 2, tmp_path), subtests)


@pytest.mark.long
def test_four_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(run_ranks(__name__, 4, tmp_path), subtests)


@pytest.mark.long  # with two processes, the test above has copies on one dimension
def test_copies_of_key_heads_on_meshes_of_two_dimensions(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    check(run_ranks(__name__, 4, tmp_path, True), subtests)


def meshes(ranks: int) -> dict[str, DeviceMesh]:
    """Return the layouts that so many ranks can have."""
    mesh = mesh_of
    if ranks == 4:
        found = {"hsdp": mesh(dp_replicate=2, dp_shard=2), "fsdp and tp": mesh(dp_shard=2, tp=2)}
        found |= {"ddp and tp": mesh(dp_replicate=2, tp=2), "tp": mesh(tp=4)}
    else:
        found = {name: mesh(**{name: ranks}) for name in ("dp_replicate", "dp_shard", "tp")}
    return found


def cases(ranks: int, only_copies: bool = False) -> dict[str, Case]:
    layouts = meshes(ranks)
    if only_copies:
        cut = {"tp and fsdp": mesh_of(tp=2, dp_shard=2), "cp and tp": mesh_of(cp=2, tp=2)}
        cut["ddp and tp"] = layouts["ddp and tp"]
        return {k: v for layout, mesh in cut.items() for k, v in copies(layout, mesh).items()}
    found: dict[str, Case] = {"refused meshes": refused}
    backwards = DeviceMesh("cpu", [*range(ranks)][::-1], mesh_dim_names=("dp_shard",))
    found["ranks in another order, save"] = partial(save, backwards)
    plan = MemoryPlan.of([LayerPlan("input", tile=5), LayerPlan(tile=5)])
    for layout, mesh in layouts.items():
        steps: dict[str, dict[str, Any]] = {
            "unsynced": {"tied": True, "steps": 2, "unsynced": True},
            "a memory plan, reshard": {"plan": plan, "reshard_after_forward": True},
        }
        # These have all kinds of blocks. test_wrappers.py has every family in DDP or FSDP2.
        names = sorted(OWN) if ranks == 4 else ["gemma2", "gemma3_text", "gpt_oss", "llama"]
        if "tp" in layout:  # which cannot cut experts, and norms over all heads
            names = [name for name in names if not FAMILIES[name].experts and "olmo" not in name]
            names = [name for name in names if not FAMILIES[name].mixers]
        for number, family in enumerate(names):
            steps[family] = {"family": family, "tied": number % 2 == 0, "steps": 1 + number % 2}
        outside.family(OUTSIDE)
        steps[OUTSIDE] = {"family": OUTSIDE}
        if ranks == 4:  # Compiling takes seconds.
            steps["compiled"] = {"tied": True, "compiles": True}
        found |= {f"{layout}, {each}": partial(step, mesh, **how) for each, how in steps.items()}
        others = {
            "load": partial(load, mesh, False),
            "load, tied": partial(load, mesh, True),
            "save": partial(save, mesh),
            "save, an error": partial(save_fails, mesh),
            "training state": partial(training_state, mesh),
            "logits and their gradient": partial(logits, mesh),
            "norm of the gradients": partial(clipping, mesh),
        }
        if layout == "dp_replicate":  # the ranks of "dp_shard" have other rows of the state
            del others["training state"]
        if "tp" in layout:
            others["state dict"] = partial(state_dict, mesh)
            found |= copies(layout, mesh)
        else:
            others |= {"bf16": partial(bf16, mesh), "classifier": partial(classifier, mesh)}
        for name, options in HEAD_OPTIONS.items() if layout != "dp_replicate" else ():
            others[f"head, {name}"] = partial(head, mesh, options)
        found |= {f"{layout}, {name}": case for name, case in others.items()}
    return found


def copies(layout: str, mesh: DeviceMesh) -> dict[str, Case]:
    """Return cases in which several ranks of tensor parallelism have the same key heads."""
    heads = mesh["tp"].size() // 2
    sizes = {"num_key_value_heads": heads}
    return {
        f"{layout}, {heads} key heads": partial(step, mesh, family="qwen2", sizes=sizes),
        f"{layout}, {heads} key heads, norm": partial(clipping, mesh, family="qwen2", sizes=sizes),
        f"{layout}, {heads} key heads, written": partial(written, mesh, sizes),
    }


def own_rows(mesh: DeviceMesh) -> torch.Tensor:
    """Return the rows of this rank. The ranks of a tp or a cp group have the same."""
    number, ranks = 0, 1
    for name in mesh.mesh_dim_names or ():
        if name not in ("tp", "cp"):
            number = number * mesh[name].size() + mesh[name].get_local_rank()
            ranks *= mesh[name].size()
    return torch.arange(len(data()[0])).chunk(ranks)[number]


def train_step(
    sharded: DecoderModel, mesh: DeviceMesh, steps: int = 1, unsynced: bool = False
) -> float:
    """Run a step of this rank's rows, in micro-batches; return the loss of all ranks."""
    ids, labels = data()
    rows = own_rows(mesh)
    normalizer = mean_over_ranks(sharded, count(labels[rows]))
    total = torch.zeros(())
    micros = rows.chunk(steps)
    for micro in micros:
        sharded.set_requires_gradient_sync(not unsynced or micro is micros[-1])
        out = sharded(ids[micro], labels=labels[micro], normalizer=normalizer)
        out.loss.backward()
        total += out.loss.detach().float()
    dist.all_reduce(total)
    return total.item() / mesh.size()


def step(
    mesh: DeviceMesh,
    rank: int,
    folder: Path,
    *,
    family: str = "llama",
    tied: bool = False,
    steps: int = 1,
    unsynced: bool = False,
    plan: MemoryPlan | None = None,
    compiles: bool = False,
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    model = make(tied, family, **(sizes or {}))
    sharded = copy.deepcopy(model)
    for layer in sharded.layers if compiles else ():
        layer.compile(backend="aot_eager")
    shard(sharded, mesh, **options)
    sharded.set_memory_plan(plan)
    ids, labels = data()
    expected = model(ids, labels=labels)
    expected.loss.backward()
    loss = train_step(sharded, mesh, steps, unsynced)
    result = {
        "loss": abs(loss / expected.loss.item() - 1),
        "gradient": differences(gradients(sharded), gradients(model)),
    }
    with torch.no_grad():
        return result | {"hidden": relative(sharded(ids), model(ids))}


def classifier(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    """The ranks of a cp group have the same rows, and each sees whole hidden states."""
    ids, rows = data()[0], own_rows(mesh)
    labels = torch.arange(len(ids)) % 3
    model = classifier_class(families()["llama"]).from_model(make(False), 3)
    with torch.no_grad():
        model.head.score.weight.copy_(
            torch.linspace(-1, 1, model.head.score.weight.numel()).view(3, -1)
        )
    sharded = shard(copy.deepcopy(model), mesh)
    expected, out = model(ids, labels), sharded(ids[rows], labels[rows])
    expected.loss.backward()
    out.loss.backward()
    return {
        "logits": relative(out.logits, expected.logits[rows]),
        "gradient": differences(gradients(sharded), gradients(model)),
    }


def refused(rank: int, folder: Path) -> dict[str, float]:
    with pytest.raises(ConfigError, match="the mesh has 1 ranks"):
        shard(make(True), DeviceMesh("cpu", [0]))
    with pytest.raises(ConfigError, match="put dp_replicate before dp_shard"):
        shard(make(True), mesh_of(dp_shard=dist.get_world_size(), dp_replicate=1))
    classifies = classifier_class(families()["llama"]).from_model(make(True))
    with pytest.raises(ConfigError, match="tensor parallelism: a classifier"):
        shard(classifies, mesh_of(tp=dist.get_world_size()))
    return {"refused": 0.0}


def bf16(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    """A float32 normalizer is not rounded, and gradients are those of bfloat16 weights, summed."""
    model = make(False)
    sharded = shard(copy.deepcopy(model), mesh, compute_dtype=torch.bfloat16)
    ids, labels = data()
    ranks = mesh.size()
    rows = [*torch.arange(len(ids)).chunk(ranks)]
    normalizer = torch.tensor(count(labels) / ranks + 0.123)
    assert normalizer.bfloat16() != normalizer
    reference = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    losses = []
    for each in rows:
        low = copy.deepcopy(model).to(torch.bfloat16)
        out = low(ids[each], labels=labels[each], normalizer=normalizer)
        out.loss.backward()
        losses.append(out.loss.item())
        for name, grad in gradients(low).items():
            reference[name] += grad.float() / ranks
    out = sharded(ids[rows[rank]], labels=labels[rows[rank]], normalizer=normalizer)
    out.loss.backward()
    ours = gradients(sharded)
    assert all(grad.dtype == torch.float32 for grad in ours.values())
    with torch.no_grad():
        assert sharded(ids).dtype == torch.bfloat16
    return {"loss": abs(out.loss.item() - losses[rank]), "gradient": differences(ours, reference)}


WEIGHTS = torch.linspace(0.5, 2, SIZES["vocab_size"])
HEAD_OPTIONS: dict[str, dict[str, Any]] = {
    "of the loss": {
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "softcap": 3.0,
        "class_weights": WEIGHTS,
        "chunk_size": 5,
    },
    "a budget, sum": {"max_scratch_bytes": 12000, "logit_scale": 0.5, "reduction": "sum"},
    "tokens": {"reduction": "none", "return_token_stats": True, "softcap": 5.0},
    "skipped tokens": {
        "reduction": "none",
        "return_token_stats": True,
        "chunk_size": 7,
        "skip_ignored": True,
    },
    "of rows": {"loss_function": lambda tokens, _: tokens.log_probs.sum(1).square().sum()},
}


def head(mesh: DeviceMesh, options: dict[str, Any], rank: int, folder: Path) -> dict[str, float]:
    """The head of a sharded model returns what a whole one returns, with any option."""
    model = make(False)
    sharded = shard(copy.deepcopy(model), mesh)
    rows = own_rows(mesh)
    ids, labels = (x[rows] for x in data())
    outs = []
    for each in (sharded, model):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out = each(ids, labels=labels, **options)
        assert not [w for w in said if "view" in str(w.message)]  # FSDP2 warns of them
        total = (out.loss * upstream(labels)).sum()
        if out.token_log_probs is not None:
            total = total + (out.token_log_probs * upstream(labels)).sum()
            total = total + out.token_entropy.sum()
        total.backward()
        outs.append(out)
    result = outputs(*outs)
    if len(rows) == len(data()[0]):
        result["gradient"] = differences(gradients(sharded), gradients(model))
    return result


def logits(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    model = make(True)
    sharded = shard(copy.deepcopy(model), mesh)
    ids, _ = data()
    hidden = model(ids).detach()
    mine, whole = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    ours, theirs = sharded.head.logits(mine), model.head.logits(whole)
    for out in (ours, theirs):
        (out * upstream(theirs)).sum().backward()
    assert mine.grad is not None and whole.grad is not None
    return {"logits": relative(ours, theirs), "gradient": relative(mine.grad, whole.grad)}


def clipping(
    mesh: DeviceMesh,
    rank: int,
    folder: Path,
    family: str = "llama",
    sizes: dict[str, Any] | None = None,
) -> dict[str, float]:
    model = make(True, family, **(sizes or {}))
    sharded = shard(copy.deepcopy(model), mesh)
    ids, labels = data()
    model(ids, labels=labels).loss.backward()
    train_step(sharded, mesh)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with torch.no_grad():
        sharded(ids)  # leaves gathered weights behind
    mean = mean_over_ranks(sharded, 3)
    norm = clip_grad_norm_(sharded, 0.01)
    return {
        "mean": abs(mean - 3),
        "norm": relative(norm, expected),
        "gradient": differences(gradients(sharded), gradients(model)),
    }


def load(mesh: DeviceMesh, tied: bool, rank: int, folder: Path) -> dict[str, float]:
    model = make(tied)
    if rank == 0:
        model.save_hf(folder / "model")
    dist.barrier()
    whole = AutoLiger.from_hf(folder / "model")
    fill, read = SafetensorsFile._fill, []

    def counted(file: Any, name: str, offset: int, rest: memoryview) -> None:
        read.append(len(rest))
        fill(file, name, offset, rest)

    with mock.patch.object(SafetensorsFile, "_fill", counted):
        sharded = AutoLiger.from_hf(folder / "model", device="meta")
        assert not read
        shard(sharded, mesh)
    ours = {name: sharded.whole_parameter(name) for name, _ in sharded.named_parameters()}
    sizes = [p.nbytes for p in whole.parameters()]
    names = mesh.mesh_dim_names or ()
    parts = mesh.size() // (mesh["dp_replicate"].size() if "dp_replicate" in names else 1)
    return {
        "weights": differences(ours, dict(whole.named_parameters())),
        "bytes read": max(0.0, sum(read) - sum(sizes) / parts - max(sizes)),
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def save(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    """The files are those of a whole model, bit for bit."""
    model = make(False)
    sharded = shard(copy.deepcopy(model), mesh)
    with torch.no_grad():
        sharded(data()[0])  # leaves gathered weights behind
    sharded.save_hf(folder / "ours", max_shard_size=5000)
    if rank == 0:
        model.save_hf(folder / "whole", max_shard_size=5000)
    dist.barrier()
    ours, whole = contents(folder / "ours"), contents(folder / "whole")
    assert len(json.loads(ours["model.safetensors.index.json"])["weight_map"]) > 1
    return {"files": float(ours != whole)}


def written(mesh: DeviceMesh, sizes: dict[str, Any], rank: int, folder: Path) -> dict[str, float]:
    """A checkpoint gets every element of a parameter once from the ranks of a tp group."""
    sharded = shard(make(True, "qwen2", **sizes), mesh)
    state, result = sharded.state_dict(), {}
    for name in splits_of(sharded):
        mine = torch.zeros(state[name].shape)
        for item in state[name].__create_write_items__(name, None):
            chunk = item.tensor_data.chunk
            mine[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))] += 1
        copies = mesh.size() // mesh["tp"].size()
        if "dp_replicate" not in (mesh.mesh_dim_names or ()):
            copies = 1  # the other ranks have other rows
        dist.all_reduce(mine)
        result[name] = float((mine != copies).sum())
    return result


def state_dict(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    """torch's checkpoints hold whole parameters, which any other layout reads."""
    model = make(True, "qwen2")  # it has biases
    sharded = shard(copy.deepcopy(model), mesh)
    with torch.no_grad():
        sharded(data()[0])  # leaves gathered weights behind
    state = sharded.state_dict()
    wholes = {name: x.full_tensor() for name, x in state.items()}
    result = {"full_tensor": differences(wholes, model.state_dict())}
    with pytest.raises(NotImplementedError, match="full_tensor"):
        state[next(iter(splits_of(sharded)))].clone()
    dcp.save(state, checkpoint_id=folder / "dcp")
    fresh = make(True, "qwen2", initializer_range=0.1)
    dcp.load(alone := fresh.state_dict(), checkpoint_id=folder / "dcp")
    result["one process"] = differences(alone, model.state_dict())
    second = shard(make(True, "qwen2", initializer_range=0.1), mesh_of(dp_shard=mesh.size()))
    dcp.load(parts := second.state_dict(), checkpoint_id=folder / "dcp")
    second.load_state_dict(parts)
    third = shard(make(True, "qwen2", initializer_range=0.1), mesh)
    third.load_state_dict(state)
    for name, each in (("fsdp", second), ("another model", third)):
        whole = {key: each.whole_parameter(key) for key in wholes}
        result[name] = differences(whole, model.state_dict())
    return result


def training_state(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    """Weights and AdamW's state go to another layout, and to one process, and train on there."""
    ids, labels = data()

    def steps(model: DecoderModel, optimizer: torch.optim.Optimizer, mesh: Any, number: int) -> Any:
        for _ in range(number):
            if mesh is None:
                model(ids, labels=labels).loss.backward()
            else:
                train_step(model, mesh)
            optimizer.step()
            optimizer.zero_grad()
        return {name: model.whole_parameter(name).detach() for name, _ in model.named_parameters()}

    def made(mesh: Any, **changes: Any) -> tuple[DecoderModel, torch.optim.Optimizer]:
        model = make(True, **changes)
        model = model if mesh is None else shard(model, mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM_EPSILON)

    first = made(mesh)
    steps(*first, mesh, 2)
    dcp.save(sharded_state(*first), checkpoint_id=folder / "dcp")
    expected, result = steps(*first, mesh, 2), {}
    for name, layout in (("one process", None), ("fsdp", mesh_of(dp_shard=mesh.size()))):
        second = made(layout, initializer_range=0.1)
        dcp.load(sharded_state(*second), checkpoint_id=folder / "dcp")
        result[f"{name}, gradients' effect"] = differences(steps(*second, layout, 2), expected)
    return result


def save_fails(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    """An error of the rank that writes is raised on all, with the same line."""
    sharded = shard(make(False), mesh)
    with torch.no_grad():
        for parameter in sharded.layers[1].parameters():
            parameter.fill_(float("nan"))
    try:
        sharded.save_hf(folder / "ours")
    except Exception as error:
        assert "NaN" in str(error), error
        return {"left behind": float((folder / "ours").exists())}
    raise AssertionError("NaN was saved")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sharded_model_computes_in_the_dtype_of_its_weights(dtype, one_rank: None) -> None:
    """Neither its products nor its gradients are rounded, unless that is asked for."""
    model = make(True).to(dtype)
    ids, labels = data()
    model(ids, labels=labels).loss.backward()
    expected = gradients(model)
    sharded = shard(make(True).to(dtype))
    loss = sharded(ids, labels=labels).loss
    loss.backward()
    found = gradients(sharded)
    close = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    assert loss.item() == pytest.approx(model(ids, labels=labels).loss.item(), rel=close)
    for name, grad in expected.items():
        assert found[name].dtype == dtype
        assert (found[name] - grad).norm() <= close * grad.norm(), name


def test_what_cannot_be_sharded_is_refused(one_rank: None) -> None:
    with torch.device("meta"):
        unread = make(True)
    with pytest.raises(ConfigError, match="on the meta device, and no checkpoint belongs"):
        shard(unread)
    with pytest.raises(ConfigError, match=r"the mesh has the dimensions \('data',\); name"):
        shard(make(True), mesh_of(data=1))
    with pytest.raises(ConfigError, match="is sharded already"):
        shard(shard(make(True)))


def test_a_model_alone_is_not_sharded() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        shard(make(True))
    with pytest.raises(ConfigError, match="is not sharded"):
        mean_over_ranks(make(True), 1)
