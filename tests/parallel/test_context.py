"""Models whose rows are split over processes compute what one process computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from examples.shared_keys import SharedKeys, SharedKeysConfig
from ligermodels import ConfigError, KVCache, LayerPlan, MemoryPlan, shard
from ligermodels.layers import Attention
from ligermodels.models.base import DecoderModel
from tests import outside
from tests.families import FAMILIES, OWN, WINDOW
from tests.parallel.ranks import Case, check, run_ranks
from tests.parallel.steps import (
    SIZES,
    differences,
    error_of_bytes,
    gradients,
    make,
    mesh_of,
    outputs,
    relative,
    upstream,
)
from tests.parallel.test_shard import classifier, clipping, load, save, step

BATCH, SEQ = 2, 16
# Of the families from outside, one has parallel blocks.
OUTSIDE = ("cohere", "glm4")


@pytest.mark.usefixtures("rows_at_once")
def test_two_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(run_ranks(__name__, 2, tmp_path), subtests)


@pytest.mark.long
def test_four_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(run_ranks(__name__, 4, tmp_path), subtests)


def cases(ranks: int) -> dict[str, Case]:
    if ranks == 4:
        layouts = {
            "cp": mesh_of(cp=4),
            "fsdp and cp": mesh_of(dp_shard=2, cp=2),
            "cp before fsdp": mesh_of(cp=2, dp_shard=2),
            "ddp and cp": mesh_of(dp_replicate=2, cp=2),
            "cp and tp": mesh_of(cp=2, tp=2),
        }
    else:
        layouts = {"cp": mesh_of(cp=2)}
    found: dict[str, Case] = {"refused": partial(refused, layouts["cp"])}
    for layout, mesh in layouts.items():
        # Of composed families, queries of Ministral 3 have factors that depend on their position.
        names = [name for name in sorted(OWN) if not FAMILIES[name].mixers]  # which are refused
        if ranks == 2:
            names = [x for x in names if x == "ministral3" or not FAMILIES[x].composed]
        for number, family in enumerate(names):
            found[f"{layout}, {family}"] = partial(rows, mesh, family, number % 2 == 0)
        for name, inputs in INPUTS.items():
            found[f"{layout}, {name}"] = partial(rows, mesh, "mistral", False, inputs=inputs)
        for policy in ("no_gate_up", "attention", "input"):
            plan = MemoryPlan.of([LayerPlan(policy, tile=5), LayerPlan(tile=5)])
            found[f"{layout}, keeps {policy}"] = partial(rows, mesh, "llama", True, plan=plan)
        for name, options in OPTIONS.items():
            found[f"{layout}, {name}"] = partial(rows, mesh, "llama", False, options=options)
        for name in OUTSIDE if layout == "fsdp and cp" else OUTSIDE[:1]:
            outside.family(name)
            found[f"{layout}, {name}"] = partial(rows, mesh, name, False)
        for build in (both_directions, shared_keys):
            for policy in ("all", "attention"):
                found[f"{layout}, {build.__name__}, keeps {policy}"] = partial(
                    rows, mesh, build, True, inputs=padding, plan=MemoryPlan.uniform(2, policy)
                )
        small = partial(rows, mesh, "small gemma4", True, plan=MemoryPlan.uniform(4, "input"))
        if "tp" not in layout:
            found[f"{layout}, small gemma4"] = small
        found[f"{layout}, load"] = partial(load, mesh, False)
        if mesh["cp"].size() == 2:  # rows of 12 tokens
            found[f"{layout}, micro-batches"] = partial(step, mesh, tied=True, steps=2)
            found[f"{layout}, save"] = partial(save, mesh)
            found[f"{layout}, classifier"] = partial(classifier, mesh)
            found[f"{layout}, norm of the gradients"] = partial(clipping, mesh)
        if ranks == 2:
            found["bytes"] = partial(memory, mesh)
        if ranks == 4:
            found[f"{layout}, compiled"] = partial(rows, mesh, "llama", True, compiles=True)
        for policy in ("attention", "input") if layout == "fsdp and cp" else ():
            plan = MemoryPlan.uniform(2, policy)
            found[f"{layout}, compiled, keeps {policy}"] = partial(
                rows, mesh, "mistral", True, inputs=documents, plan=plan, compiles=True
            )
    return found


def both_directions() -> DecoderModel:
    model = make(True)
    for layer, window in zip(model.layers, (None, WINDOW)):
        layer.self_attn.causal, layer.self_attn.sliding_window = False, window
    return model


def shared_keys() -> DecoderModel:
    torch.manual_seed(7)
    sizes = {**SIZES, "intermediate_size": 28, "num_key_value_heads": 2, "sliding_window": WINDOW}
    return SharedKeys(SharedKeysConfig(**sizes, tie_word_embeddings=True, initializer_range=0.3))


def documents() -> dict[str, Any]:
    positions = torch.cat([torch.arange(7), torch.arange(SEQ - 7)]).expand(BATCH, -1).clone()
    positions[1] = torch.arange(SEQ)
    return {"position_ids": positions}


def padding() -> dict[str, Any]:
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[0, :3], mask[1, -5:] = 0, 0
    return {"attention_mask": mask}


def ends() -> dict[str, Any]:
    """Of documents in a single row of all tokens."""
    return {"cu_seqlens": torch.tensor([0, 5, 6, 13, 31, BATCH * SEQ]), "max_seqlen": 18}


INPUTS: dict[str, Any] = {
    "documents": documents,
    "ends of documents": ends,
    "padding": padding,
    "prefixes": lambda: {"prefix_lengths": torch.tensor([9, 2])},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "a normalizer": {"normalizer": 17.0, "z_loss": 0.01},
    "class weights": {
        "class_weights": torch.linspace(0.5, 2, SIZES["vocab_size"]),
        "label_smoothing": 0.2,
    },
    "sum": {"reduction": "sum"},
    "tokens": {
        "reduction": "none",
        "return_token_stats": True,
        "token_weights": torch.linspace(0.1, 1, BATCH * SEQ).view(BATCH, SEQ),
        "alternatives": torch.arange(BATCH * SEQ).view(BATCH, SEQ, 1) + 3,
    },
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, SIZES["vocab_size"], (BATCH, SEQ), generator=torch.manual_seed(3))
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def rows(
    mesh: DeviceMesh,
    family: str | Callable[[], DecoderModel],
    tied: bool,
    rank: int,
    folder: Path,
    *,
    inputs: Any = dict,
    options: dict[str, Any] | None = None,
    plan: MemoryPlan | None = None,
    compiles: bool = False,
) -> dict[str, float]:
    """All ranks get the same rows, so each returns what one process returns."""
    window = {"sliding_window": WINDOW} if family == "mistral" else {}
    model = make(tied, family, **window) if isinstance(family, str) else family()
    sharded = copy.deepcopy(model)
    for layer in sharded.layers if compiles else ():
        layer.compile(backend="aot_eager")
    shard(sharded, mesh)
    sharded.set_memory_plan(plan)
    (ids, labels), given = data(), inputs()
    if "cu_seqlens" in given:
        ids, labels = ids.view(1, -1), labels.view(1, -1)
    expected = model(ids, labels=labels, **given, **(options or {}))
    out = sharded(ids, labels=labels, **given, **(options or {}))
    for each in (expected, out):
        (each.loss * upstream(expected.loss)).sum().backward()
    result = outputs(out, expected)
    result["gradient"] = differences(gradients(sharded), gradients(model))
    with torch.no_grad():
        mask = given.get("attention_mask", torch.ones_like(ids)).bool()
        return result | {"hidden": relative(sharded(ids, **given)[mask], model(ids, **given)[mask])}


def memory(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    return error_of_bytes(shard(make(True), mesh), "attention", SEQ, 0.02)


class OtherAttention(Attention):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


def refused(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, float]:
    odd = make(True)
    odd.layers[1].self_attn.__class__ = OtherAttention
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn is a OtherAttention"):
        shard(odd, mesh)
    model = shard(make(True), mesh)
    with pytest.raises(ValueError, match=f"pad the rows to a multiple of {2 * mesh.size()}"):
        model(torch.ones(1, SEQ + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="cache: "):
        model(torch.ones(1, SEQ, dtype=torch.int64), cache=KVCache(model.config, 1, SEQ))
    return {"refused": 0.0}
