"""Measure a step of the families that `benchmarks.families` leaves out: python -m benchmarks.cards

Their cards in the documentation have the rows. The models have real layer widths and vocabularies,
fewer layers, and random bf16 weights; the optimizer is AdamW. Each implementation has one process
for all models.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, environment, release_memory, table, write
from benchmarks.experts import timed
from ligermodels.converters.hf_config import to_hf
from ligermodels.errors import first_line
from ligermodels.models.auto import families

# Family, preset, layers, tokens of a row, which is longer than the window, if there is one.
WORKLOADS = (
    ("phi3", "phi-3-mini-4k", 4, 4096),
    ("olmo3", "olmo-3-7b", 4, 8192),
    ("olmo2", "olmo-2-7b", 4, 4096),
    ("ministral3", "ministral-3-8b", 4, 4096),
    ("smollm3", "smollm3-3b", 4, 4096),
    ("granite", "granite-3.3-8b", 4, 4096),
    ("granitemoehybrid", "granite-4.0-micro", 4, 4096),
    ("gemma4_text", "gemma-4-31b", 6, 4096),
    ("qwen3_5_moe_text", "qwen3.5-35b-a3b", 4, 8192),
)
IMPLEMENTATIONS = ("transformers", "ligermodels")


def build(implementation: str, family: str, preset: str, layers: int, device: str) -> Any:
    """Return a model with random weights."""
    cls = families()[family]
    config = cls.config_class.preset(preset, num_hidden_layers=layers)
    torch.manual_seed(0)
    if implementation == "ligermodels":
        with torch.device(device):
            return cls(config).to(torch.bfloat16)
    sys.modules["fla"] = None  # type: ignore[assignment]  # transformers would take it
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(to_hf(config)))
        theirs = transformers.AutoConfig.from_pretrained(folder)
    theirs.use_cache = False
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(theirs, **options)


def run_one(implementation: str, family: str, preset: str, layers: int, seq: int) -> dict[str, Any]:
    model = build(implementation, family, preset, layers, "cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ms, peak = timed(model, optimizer, seq=seq)
    return {"ms with AdamW": ms, "peak GiB with AdamW": peak / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for cards.json")
    parser.add_argument("--only", help="presets, with commas; the others keep their rows")
    parser.add_argument("--implementation", help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = [each for each in WORKLOADS if each[1] in (given.only or each[1]).split(",")]
    if given.implementation is None:
        command = [sys.executable, "-m", "benchmarks.cards", *sys.argv[1:], "--implementation"]
        for name in IMPLEMENTATIONS:
            subprocess.run([*command, name], check=True)
        return
    file = given.out / "cards.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"steps": {}}
    for family, preset, layers, seq in chosen:
        row: dict[str, Any] = {"implementation": given.implementation}
        try:
            row |= run_one(given.implementation, family, preset, layers, seq)
        except Exception as error:  # a peer may have none of this family
            row["error"] = f"{type(error).__name__}: {first_line(error)}"
        release_memory()
        step = {"layers": layers, "tokens": seq, "environment": environment(), "rows": []}
        old = found["steps"].get(preset, step)
        others = [each for each in old["rows"] if each["implementation"] != given.implementation]
        found["steps"][preset] = step | {"rows": [*others, row]}
        write("cards.json", found, given.out)
        print(table([{"model": preset} | row], ["model", *row]), flush=True)


if __name__ == "__main__":
    main()
