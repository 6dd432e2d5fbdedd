"""Training on several GPUs: FSDP2 beside HF with Liger, tensor and context parallelism.

    torchrun --nproc-per-node 2 -m benchmarks.parallel [--parts exact,fsdp,...] [--layers N]

Each part prints a table. The results go into parallel.json in $OUT, or else in benchmarks/results,
beside those of other numbers of GPUs.

    exact   losses and gradients in float32 of every layout, against one GPU
    float8  four layers of Llama-3-8B, float32 weights, AdamW, 1 x 8192 tokens on each GPU, under
            FSDP2: weights gathered in bfloat16, and by torchao in float8; how long the kernels of
            gathering take, and how much of it while nothing else computes
    fsdp    Llama-3-8B, float32 weights computed in bfloat16, AdamW, 1 x 8192 tokens on each GPU
    tp      the same model cut for tensor parallelism over all GPUs, 1 x 8192 tokens together,
            beside HF's model cut with DTensor, as transformers plans it, under autocast
    experts  four layers of Qwen3-30B-A3B, float32 weights computed in bfloat16, AdamW, 1 x 8192
             tokens on each GPU: experts gathered by FSDP2, and spread by expert parallelism; and
             a layer of expert parallelism in bfloat16, with the times of its parts
    head    linear cross entropy of 8192 x 4096 x 128256 with the vocabulary split over the GPUs
    context  errors of rows that are split over all GPUs (context parallelism), against one GPU
    long    Llama-3-8B, float32 weights computed in bfloat16, AdamW, one long row over all GPUs

Loads and saves are in sharded_files.py. More ranks than GPUs share them, and gloo takes the place
of NCCL: times mean nothing then, and "exact" and "context" still compare. Without a GPU, and with
--tiny, the parts exact, context, tp, experts and float8 show that the program works.
"""

import argparse
import copy
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import RESULTS, environment, release_memory
from benchmarks.experts import PRESET
from benchmarks.ranks import (
    DEVICE,
    GIB,
    TINY,
    Row,
    attempt,
    config,
    everywhere,
    mesh,
    milliseconds,
    show,
    synchronize,
    table,
)
from ligermodels import (
    LigerLlama,
    LlamaConfig,
    MemoryPlan,
    clip_grad_norm_,
    families,
    float8,
    kernels,
    mean_over_ranks,
    shard,
)
from ligermodels.kernels.linear_cross_entropy.vocab_shard import VocabShard
from ligermodels.layers.fusion import is_sharded
from ligermodels.layers.recompute import CheckpointingPolicy
from ligermodels.memory.simulate import simulate
from ligermodels.models.layout import splits_of, whole_tensor
from ligermodels.parallel.expert import expert_parallel

TOKENS, VOCAB, WIDTH = 8192, 128256, 4096
STEPS = 9


def training(
    model: Any,
    rows_together: int,
    autocasts: bool = False,
    after_step: Callable[[Any], Any] | None = None,
    profiles: bool = False,
) -> Row:
    """Measure steps with AdamW: the median of the slowest rank, and the largest peak.

    Args: after_step: takes the model after each step of the optimizer; profiles: whether to measure
        the kernels that gather, too.
    """
    # One call of the fused optimizer takes either DTensors or plain tensors.
    kinds = [[p for p in model.parameters() if is_sharded(p) == kind] for kind in (True, False)]
    groups = [{"params": params} for params in kinds if params]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank() if rows_together > 1 else 0)
    ids = torch.randint(3, model.config.vocab_size, (1, TOKENS), generator=generator).to(DEVICE)
    losses = []

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocasts):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if after_step is not None:
            after_step(model)
        losses.append(loss.detach())

    first = milliseconds(step)
    milliseconds(step)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [milliseconds(step) for _ in range(STEPS)]
    median = statistics.median(times)
    gathers = gather_times(step) if profiles else {}
    return {
        "first ms": first,
        "ms": median,
        "ms spread": max(times) - min(times),
        "tokens/s": rows_together * TOKENS / median * 1e3,
        "peak GiB": max(everywhere(torch.cuda.max_memory_allocated())) / GIB,
        "reserved GiB": max(everywhere(torch.cuda.max_memory_reserved())) / GIB,
        "loss": losses[-1].item(),
        **gathers,
    }


def gather_times(step: Callable[[], Any]) -> Row:
    """Return this rank's milliseconds of kernels that gather, and those in which no other runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA] if DEVICE == "cuda" else None) as profiled:
        step()
        synchronize()
    kernels = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    gathers = [(start, end) for start, end, name in kernels if "AllGather" in name]
    others = sorted((start, end) for start, end, name in kernels if "nccl" not in name)
    hidden = 0.0
    for start, end in gathers:
        at = start
        for first, last in others:
            if (until := min(last, end)) > (since := max(first, at)):
                hidden, at = hidden + until - since, until
    whole = sum(end - start for start, end in gathers)
    return {"gathers": len(gathers), "gathers ms": whole / 1e3, "alone ms": (whole - hidden) / 1e3}


def hf(layers: int | None) -> Any:
    import transformers

    from ligermodels.converters.hf_config import to_hf

    values = to_hf(config(layers)) | {"use_cache": False}
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(
            made, dtype=torch.float32, attn_implementation="sdpa"
        ).train()


def hf_with_liger(layers: int | None) -> Any:
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    apply_liger_kernel_to_llama()
    model = hf(layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.model.layers, model]:
        fully_shard(module, mp_policy=policy)
    return model


def hf_with_dtensor(layers: int | None) -> Any:
    """Return HF's model cut by PyTorch, with DTensor, as transformers plans it for this model."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = hf(layers)
    planned = {f"model.{name}": kind for name, kind in model.config.base_model_tp_plan.items()}
    kinds = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {name: kinds[kind] for name, kind in (planned | type(model)._tp_plan).items()}
    return parallelize_module(model, mesh(tp=dist.get_world_size()), plan)


def ours(layers: int | None, **options: Any) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LigerLlama(config(layers)).train()
    return shard(model, compute_dtype=torch.bfloat16, **options)


def fsdp(layers: int | None) -> list[Row]:
    ranks = dist.get_world_size()
    kept = {"reshard_after_forward": False}
    return [
        attempt("HF + Liger", lambda: training(hf_with_liger(layers), ranks)),
        attempt("ligermodels", lambda: training(ours(layers), ranks)),
        attempt("ligermodels, no resharding", lambda: training(ours(layers, **kept), ranks)),
    ]


def float8_gathers(layers: int | None) -> list[Row]:
    """Compare gathering in bfloat16 with gathering in float8."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    ranks, tiny = dist.get_world_size(), bool(TINY)

    def made(recipe: str | None, gathers_float8: bool | None = None) -> Any:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = LigerLlama(config(layers or 4)).train()
        if recipe:
            float8.convert(model, recipe, filter=(lambda *_: True) if tiny else None)
        if gathers_float8 is not None:
            options = {"enable_fsdp_float8_all_gather": gathers_float8, "emulate": tiny}
            convert_to_float8_training(model.layers, config=Float8LinearConfig(**options))
            for layer in model.layers if not tiny else ():
                layer.compile()
        return shard(model, compute_dtype=torch.bfloat16)

    def gather(dtype: torch.dtype) -> Row:
        """Time what gathers the weights of one layer."""
        with torch.device("meta"):
            weights = [p.numel() for p in LigerLlama(config(1)).layers.parameters()]
        own = torch.zeros(sum(weights) // ranks, dtype=dtype, device=DEVICE)
        whole = own.new_empty(ranks * len(own))
        run = partial(dist.all_gather_into_tensor, whole, own)
        for _ in range(3):
            run()
        ms = statistics.median(milliseconds(run) for _ in range(15))
        return {"ms": ms, "sent MB": own.nbytes * (ranks - 1) / 1e6}

    scales = precompute_float8_dynamic_scale_for_fsdp
    rows: dict[str, Any] = {
        "bfloat16": lambda: training(made(None), ranks, profiles=True),
        "delayed": lambda: training(made("delayed"), ranks, profiles=True),
        "tensorwise": lambda: training(made("tensorwise"), ranks, profiles=True),
        "torchao": lambda: training(made(None, False), ranks, profiles=True),
        "torchao, gathers float8": lambda: training(
            made(None, True), ranks, after_step=scales, profiles=True
        ),
        "one gather in bfloat16": lambda: gather(torch.bfloat16),
        "one gather of bytes": lambda: gather(torch.uint8),
    }
    return [attempt(name, measure) for name, measure in rows.items()]


def tp(layers: int | None) -> list[Row]:
    ranks = dist.get_world_size()
    return [
        attempt(f"tp {ranks}", lambda: training(ours(layers, mesh=mesh(tp=ranks)), 1)),
        attempt(
            f"HF's model with DTensor {ranks}",
            lambda: training(hf_with_dtensor(layers), 1, autocasts=True),
        ),
    ]


def experts(layers: int | None) -> list[Row]:
    ranks, cls = dist.get_world_size(), families()["qwen3_moe"]

    def made(dimension: str) -> Any:
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": layers or 4} | TINY
        with torch.device(DEVICE):
            model = cls(cls.config_class.preset(PRESET, **sizes)).train()
        return shard(model, mesh(**{dimension: ranks}), compute_dtype=torch.bfloat16)

    def alone() -> Row:
        """Time a layer, forward and backward, and its parts: what overlapping them could save."""
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = cls(cls.config_class.preset(PRESET, **TINY | {"num_hidden_layers": 1}))
        expert_parallel(model, mesh(ep=ranks))
        layer: Any = model.layers[0].mlp.bfloat16()
        x = torch.randn(TOKENS, layer.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        with torch.no_grad():
            weights, chosen, _ = layer.router(x)
            journey, expert, weight = layer.exchange._plan(weights, chosen)
            rows, weight = journey.there(x), weight.flatten()[journey.pair]
        inputs = rows.requires_grad_(), weight[:, None].requires_grad_(), expert[:, None]

        def products(parts: int) -> None:
            for each in zip(*(part.chunk(parts) for part in inputs)):
                out = layer._mlps(*each)
                out.backward(out.detach())
            layer.zero_grad()

        def whole() -> None:
            out, _ = layer(x)
            out.backward(out.detach())
            layer.zero_grad()

        def exchanges() -> None:
            for _ in "forward", "backward":
                journey.there(x)
                journey.back(rows.detach())

        parts: dict[str, Any] = {
            "products": partial(products, 1),
            "products in halves": partial(products, 2),
            "exchanges": exchanges,
            "counts, with the wait": lambda: layer.exchange._plan(weights, chosen),
        }
        found: Row = {}
        for name, run in {"ms": whole, **parts}.items():
            for _ in range(3):
                run()
            found[name] = statistics.median(milliseconds(run) for _ in range(15))
        return found

    return [
        *(
            attempt(f"{name} {ranks}", lambda name=name: training(made(name), ranks))
            for name in ("dp_shard", "ep")
        ),
        attempt("a layer", alone),
    ]


def head(_: int | None) -> list[Row]:
    """Compare the split vocabulary with the whole one on each GPU alone."""
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def run(shared: VocabShard | None, chunk_size: int | None) -> Row:
        torch.manual_seed(0)
        hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(VOCAB, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.02
        targets = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
        if shared is not None:
            weight = weight[shared.first : shared.first + shared.most_classes].clone()
        hidden.requires_grad_()
        weight.requires_grad_()
        losses = []

        def step() -> None:
            hidden.grad = weight.grad = None
            out = kernels.linear_cross_entropy(
                hidden, weight, targets, chunk_size=chunk_size, vocab_shard=shared
            )
            out.loss.backward()
            losses.append(out.loss.detach())

        for _ in range(3):
            step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = [milliseconds(step) for _ in range(10)]
        return {
            "ms": statistics.median(times),
            "scratch GiB": (torch.cuda.max_memory_allocated() - before) / GIB,
            "loss": losses[-1].item(),
        }

    part, rows = VocabShard(dist.group.WORLD, rank * -(-VOCAB // ranks), VOCAB), []
    for chunk_size, how in ((None, ""), (TOKENS // 4, ", four chunks")):
        whole = attempt(f"whole vocabulary on each{how}", partial(run, None, chunk_size))
        split = attempt(f"vocabulary split over {ranks}{how}", partial(run, part, chunk_size))
        if "ms" in whole and "ms" in split:
            split["of linear"] = whole["ms"] / split["ms"] / ranks
        rows += [whole, split]
    return rows


def exact(_: int | None) -> list[Row]:
    """Compare each layout with a model on one GPU, in float32, with the Triton kernels."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 1003, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    with torch.device(DEVICE):
        model = LigerLlama(LlamaConfig(**sizes, **heads, initializer_range=0.1))
        ids = torch.randint(0, 1003, (2 * ranks, 128))
    fresh = copy.deepcopy(model)
    expected = model(ids, labels=ids).loss
    expected.backward()

    def compare(layout: Any, splits_rows: bool) -> Row:
        sharded = shard(copy.deepcopy(fresh), layout)
        rows = ids.chunk(ranks)[dist.get_rank()] if splits_rows else ids
        normalizer = mean_over_ranks(sharded, rows[:, 1:].numel())
        loss = sharded(rows, labels=rows, normalizer=normalizer).loss
        loss.backward()
        total = sum(everywhere(loss.item()))
        worst = 0.0
        for name, parameter in model.named_parameters():
            grad = sharded.get_parameter(name).grad
            whole = whole_tensor(grad, splits_of(sharded).get(name))
            difference = (whole - parameter.grad).norm() / parameter.grad.norm()
            worst = max(worst, difference.item())
        norm = clip_grad_norm_(sharded, 1e9)
        norms = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        return {
            "loss differs by": abs(total / ranks - expected.item()),
            "gradient differs by": worst,
            "norm differs by": abs(norm.item() / norms.item() - 1),
        }

    layouts = {"dp_shard": True, "dp_replicate": True, "tp": False, "cp": False}
    return [
        attempt(name, lambda name=name, rows=rows: compare(mesh(**{name: ranks}), rows))
        for name, rows in layouts.items()
    ]


def context(_: int | None) -> list[Row]:
    """Compare split and whole rows with a model of the same weights in float64 on the CPU."""
    sizes: dict[str, Any] = {"vocab_size": 1003, "hidden_size": 512, "intermediate_size": 1024}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"head_dim": 128, "initializer_range": 0.05}
    seq = 256 * dist.get_world_size()
    ids = torch.randint(0, 1003, (1, seq), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, 100, 101, seq // 2, seq - 90, seq])
    positions = torch.cat([torch.arange(int(n)) for n in ends.diff()])[None]
    packed = {"cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}
    window = ("mistral", {"sliding_window": 100})
    low, by_positions = torch.bfloat16, {"position_ids": positions}
    cases: dict[str, tuple[str, Row, Row, torch.dtype]] = {
        "causal": ("llama", {}, {}, low),
        "documents": ("llama", {}, packed, low),
        "window": (*window, {}, low),
        "window, documents": (*window, packed, low),
        "causal, float32": ("llama", {}, {}, torch.float32),
        "documents by positions": ("llama", {}, by_positions, low),
        "window, documents, float32": (*window, packed, torch.float32),
    }

    def gradients_of(model: Any, inputs: Row, device: str) -> tuple[float, dict[str, Any]]:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        loss = model(ids.to(device), labels=ids.to(device), **moved).loss
        loss.backward()
        named = model.named_parameters()
        return loss.item(), {name: whole_tensor(p.grad).double().cpu() for name, p in named}

    def compare(family: str, changes: Row, inputs: Row, dtype: torch.dtype) -> Row:
        torch.manual_seed(0)
        cls = families()[family]
        with torch.device(DEVICE):
            model = cls(cls.config_class(**sizes, **changes)).to(dtype)
        true_loss, true = gradients_of(copy.deepcopy(model).cpu().double(), inputs, "cpu")
        sharded = shard(copy.deepcopy(model), mesh(cp=dist.get_world_size()))
        found: Row = {}
        for name, each in (("one GPU", model), ("split", sharded)):
            loss, grads = gradients_of(each, inputs, DEVICE)
            errors = [((grads[k] - x).norm() / x.norm()).item() for k, x in true.items()]
            found |= {f"loss, {name}": abs(loss / true_loss - 1), f"gradient, {name}": max(errors)}
        return found

    return [attempt(name, partial(compare, *case)) for name, case in cases.items()]


def long(layers: int | None) -> list[Row]:
    """Train the whole model on one row that is split over all GPUs."""
    ranks = dist.get_world_size()
    found: list[Row] = []

    def train() -> Row:
        model = ours(layers, mesh=mesh(cp=ranks))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        losses = []

        def step(seq: int) -> None:
            ids = torch.randint(3, 128000, (1, seq), generator=torch.Generator().manual_seed(0))
            loss = model(ids.cuda(), labels=ids.cuda()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())

        model.set_memory_plan(MemoryPlan.uniform(len(model.layers), "input"))
        step(4096)  # compiles the kernels and makes the optimizer's states
        states = 2 * sum(p.to_local().nbytes for p in model.parameters())
        for seq, attention in ((131072, 32), (262144, 24)):
            release_memory()
            policies: list[CheckpointingPolicy] = ["attention"] * attention + ["input"] * (
                32 - attention
            )
            model.set_memory_plan(MemoryPlan.of(policies[: len(model.layers)]))
            predicted = simulate(model, 1, seq, device=torch.device("cuda"))
            torch.cuda.reset_peak_memory_stats()
            row: Row = {
                "name": f"{seq} over {ranks}, {attention} layers keep attention",
                "ms": milliseconds(partial(step, seq)),
                "peak GiB": max(everywhere(torch.cuda.max_memory_allocated())) / GIB,
                "reserved GiB": max(everywhere(torch.cuda.max_memory_reserved())) / GIB,
                "predicted GiB": (predicted.peak_bytes + states) / GIB,
                "loss": losses[-1],
            }
            row["tokens/s"] = seq / row["ms"] * 1e3
            show(row)
            found.append(row)
        return {}

    failed = attempt("long rows", train)
    return [*found, failed] if "error" in failed else found


PARTS = {
    "exact": exact,
    "context": context,
    "long": long,
    "head": head,
    "tp": tp,
    "experts": experts,
    "float8": float8_gathers,
    "fsdp": fsdp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, in this order")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    given = parser.parse_args()
    if given.tiny:
        global TOKENS
        TOKENS = 64
        TINY.update(vocab_size=1024, hidden_size=64, intermediate_size=128, head_dim=16)
        TINY.update(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    gpus, shares = torch.cuda.device_count(), False
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        shares = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus and not shares else "gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    file = Path(os.environ.get("OUT", RESULTS)) / "parallel.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    machine = environment()
    for part in given.parts.split(","):
        rows = PARTS[part](given.layers)
        if rank == 0:
            layers = f", {given.layers} layers" if given.layers else ""
            where = f"{ranks} ranks on {gpus}" if shares or not gpus else str(ranks)
            title = f"{part}, {where} x {machine['gpu']}{layers}{', tiny' * given.tiny}"
            print(table(title, rows), flush=True)
            found[title] = {"environment": machine, "rows": rows}
            file.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
