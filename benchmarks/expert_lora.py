"""LoRA and QLoRA on the experts of Qwen3-30B-A3B on one GPU: python -m benchmarks.expert_lora

The weights are random, in bf16 or in few bits in the linears of the layers, experts included. All
of these linears have a LoRA of rank 16 in bf16, which AdamW trains. A step has one row of 8,192
tokens. The time is the median of the steps, and the memory is the peak of allocated bytes; for
ours, it stands beside the prediction. PEFT adapts the parameters of experts, as transformers keeps
them, which has torch's grouped products. Each row has its own process.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, environment, release_memory, table, write
from benchmarks.experts import SEQ, build, timed

OURS, PEFT = "ligermodels", "peft + transformers + liger"
# The implementation, the layers, the bits of the frozen weights, and what is recomputed.
ROWS: tuple[tuple[str, int, int, str], ...] = (
    (OURS, 4, 16, "nothing"),
    (OURS, 4, 8, "nothing"),
    (OURS, 4, 4, "nothing"),
    (PEFT, 4, 16, "nothing"),
    (OURS, 48, 4, "nothing"),
    (OURS, 48, 8, "nothing"),
    (OURS, 48, 16, "blocks"),
    (OURS, 48, 4, "blocks"),
)


def ours(layers: int, bits: int, recomputes: str) -> Any:
    from ligermodels.adapters.adapted_model import add_adapters, quantize

    model = build("ligermodels", layers)
    if bits < 16:
        quantize(model, bits, torch.device("cuda"))
        release_memory()
    add_adapters(model, 16, 32.0, dtype=torch.bfloat16)
    if recomputes == "blocks":
        model.activation_checkpointing_enable()
    return model


def theirs(layers: int) -> Any:
    import peft

    config = peft.LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={".*gate_up_proj": 32},  # as many parameters as gate and up with 16 each
        alpha_pattern={".*gate_up_proj": 64},
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(build("transformers + liger", layers), config)


def run_one(kind: str, layers: int, bits: int, recomputes: str) -> dict[str, Any]:
    began = time.perf_counter()
    model = (ours(layers, bits, recomputes) if kind == OURS else theirs(layers)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    row = {"implementation": kind, "layers": layers, "bits": bits, "recomputes": recomputes}
    row["trained parameters"] = sum(p.numel() for p in trained)
    row["ms"], peak = timed(model, optimizer, 5)
    row |= {"tokens/s": SEQ / row["ms"] * 1e3, "peak GiB": peak / 2**30}
    if kind == OURS:
        from ligermodels.memory.simulate import simulate

        found = simulate(model, 1, SEQ, device=torch.device("cuda", 0)).peak_bytes
        states = [x for each in optimizer.state.values() for x in each.values()]
        row["predicted GiB"] = (found + sum(x.nbytes for x in states if x.is_cuda)) / 2**30
    return row | {"seconds in all": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for expert_lora.json")
    parser.add_argument("--rows", type=int, nargs="*", default=[*range(len(ROWS))])
    parser.add_argument("--limit", type=int, default=120, help="seconds of a row")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only is not None:
        print(json.dumps(run_one(*ROWS[given.only])))
        return
    rows: list[dict[str, Any]] = []
    for index in given.rows:
        command = [sys.executable, "-m", "benchmarks.expert_lora", "--only", str(index)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=given.limit)
            row = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {}
            why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            row, why = {}, [f"stopped after {given.limit} s"]
        names = ("implementation", "layers", "bits", "recomputes")
        rows.append(dict(zip(names, ROWS[index])) | row | ({"error": why[0]} if why else {}))
        print(rows[-1], flush=True)
        write("expert_lora.json", {"environment": environment(), "rows": rows}, given.out)
    columns = [*names, "ms", "tokens/s", "peak GiB", "predicted GiB", "error"]
    print(table(rows, columns))


if __name__ == "__main__":
    main()
