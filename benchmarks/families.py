"""Compare one bf16 training step of each family with transformers: python -m benchmarks.families

The models have real layer widths and vocabularies, fewer layers, and random weights. The gradients
of a step are compared with those of transformers in float32. Then the loss after an AdamW step, the
time of a step and its peak memory are measured.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, table, write

# Family, preset, layers, tokens per row. Rows are longer than the window, if there is one.
WORKLOADS = (
    ("llama", "llama-3.1-8b", 4, 4096),
    ("mistral", "mistral-7b-v0.1", 4, 8192),
    ("gemma", "gemma-2b", 4, 4096),
    ("gemma2", "gemma-2-2b", 4, 6144),
    ("gemma3_text", "gemma-3-4b", 6, 4096),
    ("qwen2", "qwen2.5-7b", 4, 4096),
    ("qwen3", "qwen3-8b", 4, 4096),
)
LEARNING_RATE = 1e-4
IMPLEMENTATIONS = ("transformers", "transformers + liger", "ligermodels")


def make_checkpoint(family: str, preset: str, layers: int, folder: Path) -> dict[str, Any]:
    """Write a checkpoint of random bf16 weights; return the options to load it in transformers."""
    import transformers

    from ligermodels.converters.hf_config import to_hf
    from ligermodels.models.auto import families

    config = families()[family].config_class.preset(preset, num_hidden_layers=layers)
    config.dtype = "bfloat16"
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    options = {
        "dtype": torch.bfloat16,
        # SDPA has no soft cap, so transformers applies it only in eager mode.
        "attn_implementation": "eager" if family == "gemma2" else "sdpa",
    }
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config, **options)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # so that no two norms are equal
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return options


def gradients_by_hf_name(model: Any) -> dict[str, Tensor]:
    """Return our gradients under HF's names, which the weight map gives."""
    named = dict(model.named_parameters())
    pieces: dict[str, Tensor] = {}
    for entry in model.weight_map(model.config):
        for span in entry.spans:
            pieces[span.source] = named[entry.name].grad[span.row : span.row + span.rows]
    return pieces


def distance(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float]:
    """Return the relative norm of the difference of all parameters, and of the worst parameter."""
    squares, norms, worst = 0.0, 0.0, 0.0
    for name, expected in exact.items():
        difference = (gradients[name].float() - expected).norm().item()
        norm = expected.norm().item()
        squares, norms = squares + difference**2, norms + norm**2
        worst = max(worst, difference / max(norm, 1e-30))
    return (squares / norms) ** 0.5, worst


def step_of(model: Any) -> tuple[Callable[[Tensor], float], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(ids: Tensor) -> float:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, optimizer


def run_one(family: str, preset: str, layers: int, seq: int) -> list[dict[str, Any]]:
    import transformers

    from ligermodels import AutoLiger

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = make_checkpoint(family, preset, layers, folder)
        gc.collect()
        torch.cuda.empty_cache()

        def theirs(dtype: torch.dtype) -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder, **{**options, "dtype": dtype}, device_map="cuda"
            ).train()

        vocab = transformers.AutoConfig.from_pretrained(folder).vocab_size
        ids = torch.randint(3, vocab, (1, seq), device="cuda")
        reference = theirs(torch.float32)
        reference.config.use_cache = False
        loss = reference(ids, labels=ids).loss
        loss.backward()
        exact = {n: p.grad.cpu() for n, p in reference.named_parameters()}
        rows = [{"implementation": "transformers, float32", "loss": loss.item()}]
        step, _ = step_of(reference)
        reference.zero_grad()
        step(ids)
        with torch.no_grad():
            rows[0]["loss after a step"] = reference(ids, labels=ids).loss.item()
        del reference, step, loss, _
        for implementation in IMPLEMENTATIONS:
            gc.collect()
            torch.cuda.empty_cache()
            if implementation == "ligermodels":
                model: Any = AutoLiger.from_hf(folder, device="cuda").train()
            else:
                if implementation != "transformers":
                    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

                    MODEL_TYPE_TO_APPLY_LIGER_FN[family]()
                model = theirs(torch.bfloat16)
                model.config.use_cache = False
            rows.append({"implementation": implementation, **measure(model, ids, exact)})
            del model
        for row in rows:
            row.update({"family": family, "preset": f"{preset}, {layers} layers", "seq": seq})
        return rows


def measure(model: Any, ids: Tensor, exact: dict[str, Tensor]) -> dict[str, Any]:
    loss = model(ids, labels=ids).loss
    loss.backward()
    if hasattr(model, "head"):
        gradients = gradients_by_hf_name(model)
    else:
        gradients = {n: p.grad for n, p in model.named_parameters()}
    error, worst = distance({n: g.cpu() for n, g in gradients.items()}, exact)
    del gradients
    model.zero_grad(set_to_none=True)
    row = {"loss": loss.item(), "gradient error": error, "worst parameter": worst}
    del loss
    step, optimizer = step_of(model)
    step(ids)
    with torch.no_grad():
        row["loss after a step"] = model(ids, labels=ids).loss.item()
    for _ in range(2):
        step(ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(ids)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    row["ms"] = statistics.median(times)
    row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    optimizer.state.clear()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for families.json")
    parser.add_argument(
        "--only", help="measure one family in this process, and print its rows as JSON"
    )
    arguments = parser.parse_args()
    if arguments.only:
        workload = next(w for w in WORKLOADS if w[0] == arguments.only)
        print(json.dumps(run_one(*workload)))
        return
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        # Each family has its own process, because Liger's patches remain in a process.
        command = [sys.executable, "-m", "benchmarks.families", "--only", workload[0]]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(workload[0], done.stderr[-3000:], file=sys.stderr)
            rows.append({"family": workload[0], "implementation": "failed"})
        else:
            rows += json.loads(done.stdout.splitlines()[-1])
        print(rows[-1], flush=True)
        write("families.json", {"environment": environment(), "rows": rows}, arguments.out)
    columns = ["family", "seq", "implementation", "loss", "loss after a step", "gradient error"]
    print(table(rows, [*columns, "worst parameter", "ms", "peak GiB"]))


if __name__ == "__main__":
    main()
