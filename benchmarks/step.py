"""Compare a training step with transformers, with and without Liger: python -m benchmarks.step

The model has the shapes of Llama-3-8B, random weights, bf16 parameters and bf16 AdamW states, and
runs on one GPU. Each implementation runs in its own process. The time is the median of the steps,
and the memory is the peak of allocated bytes.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, table, write

IMPLEMENTATIONS = ("transformers", "transformers + liger", "ligermodels")
WORKLOADS = ((1, 8192), (16, 512))


def build(implementation: str) -> torch.nn.Module:
    from ligermodels import LigerLlama, LlamaConfig

    config = LlamaConfig.preset("llama-3-8b")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            if implementation == "ligermodels":
                return LigerLlama(config)
            import transformers

            if implementation == "transformers + liger":
                from liger_kernel.transformers import apply_liger_kernel_to_llama

                apply_liger_kernel_to_llama()
            hf_config = transformers.LlamaConfig(
                **{
                    name: getattr(config, name)
                    for name in (
                        "vocab_size hidden_size intermediate_size num_hidden_layers head_dim "
                        "num_attention_heads num_key_value_heads rms_norm_eps rope_theta "
                        "max_position_embeddings"
                    ).split()
                },
                use_cache=False,
            )
            return transformers.LlamaForCausalLM(hf_config)
    finally:
        torch.set_default_dtype(torch.float32)


def run_one(implementation: str, batch: int, seq: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build(implementation).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times, losses = [], []
    for step in range(steps + 3):
        ids = torch.randint(0, 128256, (batch, seq), device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        losses.append(loss.item())
        if step >= 3:
            times.append(start.elapsed_time(end))
        elif step == 2:
            torch.cuda.reset_peak_memory_stats()
    return {
        "implementation": implementation,
        "batch x seq": f"{batch} x {seq}",
        "ms": statistics.median(times),
        "ms spread": max(times) - min(times),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "last loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for step.json")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs=3, metavar=("IMPLEMENTATION", "BATCH", "SEQ"))
    arguments = parser.parse_args()
    if arguments.only:
        name, batch, seq = arguments.only
        print(json.dumps(run_one(name, int(batch), int(seq), arguments.steps)))
        return
    rows = []
    for batch, seq in WORKLOADS:
        for name in IMPLEMENTATIONS:
            command = [sys.executable, "-m", "benchmarks.step", "--steps", str(arguments.steps)]
            done = subprocess.run(
                [*command, "--only", name, str(batch), str(seq)], capture_output=True, text=True
            )
            if done.returncode:
                print(done.stderr[-2000:], file=sys.stderr)
                rows.append(
                    {"implementation": name, "batch x seq": f"{batch} x {seq}", "ms": "failed"}
                )
            else:
                rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    result = {"environment": environment(), "rows": rows}
    write("step.json", result, arguments.out)
    columns = ["batch x seq", "implementation", "ms", "ms spread", "peak GiB", "last loss"]
    print(result["environment"])
    print(table(rows, columns))


if __name__ == "__main__":
    main()
