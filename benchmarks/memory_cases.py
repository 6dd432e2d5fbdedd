"""Random models and plans, whose predicted peaks `benchmarks.memory` compares with measured ones.

`draw` draws all cases from a seed before any is measured, and no case depends on a result.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.common import release_memory
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.plan import LayerPlan, MemoryPlan

Value = TypeVar("Value")

SEED = 16
GIB = 2**30
PRESETS = (
    ("llama", "llama-3.2-1b"),
    ("llama", "llama-3.1-8b"),
    ("mistral", "mistral-7b-v0.1"),
    ("gemma", "gemma-2b"),
    ("gemma2", "gemma-2-2b"),
    ("gemma3_text", "gemma-3-1b"),
    ("qwen2", "qwen2.5-1.5b"),
    ("qwen3", "qwen3-1.7b"),
)
# The dtype of the weights, and that of autocast.
DTYPES = (("bfloat16", None), ("float16", None), ("float32", None), ("float32", "bfloat16"))
LENGTHS = ((1, 2048), (4, 1024), (1, 4096), (2, 3000), (8, 512), (1, 8192), (2, 8192), (1, 16384))
LAYERS = (2, 3, 4, 6)
# How documents are packed: not at all, by cu_seqlens with max_seqlen, or by restarting positions.
PACKINGS = ("none", "cu_seqlens", "none", "cu_seqlens", "none", "position_ids")
TRAINABLE = ("all", "all", "not the embedding", "the upper half")
TILES = (None, None, None, 1024)


@dataclass(frozen=True)
class Case:
    """A model, its inputs and its plan. With several ranks, FSDP2 shards the parameters."""

    number: int
    family: str
    preset: str
    dtype: str
    autocast: str | None
    batch: int
    seq: int
    packing: str
    trainable: str
    plan: MemoryPlan
    ranks: int = 1

    @property
    def name(self) -> str:
        layers = ", ".join(str(replace(layer, tile=None)) for layer in self.plan.layers)
        return (
            f"{self.ranks} ranks, " * (self.ranks > 1)
            + f"{self.number}: {self.preset}, {len(self.plan.layers)} layers, {self.dtype}"
            + f" with autocast to {self.autocast}" * bool(self.autocast)
            + f", {self.batch} x {self.seq}, packing {self.packing}, trainable {self.trainable}"
            + f", MLP tile {self.plan.layers[0].tile}, keeps {layers}"
        )


def deck(generator: random.Random, values: Sequence[Value]) -> Iterator[Value]:
    """Yield values in random order without end, each as often as it occurs in `values`."""
    while True:
        yield from generator.sample(values, len(values))


def draw(count: int, seed: int = SEED, ranks: int = 1) -> list[Case]:
    """Return `count` cases. Every choice occurs equally often, in random combinations."""
    generator = random.Random(seed + ranks - 1)
    presets, dtypes = deck(generator, PRESETS), deck(generator, DTYPES)
    lengths, layers = deck(generator, LENGTHS), deck(generator, LAYERS)
    packings, trainable = deck(generator, PACKINGS), deck(generator, TRAINABLE)
    tiles, hosts = deck(generator, TILES), deck(generator, (False, True))
    cases = []
    for number in range(count):
        packing, host = next(packings), next(hosts)
        batch, seq = next(lengths)
        if packing == "cu_seqlens":  # it describes a single row
            batch, seq = 1, batch * seq
        tile = next(tiles)
        plan = MemoryPlan.of(
            [
                LayerPlan(generator.choice(POLICIES), host and generator.random() < 0.7, tile)
                for _ in range(next(layers))
            ],
            host_budget=16 * GIB if host else 0,
        )
        names, kinds = next(presets), next(dtypes)
        rest = next(trainable), plan, ranks
        cases.append(Case(number, *names, *kinds, batch, seq, packing, *rest))
    return cases


def build(case: Case, device: str, **changes: Any) -> Any:
    """Return the model of a case, with random weights and the case's plan.

    Args: changes, fields of the config that differ from the preset.
    """
    from ligermodels.models.auto import families

    model_class = families()[case.family]
    layers = len(case.plan.layers)
    config = model_class.config_class.preset(case.preset, num_hidden_layers=layers, **changes)
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        with torch.device(device):
            model = model_class(config).train()
    finally:
        torch.set_default_dtype(torch.float32)
    if case.trainable != "all":
        model.embed_tokens.requires_grad_(False)
    if case.trainable == "the upper half":
        model.layers[: layers // 2].requires_grad_(False)
    if case.ranks > 1:
        shard(model, case.autocast)
    model.set_memory_plan(case.plan)
    return model


def shard(model: Any, autocast: str | None) -> None:
    """Apply FSDP2 to each block, an untied head and the root.

    Args: autocast, the dtype of the gathered weights; gradients are then reduced in float32.
    """
    dtype = None if autocast is None else getattr(torch, autocast)
    policy = MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32)
    head = [] if model.config.tie_word_embeddings else [model.head]
    for module in [*model.layers, *head, model]:
        fully_shard(module, mp_policy=policy)


def inputs(case: Case, vocab: int, device: str) -> dict[str, Any]:
    """Return the arguments of a forward. Packed rows have documents of several lengths."""
    generator = torch.Generator().manual_seed(case.number)
    ids = torch.randint(3, vocab, (case.batch, case.seq), generator=generator).to(device)
    found: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if case.packing == "none":
        return found
    lengths: list[int] = []
    while (left := case.seq - sum(lengths)) > 0:
        longest = min(left, case.seq // 4)
        lengths.append(int(torch.randint(1, longest + 1, (), generator=generator)))
    if case.packing == "cu_seqlens":
        starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return found | {"cu_seqlens": starts, "max_seqlen": max(lengths)}
    positions = torch.cat([torch.arange(length) for length in lengths])
    return found | {"position_ids": positions[None].to(device)}


def autocast_of(case: Case) -> torch.dtype | None:
    """Return the dtype of torch.autocast in a case. FSDP2 has its own mixed precision."""
    return None if case.autocast is None or case.ranks > 1 else getattr(torch, case.autocast)


def predict(case: Case, model: Any, arguments: dict[str, Any], device: str) -> int:
    """Return the bytes of the peak that the simulation predicts."""
    from ligermodels.memory.simulate import simulate

    simulation = simulate(
        model,
        case.batch,
        case.seq,
        device=torch.device(device),
        autocast=autocast_of(case),
        packed=case.packing != "none",
        max_seqlen=arguments.get("max_seqlen"),
    )
    return simulation.peak_bytes


def step(case: Case, model: Any, arguments: dict[str, Any], device: str) -> Tensor:
    """Compute the loss and the gradients, and drop the gradients."""
    autocast = autocast_of(case)
    with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(**arguments).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def run_case(case: Case) -> dict[str, Any]:
    """Return the predicted and the measured peak of a case."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()  # so that no case finds what an earlier one left
    release_memory()
    before = torch.cuda.memory_allocated()
    model = build(case, "cuda")
    arguments = inputs(case, model.config.vocab_size, "cuda")
    start = time.perf_counter()
    predicted = predict(case, model, arguments, "cuda")
    seconds = time.perf_counter() - start
    step(case, model, arguments, "cuda")  # this one compiles
    torch.cuda.reset_peak_memory_stats()
    loss = step(case, model, arguments, "cuda")
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    return {
        "predicted GiB": predicted / GIB,
        "measured GiB": measured / GIB,
        "ratio": predicted / measured,
        "before GiB": before / GIB,
        "loss": loss.item(),
        "prediction s": seconds,
    }


def run_cases(
    count: int,
    deadline: float,
    emit: Callable[[str, dict[str, Any]], None],
    numbers: Sequence[int] | None = None,
    ranks: int = 1,
) -> None:
    """Compare the peaks of `count` cases, which are all drawn first.

    Args:
        deadline: the `time.monotonic()` after which no case begins. The cases that are left then
            have an `error`.
        numbers: the cases to run, in this order. By default all run.
        ranks: the number of processes, each of which calls this function.
    """
    cases = draw(count, ranks=ranks)
    for case in cases if numbers is None else [cases[number] for number in numbers]:
        row: dict[str, Any] = {"case": case.name, "seed": SEED}
        if time.monotonic() > deadline:
            row["error"] = "not measured: no time was left"
        else:
            try:
                row |= run_case(case)
            except Exception as error:  # the other cases are still measured
                row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        emit("predictions", row)
