"""Memory plans with sharded parameters: FSDP2 on several GPUs, one process for each.

    torchrun --nproc-per-node 2 -m benchmarks.memory_ranks [--predict N [--cases I ...]] [--out DIR]

It measures Llama-3-8B with float32 weights, computed in bfloat16, under AdamW: transformers with
Liger and every block checkpointed, and ligermodels with a plan. --predict N compares the peaks of N
random models and plans with their predictions instead, or of some of them. The results go
into memory.json.
"""

import argparse
import gc
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.common import RESULTS, environment, write
from benchmarks.memory import Row, merge, milliseconds, release, training_step
from benchmarks.memory_cases import run_cases, shard
from benchmarks.memory_works import GIB, LIGER, OURS

PRESET = "llama-3-8b"
# Rows and tokens on each GPU, and the GiB that a plan may take.
SHAPES = ((1, 8192, 74.0), (2, 8192, 70.0))
STEPS = 4


def ours() -> Any:
    """Return our model, sharded."""
    from ligermodels import LigerLlama, LlamaConfig

    with torch.device("cuda"):
        model = LigerLlama(LlamaConfig.preset(PRESET)).train()
    shard(model, "bfloat16")
    return model


def theirs() -> Any:
    """Return the model of transformers with Liger, sharded, with every block checkpointed."""
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    from ligermodels import LlamaConfig
    from ligermodels.converters.hf_config import to_hf

    apply_liger_kernel_to_llama()
    values = to_hf(LlamaConfig.preset(PRESET)) | {"use_cache": False}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.model.layers, model]:
        fully_shard(module, mp_policy=policy)
    return model


def measure(model: Any, batch: int, seq: int) -> Row:
    """Return the median time and the peaks of steps with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(3, 128000, (batch, seq), device="cuda")
    first = milliseconds(lambda: training_step(model, optimizer, ids))
    release()
    torch.cuda.reset_peak_memory_stats()
    times = [milliseconds(lambda: training_step(model, optimizer, ids)) for _ in range(STEPS)]
    return {
        "first ms": first,
        "ms": statistics.median(times),
        "ms spread": max(times) - min(times),
        "tokens/s": batch * seq * dist.get_world_size() / statistics.median(times) * 1e3,
        "peak GiB": torch.cuda.max_memory_allocated() / GIB,
        "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
        "host GiB": 0.0,
        "loss": training_step(model, None, ids),
    }


def rows() -> list[Row]:
    """Measure the peer, and then a plan, for each shape."""
    found = []
    for implementation, make in ((LIGER, theirs), (OURS, ours)):
        model = make()
        gc.collect()
        release()
        for batch, seq, budget in SHAPES:
            ranks = dist.get_world_size()
            row: Row = {
                "work": f"{PRESET}, {batch} x {seq} on each of {ranks}, FSDP2, AdamW",
                "implementation": implementation,
                "keeps": "plan" if implementation == OURS else "input",
                "budget GiB": budget if implementation == OURS else None,
            }
            setting = "every block checkpointed"
            try:
                if implementation == OURS:
                    setting = f"plan for {budget:g} GiB"
                    start = time.perf_counter()
                    plan = model.plan_memory(
                        batch, seq, round(budget * GIB), count="allocated", reserve=0.0
                    )
                    model.set_memory_plan(plan)
                    assert plan.prediction is not None
                    row |= {
                        "planning s": time.perf_counter() - start,
                        "predicted GiB": plan.prediction.peak_bytes / GIB,
                        "predicted reserved GiB": plan.prediction.reserved_bytes / GIB,
                        "predicted ms": plan.prediction.seconds * 1e3,
                        "plan": str(plan),
                    }
                row |= measure(model, batch, seq)
            except Exception as error:  # the other rows are still measured
                row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            found.append(row | {"setting": f"{implementation}: {setting}"})
        del model
        gc.collect()
        release()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", type=int, metavar="N", help="compare N random plans")
    parser.add_argument("--cases", type=int, nargs="+", help="of these plans, only some")
    parser.add_argument("--out", type=Path, help="folder for memory.json")
    given = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    machine = environment()
    files = [folder / "memory.json" for folder in (given.out, RESULTS) if folder is not None]
    file = next((file for file in files if file.is_file()), None)
    result: dict[str, Any] = json.loads(file.read_text()) if file else {}

    def emit(section: str, row: Row) -> None:
        """Keep rank 0's row, with the largest peak of all ranks."""
        peaks: list[Any] = [None] * ranks
        dist.all_gather_object(peaks, row.get("peak GiB") or row.get("measured GiB"))
        if rank == 0:
            print(json.dumps(row | {"of ranks": peaks}), flush=True)
            merge(result, section, {"gpu": machine["gpu"]} | row)
            write("memory.json", result, given.out)

    if given.predict:
        run_cases(given.predict, math.inf, emit, given.cases, ranks=ranks)
    else:
        for row in rows():
            emit("rows", row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
