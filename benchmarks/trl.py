"""Compare TRL's SFT and DPO on native models with TRL on transformers: python -m benchmarks.trl

The models have the shapes of Llama-3.2-1B and Llama-3-8B, random weights, bf16 parameters and bf16
AdamW states, and run on one GPU; the data are random words. TRL's defaults hold: every block is
recomputed, and transformers' models get TRL's own fused head. "ligermodels, planned" has a memory
plan for the peak of transformers instead, which the optimizer's step needs in any case. All
implementations of a model have the same weights and data. The time is the median of the steps, and
the memory is the peak of allocated bytes.
"""

import argparse
import gc
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
import trl

from benchmarks.common import environment, release_memory, table, write
from benchmarks.text_data import data, tokenizer
from ligermodels import LigerLlama, LlamaConfig
from ligermodels.integrations import trl_trainers
from ligermodels.integrations.hf_model import LigerForCausalLM

# Liger comes last in a process, because it replaces functions of transformers for good. So they run
# in this order, whatever the order of the arguments.
PLANNED, LIGER = "ligermodels, planned", "transformers + liger"
IMPLEMENTATIONS = ("transformers", "ligermodels", PLANNED, LIGER)
MODELS = ("llama-3-8b", "llama-3.2-1b")
# Trainer -> rows per step and tokens per row. A pair of DPO is two rows.
WORKLOADS = {"SFT": (4, 2048), "DPO": (4, 1024)}
# Trainer -> the peak of transformers on an H200, less the weights of DPO's reference model.
BUDGETS = {
    "SFT": {"llama-3-8b": "60.7GiB", "llama-3.2-1b": "10.3GiB"},
    "DPO": {"llama-3-8b": "60.1GiB", "llama-3.2-1b": "9.9GiB"},
}
WARMUP = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(name: str) -> LlamaConfig:
    if name == "tiny":  # to try this script without a GPU
        return LlamaConfig(
            vocab_size=1000,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    return LlamaConfig.preset(name)


def build(implementation: str, name: str) -> Any:
    """Return a model of the implementation; its random weights do not depend on it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            wrapper = LigerForCausalLM.from_native(LigerLlama(config(name)))
            if implementation.startswith("ligermodels"):
                return wrapper
            model = transformers.LlamaForCausalLM(wrapper.config)
        model.load_state_dict(dict(wrapper.hf_named_parameters()), strict=False)
        return model
    finally:
        torch.set_default_dtype(torch.float32)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Clock(transformers.TrainerCallback):
    """Measures the time from one step's end to the next one's, after the warm-up."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.last = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        now = time.perf_counter()
        if state.global_step == WARMUP and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif state.global_step > WARMUP:
            self.times.append(1e3 * (now - self.last))
        self.last = now


def gibibytes(count: int) -> float:
    return count / 2**30


def train(implementation: str, model_name: str, name: str, steps: int) -> dict[str, Any]:
    """Train for some steps, and return the measured values."""
    rows, seq = WORKLOADS[name]
    model, clock = build(implementation, model_name), Clock()
    if implementation == PLANNED and DEVICE == "cuda":
        budget = BUDGETS[name][model_name]
        plan = model.native.plan_memory(rows, seq, budget, count="allocated", reserve=0)
        print(plan, flush=True)
        model.native.set_memory_plan(plan)
    options: dict[str, Any] = {
        "per_device_train_batch_size": rows if name == "SFT" else rows // 2,
        "max_steps": steps + WARMUP,
        "max_length": seq,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": DEVICE == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_liger_kernel": implementation == LIGER,
        "gradient_checkpointing": implementation != PLANNED,
    }
    ours = implementation.startswith("ligermodels")
    cls = getattr(trl_trainers if ours else trl, f"{'Liger' if ours else ''}{name}Trainer")
    more: dict[str, Any] = {}
    if name == "DPO" and not ours:
        more["ref_model"] = build(implementation, model_name)
    with tempfile.TemporaryDirectory() as folder:
        trainer = cls(
            model=model,
            args=getattr(trl, f"{name}Config")(output_dir=folder, **options),
            train_dataset=data(name, rows, seq, steps + WARMUP),
            processing_class=tokenizer(),
            callbacks=[clock],
            **more,
        )
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "ms": statistics.median(clock.times),
        "ms spread": max(clock.times) - min(clock.times),
        "peak GiB": gibibytes(torch.cuda.max_memory_allocated()) if DEVICE == "cuda" else 0.0,
        "first loss": losses[0],
        "last loss": losses[-1],
    }


def run(implementation: str, model_name: str, name: str, steps: int) -> dict[str, Any]:
    """Return a row of the table, also if the run fails."""
    rows, seq = WORKLOADS[name]
    row = {
        "trainer": name,
        "model": model_name,
        "batch x seq": f"{rows} x {seq}",
        "implementation": implementation,
    }
    start = time.perf_counter()
    try:
        row |= train(implementation, model_name, name, steps)
    except Exception as error:
        traceback.print_exc()
        row["ms"] = f"failed: {type(error).__name__}"
    gc.collect()
    if DEVICE == "cuda":
        release_memory()
        row["GiB left over"] = gibibytes(torch.cuda.memory_allocated())
    row["seconds in all"] = time.perf_counter() - start
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for trl.json")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=[*MODELS, "tiny"])
    parser.add_argument("--trainers", nargs="+", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument(
        "--implementations", nargs="+", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS
    )
    arguments = parser.parse_args()
    rows = []
    for implementation in sorted(arguments.implementations, key=IMPLEMENTATIONS.index):
        for model in arguments.models:
            for trainer in arguments.trainers:
                rows.append(run(implementation, model, trainer, arguments.steps))
                print(rows[-1], flush=True)
                write("trl.json", {"environment": environment(), "rows": rows}, arguments.out)
    rows.sort(key=lambda row: (row["trainer"], row["model"]), reverse=True)
    columns = ["trainer", "model", "batch x seq", "implementation", "ms", "ms spread"]
    print(table(rows, [*columns, "peak GiB", "first loss", "last loss"]))


if __name__ == "__main__":
    main()
