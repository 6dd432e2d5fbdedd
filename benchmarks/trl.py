"""Compare TRL's SFT and DPO on native models with TRL on transformers: python -m benchmarks.trl

The models have the shapes of Llama-3.2-1B and Llama-3-8B, random weights, bf16 parameters and bf16
AdamW states, and run on one GPU; the data are random words. TRL's defaults hold: activation
checkpointing, and its own fused head on transformers' models. Each run has its own process. The
time is the median of the steps, and the memory is the peak of allocated bytes.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, table, write

IMPLEMENTATIONS = ("transformers", "transformers + liger", "ligermodels")
MODELS = ("llama-3.2-1b", "llama-3-8b")
# Trainer -> rows per step and tokens per row. A pair of DPO is two rows.
WORKLOADS = {"SFT": (4, 2048), "DPO": (4, 1024)}


def build(implementation: str, preset: str) -> Any:
    from ligermodels import LigerLlama, LlamaConfig
    from ligermodels.integrations.hf_model import LigerForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            shell = LigerForCausalLM.from_native(LigerLlama(LlamaConfig.preset(preset)))
            if implementation == "ligermodels":
                return shell
            import transformers

            config = shell.config
            del shell
            return transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def tokenizer() -> Any:
    """Return a tokenizer of 1000 words, each of which is one token."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 1000)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<eos>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def data(trainer: str, rows: int, seq: int, steps: int) -> Any:
    """Return a dataset of texts with seq tokens, the end included; half of a pair is its prompt."""
    import datasets

    drawn = random.Random(0)
    names = {"SFT": ["text"], "DPO": ["prompt", "chosen", "rejected"]}[trainer]
    words = (seq - 1) // (2 if trainer == "DPO" else 1)
    count = rows * steps // (2 if trainer == "DPO" else 1)
    texts = {
        name: ["".join(f" w{drawn.randrange(2, 1000)}" for _ in range(words)) for _ in range(count)]
        for name in names
    }
    return datasets.Dataset.from_dict(texts)


def run_one(implementation: str, preset: str, name: str, steps: int) -> dict[str, Any]:
    import transformers
    import trl

    from ligermodels.integrations import trl_trainers

    class Clock(transformers.TrainerCallback):
        """Measures the time from one step's end to the next one's, after three steps."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.last = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            now = time.perf_counter()
            if state.global_step == 3:
                torch.cuda.reset_peak_memory_stats()
            elif state.global_step > 3:
                self.times.append(1e3 * (now - self.last))
            self.last = now

    rows, seq = WORKLOADS[name]
    transformers.set_seed(0)
    model, clock = build(implementation, preset), Clock()
    options: dict[str, Any] = {
        "per_device_train_batch_size": rows if name == "SFT" else rows // 2,
        "max_steps": steps + 3,
        "max_length": seq,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_liger_kernel": implementation == "transformers + liger",
    }
    ours = implementation == "ligermodels"
    cls = getattr(trl_trainers if ours else trl, f"{'Liger' if ours else ''}{name}Trainer")
    more: dict[str, Any] = {}
    if name == "DPO" and not ours:
        more["ref_model"] = build(implementation, preset)
        more["ref_model"].load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        trainer = cls(
            model=model,
            args=getattr(trl, f"{name}Config")(output_dir=folder, **options),
            train_dataset=data(name, rows, seq, steps + 3),
            processing_class=tokenizer(),
            callbacks=[clock],
            **more,
        )
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "trainer": name,
        "model": preset,
        "batch x seq": f"{rows} x {seq}",
        "implementation": implementation,
        "ms": statistics.median(clock.times),
        "ms spread": max(clock.times) - min(clock.times),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "last loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for trl.json")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--trainers", nargs="+", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument("--only", nargs=3, metavar=("IMPLEMENTATION", "MODEL", "TRAINER"))
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run_one(*arguments.only, arguments.steps)))
        return
    rows = []
    for trainer in arguments.trainers:
        for model in arguments.models:
            for name in IMPLEMENTATIONS:
                command = [sys.executable, "-m", "benchmarks.trl", "--steps", str(arguments.steps)]
                done = subprocess.run(
                    [*command, "--only", name, model, trainer], capture_output=True, text=True
                )
                if done.returncode:
                    print(done.stderr[-2000:], file=sys.stderr)
                    kept = {"trainer": trainer, "model": model, "implementation": name}
                    rows.append(kept | {"ms": "failed"})
                else:
                    rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
                result = {"environment": environment(), "rows": rows}
                write("trl.json", result, arguments.out)
    columns = ["trainer", "model", "batch x seq", "implementation", "ms", "ms spread"]
    print(table(rows, [*columns, "peak GiB", "last loss"]))


if __name__ == "__main__":
    main()
