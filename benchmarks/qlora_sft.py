"""The rows of benchmarks.qlora that train with TRL's SFTTrainer: of TRL itself, and of Unsloth.

Unsloth's process imports Unsloth before this file, and then trl.SFTTrainer is Unsloth's.
"""

import gc
import importlib.metadata
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl

from benchmarks.text_data import data, tokenizer

VERSIONS = ("unsloth", "trl", "peft", "transformers", "accelerate", "datasets", "bitsandbytes")


class Clock(transformers.TrainerCallback):
    """Measures the time from one step's end to the next one's, after two steps."""

    def __init__(self, device: str) -> None:
        self.times: list[float] = []
        self.last, self.device = 0.0, device

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if state.global_step == 2 and self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif state.global_step > 2:
            self.times.append(1e3 * (now - self.last))
        self.last = now


def train(
    model: Any, words: Any, batch: int, seq: int, steps: int, device: str, **more: Any
) -> tuple[list[float], float]:
    """Return the milliseconds of each step after two, and the last loss. `words` is a tokenizer."""
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=1,  # Unsloth's default is 2
            max_steps=steps + 2,
            max_length=seq,
            learning_rate=1e-4,
            optim="adamw_torch_fused",
            bf16=True,
            logging_steps=steps + 2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=data("SFT", batch, seq, steps + 2),
            processing_class=words,
            callbacks=[clock],
            **more,
        )
        lengths = {len(row["input_ids"]) for row in trainer.train_dataset}
        assert lengths == {seq}, lengths
        trainer.train()
    return clock.times, trainer.state.log_history[0]["loss"]


def write_checkpoint(folder: Path, config: dict[str, Any], device: str) -> None:
    """Write a model with random bfloat16 weights, and a tokenizer, for Unsloth's loader."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def unsloth(
    config: dict[str, Any],
    targets: list[str],
    recomputes: str | bool,
    seq: int,
    device: str,
) -> tuple[Any, Any]:
    """Return a random model with adapters, and its tokenizer, as Unsloth's users load them.

    `recomputes` is Unsloth's use_gradient_checkpointing: "unsloth" moves what every block keeps to
    the host, and True leaves it on the GPU. On a CPU, Unsloth's kernels do not run, so there it
    only tries the code.
    """
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), config, device)
        model, words = FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=seq,
            dtype=torch.bfloat16,
            load_in_4bit=True,
            use_gradient_checkpointing=recomputes,
        )
    kinds = {type(module).__name__ for module in model.model.layers.modules()}
    assert "Linear4bit" in kinds, kinds  # Unsloth falls back to 16 bits with a message alone
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=32,
        lora_dropout=0.0,
        target_modules=targets,
        use_gradient_checkpointing=recomputes,
    )
    return model, words


def versions() -> dict[str, str]:
    """Return the versions of the packages that are compared, as this process imports them."""
    found = {}
    for package in VERSIONS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found
