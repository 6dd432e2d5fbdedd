"""Compare a step of Qwen3.5 with transformers, with and without Liger: python -m benchmarks.hybrid

The model is four layers of Qwen3.5-9B, three of which are gated delta nets, with its vocabulary,
random bf16 weights and 8,192 tokens. Liger patches norms, MLPs and the loss. Where the package fla
is installed, a row has its delta rule, too; the other rows are without it. Each implementation has
its own process. For ours, the peak under each checkpointing policy, with 32,768 tokens, stands
beside the prediction; and a step of 8 packed documents. The milliseconds of a new token of these
four layers, of ours and of transformers, are those of `benchmarks.decoding`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

if "--only" in sys.argv and "fla" not in sys.argv[-1]:
    sys.modules["fla"] = None  # type: ignore[assignment]  # transformers would take it

import torch

from benchmarks.common import RESULTS, environment, release_memory, table, write
from benchmarks.decoding import PROMPT, ours, theirs
from benchmarks.experts import plans, timed
from ligermodels import LigerQwen3_5, Qwen3_5Config

SEQ, PRESET, LAYERS = 8192, "qwen3.5-9b", 4
IMPLEMENTATIONS = (
    *("ligermodels", "ligermodels, packed"),
    *("transformers", "transformers + liger", "transformers + liger + fla"),
)


def build(implementation: str) -> Any:
    """Return a model with random weights on the GPU."""
    config = Qwen3_5Config.preset(PRESET, num_hidden_layers=LAYERS)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            if implementation.startswith("ligermodels"):
                return LigerQwen3_5(config)
            import transformers

            if "liger" in implementation:
                from liger_kernel.transformers import apply_liger_kernel_to_qwen3_5

                apply_liger_kernel_to_qwen3_5()
            names = transformers.Qwen3_5TextConfig().to_dict().keys() & config.to_dict().keys()
            given = {name: getattr(config, name) for name in names - {"layer_types", "model_type"}}
            theirs = transformers.Qwen3_5TextConfig(**given, use_cache=False)
            return transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(torch.float32)


class Packed(torch.nn.Module):
    """A model whose row is eight documents."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        ends = torch.arange(9, device=ids.device, dtype=torch.int32) * (ids.shape[1] // 8)
        longest = ids.shape[1] // 8
        return self.model(ids, labels=labels, cu_seqlens=ends, max_seqlen=longest)


def run_one(implementation: str) -> dict[str, Any]:
    model = build(implementation).train()
    row: dict[str, Any] = {}
    if implementation == "ligermodels, packed":
        row["ms"], peak = timed(Packed(model), None)
        return row | {"peak GiB": peak / 2**30}
    row["ms"], peak = timed(model, None)
    row["peak GiB"] = peak / 2**30
    if implementation == "ligermodels":
        row["plans"] = plans(model)
    release_memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    row["ms with AdamW"], peak = timed(model, optimizer)
    return row | {"peak GiB with AdamW": peak / 2**30}


def decoding(implementation: str) -> list[dict[str, Any]]:
    """Return the times of a new token of 1 and 16 rows: see `benchmarks.decoding`."""
    model = build(implementation).requires_grad_(False).eval()
    rows: list[dict[str, Any]] = [{"rows": rows, "context": PROMPT} for rows in (1, 16)]
    for row in rows:
        if implementation == "ligermodels":
            ours(model, row)
        else:
            model.config.use_cache = model.generation_config.use_cache = True
            theirs(model, row, static=False)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for hybrid.json")
    parser.add_argument("--decoding", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(json.dumps((decoding if arguments.decoding else run_one)(arguments.only)))
        return
    step: dict[str, Any] = {"preset": PRESET, "layers": LAYERS, "tokens": SEQ, "rows": []}
    result: dict[str, Any] = {"environment": environment(), "step": step}
    for name in IMPLEMENTATIONS:
        step["rows"].append({"implementation": name} | in_process(name))
        write("hybrid.json", result, arguments.out)
    result["decoding"] = {}
    for name in ("ligermodels", "transformers"):
        result["decoding"][name] = in_process(name, "--decoding")
        write("hybrid.json", result, arguments.out)
    columns = ["implementation", "ms", "peak GiB", "ms with AdamW", "peak GiB with AdamW", "error"]
    print(table(step["rows"], columns))


def in_process(name: str, *options: str) -> Any:
    """Return what another process of this module prints as JSON, or a row with its error."""
    command = [sys.executable, "-m", "benchmarks.hybrid", *options, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(name, done.stderr[-3000:], file=sys.stderr)
        return {"error": (done.stderr.strip().splitlines() or ["failed"])[-1][:200]}
    print(name, done.stdout.splitlines()[-1], flush=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
