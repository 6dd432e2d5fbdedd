"""Train with one tool's own code on two checkpoints, and write how far the numbers differ.

    python -m tests.integrations.outside_worker TOOL FOLDER

tests/integrations/outside_tools.py starts it with the Python of the tool's environment. FOLDER has
a folder for each family, with two copies of a checkpoint: `native` names our class in config.json,
and `hf` does not. The differences go to FOLDER/errors.json. A tool imports transformers in its own
order, so that nothing else is imported before it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, ROWS, ACCUMULATION, RATE, SEED, LENGTH = 4, 2, 2, 1e-2, 1, 64
RANK = 4


# Arguments of transformers' Trainer, for the tools that stand on it.
TRAINER = {
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": ACCUMULATION,
    "max_steps": STEPS,
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "seed": SEED,
    "use_cpu": True,
}
Outcome = tuple[Any, list[float]]  # the model that a tool has trained, and the losses


def axolotl(checkpoint: Path, out: Path, lora: bool) -> Outcome:
    import torch
    import yaml
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    text = checkpoint.parent.parent / "train.jsonl"
    # With adapters, Axolotl divides by the labels of all micro-batches if the model's forward names
    # num_items_in_batch, as ours does, and else it averages their means. So transformers' model
    # gets one large batch, whose loss ours must equal.
    accumulation = 1 if lora and checkpoint.name == "hf" else ACCUMULATION
    options = {
        "base_model": str(checkpoint),
        "trust_remote_code": checkpoint.name == "native",
        "attn_implementation": "eager",  # of transformers' implementations, only it caps scores
        "datasets": [{"path": str(text), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(out / "prepared"),
        "dataset_num_proc": 1,
        "output_dir": str(out / "saved"),
        "sequence_len": LENGTH,
        "micro_batch_size": ROWS * ACCUMULATION // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS,
        "num_epochs": 10,
        "optimizer": "sgd",
        "learning_rate": RATE,
        "lr_scheduler": "constant",
        "logging_steps": 1,
        "seed": SEED,
        "bf16": False,
        "fp16": False,
        "tf32": False,
    }
    if lora:
        options |= {"adapter": "lora", "lora_r": RANK, "lora_alpha": 8, "lora_dropout": 0.0}
        options |= {"lora_target_linear": True}
        # Its own kernels for LoRA run on GPUs. It refuses them if trust_remote_code is on.
        options |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    file = out / "run.yaml"
    file.write_text(yaml.safe_dump(options), encoding="utf-8")
    cfg = load_cfg(str(file))
    data = load_datasets(cfg=cfg)
    torch.manual_seed(SEED)  # Axolotl draws the adapters before it sets the seed of the run
    model, _, trainer = train(cfg=cfg, dataset_meta=data)
    return model, losses(trainer.state.log_history)


def llamafactory(checkpoint: Path, out: Path, lora: bool) -> Outcome:
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    class Seen(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.model, self.history = more["model"], state.log_history

    options = {
        "model_name_or_path": str(checkpoint),
        "trust_remote_code": checkpoint.name == "native",
        "flash_attn": "disabled",  # which means transformers' eager attention
        "infer_dtype": "float32",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora" if lora else "full",
        "dataset": "tiny",
        "dataset_dir": str(checkpoint.parent.parent),
        "template": "empty",
        "cutoff_len": LENGTH,
        "output_dir": str(out / "saved"),
        "report_to": "none",
        **TRAINER,
    }
    if lora:
        options |= {"lora_rank": RANK, "lora_target": "all", "lora_dropout": 0.0}
    seen = Seen()
    run_exp(options, callbacks=[seen])
    return seen.model, losses(seen.history)


def unsloth(checkpoint: Path, out: Path, lora: bool) -> Outcome:
    from unsloth import FastLanguageModel  # isort: skip (it must come before the others)
    import torch
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(checkpoint),
        max_seq_length=LENGTH,
        dtype=torch.float32,
        load_in_4bit=False,
        full_finetuning=not lora,
        trust_remote_code=checkpoint.name == "native",
        attn_implementation="eager",
    )
    if lora:
        model = FastLanguageModel.get_peft_model(
            model, r=RANK, lora_alpha=8, lora_dropout=0.0, random_state=SEED
        )
    data = str(checkpoint.parent.parent / "train.jsonl")
    options = {"max_length": LENGTH, "save_strategy": "no", "report_to": [], "bf16": False}
    arguments = SFTConfig(str(out / "run"), **TRAINER, **options)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=data, split="train"),
        processing_class=tokenizer,
    )
    trainer.train()
    model.save_pretrained(out / "saved")
    return model, losses(trainer.state.log_history)


TOOLS: dict[str, Callable[[Path, Path, bool], Outcome]] = {
    "axolotl": axolotl,
    "llamafactory": llamafactory,
    "unsloth": unsloth,
}


def losses(history: list[dict[str, Any]]) -> list[float]:
    found = [entry["loss"] for entry in history if "loss" in entry]
    assert len(found) == STEPS, history
    return found


def relative(found: Any, expected: Any) -> float:
    import torch

    a, b = (torch.as_tensor(x).double() for x in (found, expected))
    assert a.shape == b.shape and a.isfinite().all(), (a, b)  # `max` would lose a NaN
    return ((a - b).norm() / b.norm()).item()


def saved(folder: Path, lora: bool) -> dict[str, Any]:
    """Read the tensors that a tool has saved, which must be an ordinary checkpoint or adapter."""
    from safetensors.torch import load_file

    assert not list(folder.glob("*.py")), folder
    if not lora:
        assert "auto_map" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return load_file(folder / ("adapter_model.safetensors" if lora else "model.safetensors"))


def compare(tool: str, folder: Path, lora: bool) -> dict[str, float]:
    """Train on both checkpoints of a family, and return the relative errors."""
    import importlib

    importlib.import_module(tool)  # before transformers, which some tools change
    outcomes, weights = {}, {}
    for name in ("native", "hf"):
        out = folder / f"{name}-{'lora' if lora else 'full'}"
        out.mkdir()
        outcomes[name] = TOOLS[tool](folder / name, out, lora)
        weights[name] = saved(out / "saved", lora)
    from ligermodels.integrations.hf_model import LigerForCausalLM

    for name, (trained, _) in outcomes.items():
        model = trained.get_base_model() if lora else trained
        assert isinstance(model, LigerForCausalLM) == (name == "native"), type(model).__mro__
    assert weights["native"].keys() == weights["hf"].keys(), weights["native"].keys()
    return {
        "losses": relative(outcomes["native"][1], outcomes["hf"][1]),
        "saved": max(relative(weights["native"][key], hf) for key, hf in weights["hf"].items()),
    }


def main(tool: str, folder: Path) -> None:
    errors = {
        f"{family.name}, {'LoRA' if lora else 'full'}": compare(tool, family, lora)
        for family in sorted(path for path in folder.iterdir() if (path / "native").is_dir())
        for lora in (False, True)
    }
    (folder / "errors.json").write_text(json.dumps(errors), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
