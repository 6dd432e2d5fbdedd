"""Compare a training step of layers with experts with transformers: python -m benchmarks.experts

The model is four layers of Qwen3-30B-A3B with its vocabulary, random bf16 weights and 8,192 tokens.
transformers computes the experts with torch's grouped products, and Liger patches everything else.
The time is that of forward and backward, with and without AdamW; of ours, the peak under each
checkpointing policy stands beside the prediction. benchmarks.ops measures the layer of experts
alone, and benchmarks.decoding a new token.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, environment, release_memory, table, write

SEQ = 8192
SIZES = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
IMPLEMENTATIONS = ("transformers", "transformers + liger", "ligermodels")


def build(implementation: str) -> Any:
    """Return a model with random weights on the GPU."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            if implementation == "ligermodels":
                from ligermodels.models.auto import families

                cls = families()["qwen3_moe"]
                return cls(cls.config_class(**SIZES))
            import transformers

            if implementation == "transformers + liger":
                from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

                apply_liger_kernel_to_qwen3_moe(swiglu=False)  # which are the experts
            config = transformers.Qwen3MoeConfig(**SIZES, use_cache=False)
            return transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="sdpa", experts_implementation="grouped_mm"
            )
    finally:
        torch.set_default_dtype(torch.float32)


def timed(model: Any, optimizer: torch.optim.Optimizer | None, steps: int = 8) -> tuple[float, int]:
    """Return the median of the milliseconds of a step, and the peak in bytes."""
    times = []
    for step in range(steps + 3):
        ids = torch.randint(0, SIZES["vocab_size"], (1, SEQ), device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        elif step > 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated()


def run_one(implementation: str) -> dict[str, Any]:
    model = build(implementation).train()
    row: dict[str, Any] = {"implementation": implementation}
    row["ms"], peak = timed(model, None)
    row["peak GiB"] = peak / 2**30
    if implementation == "ligermodels":
        row["plans"] = plans(model)
    release_memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    row["ms with AdamW"], peak = timed(model, optimizer)
    row["peak GiB with AdamW"] = peak / 2**30
    return row


def plans(model: Any) -> dict[str, dict[str, float]]:
    """Return the time, the peak and the predicted peak under each checkpointing policy."""
    from ligermodels.layers.recompute import POLICIES
    from ligermodels.memory.plan import MemoryPlan
    from ligermodels.memory.simulate import simulate

    found = {}
    for policy in POLICIES:
        model.set_memory_plan(MemoryPlan.uniform(SIZES["num_hidden_layers"], policy))
        predicted = simulate(model, 1, SEQ, device=torch.device("cuda", 0)).peak_bytes
        release_memory()
        ms, peak = timed(model, None, steps=3)
        found[policy] = {"ms": ms, "peak GiB": peak / 2**30, "predicted GiB": predicted / 2**30}
    model.set_memory_plan(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for experts.json")
    parser.add_argument("--only", choices=IMPLEMENTATIONS, help="print one row as JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run_one(arguments.only)))
        return
    file = arguments.out / "experts.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    rows = []
    for name in IMPLEMENTATIONS:
        # Each has its own process, because Liger's patches remain in a process.
        command = [sys.executable, "-m", "benchmarks.experts", "--only", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(name, done.stderr[-3000:], file=sys.stderr)
            rows.append({"implementation": name, "error": "failed"})
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    result["step"] = {"environment": environment(), "sizes": SIZES, "tokens": SEQ, "rows": rows}
    write("experts.json", result, arguments.out)
    print(table(rows, ["implementation", "ms", "peak GiB", "ms with AdamW", "peak GiB with AdamW"]))


if __name__ == "__main__":
    main()
