"""Run the gallery: every kind of training, on a CPU with a small model, in about a minute each.

    python -m examples.gallery build/smollm2 --output-dir runs/gallery              all entries
    python -m examples.gallery build/smollm2 --output-dir runs/gallery --only lora  one of them

The run of an entry is a command that you can type yourself. With `--publish 1`, its picture and its
numbers are then copied into the documentation; `python docs/site/hooks.py` writes the page of them.
With `--gpu 1`, the commands for a GPU run. Their seconds and memory go to gallery_gpu.json in the
output folder, and to the documentation with `--publish 1`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from examples.command import call

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "gallery"
RESULTS = ROOT / "benchmarks" / "results" / "gallery_cpu.json"
GPU_RESULTS = RESULTS.with_name("gallery_gpu.json")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the gallery.

    Attributes:
        name: of the entry's folder and picture
        title: what it shows
        run: an example and its options on a CPU; or a file in recipes/cpu and more options
        on_gpu: an example and its options on a GPU, for a larger model than on a CPU
        needs_model: whether the command names a model
        says: the message of the picture, with the names of numbers that the run has found
        recipes: files in recipes/ that do the same with a larger model on a GPU
        pages: pages of the documentation that explain it
    """

    name: str
    title: str
    run: str
    on_gpu: str = ""
    needs_model: bool = True
    says: str
    recipes: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()

    @property
    def is_recipe(self) -> bool:
        """Whether the entry is a recipe of the command line."""
        return self.run.endswith(".yaml")

    def command(self, model: str, folder: str, on_gpu: bool = False) -> str:
        """Return the command of the entry, on a CPU or on a GPU."""
        run = self.on_gpu if on_gpu else self.run
        if run.endswith(".yaml"):
            words = f"ligermodels finetune {model} --config {run}"
            return f"{words} --output-dir {folder} --overwrite-output-dir"
        program, _, options = run.partition(" ")
        options = options.format(model=model)
        named = f" {model}" if self.needs_model else ""
        return f"python -m examples.{program}{named} --output-dir {folder} {options}".rstrip()


_CPU = "examples/recipes/cpu"
ENTRIES = (
    Entry(
        name="text",
        title="Fine-tune on text",
        run=f"{_CPU}/text.yaml",
        says="The perplexity of chapters that the model has not seen falls from {before:.0f} to "
        "{after:.0f} in {steps} steps. The run would stop early, and exports its best checkpoint.",
        recipes=("llama-3.2-1b", "llama-3.1-8b", "gemma-3-4b", "qwen3.5-4b"),
        pages=("training", "command_line"),
    ),
    Entry(
        name="instructions",
        title="Instructions, with the prompt masked",
        run="instructions --examples 40 --held-out 8 --batch-size 1 --seq-len 128 --max-steps 12 "
        "--learning-rate 3e-4 --max-eval-rows 2",
        says="After {steps} steps on {examples} questions, the share of right answers about unseen "
        "sentences is {after:.0%} instead of {before:.0%}.",
        recipes=("llama-3.2-1b", "llama-3.1-8b-lora"),
        pages=("training",),
    ),
    Entry(
        name="preferences",
        title="Preferences (DPO)",
        run="preference --pairs 16 --held-out 4 --batch-size 4 --max-steps 4 --learning-rate 2e-4",
        says="{pairs} pairs teach the model to write “&” for “and”: the unseen sentences where it "
        "is likelier are {after:.0%} of all, and were {before:.0%}.",
        recipes=("llama-3.1-8b-dpo",),
        pages=("losses",),
    ),
    Entry(
        name="rewards",
        title="Online RL with a reward that can be checked",
        run="rewards --batch-size 8 --gradient-accumulation-steps 1 --max-completion-length 16 "
        "--max-steps 6 --eval-steps 6 --held-out 1 --learning-rate 3e-4",
        on_gpu="rewards --batch-size 64 --gradient-accumulation-steps 1 --max-completion-length 48 "
        "--max-steps 12 --eval-steps 12 --learning-rate 1e-5",
        says="GRPO, with a reward for short words: in {steps} steps their share in answers to "
        "other questions goes from {before:.0%} to {after:.0%}.",
        pages=("losses",),
    ),
    Entry(
        name="distillation",
        title="Distillation",
        run="distillation --characters 4000 --seq-len 64 --batch-size 4 --max-steps 5 "
        "--max-eval-rows 4 --learning-rate 5e-4",
        on_gpu="distillation --seq-len 1024 --batch-size 8 --max-steps 30 --max-eval-rows 16 "
        "--learning-rate 1e-4",
        says="A student with half the layers: its held-out loss is {before:.1f} at first, "
        "{text_alone:.1f} after the text alone, and {with_the_teacher:.1f} with its teacher.",
        pages=("distillation",),
    ),
    Entry(
        name="lora",
        title="LoRA",
        run=f"{_CPU}/lora.yaml",
        says="Adapters of rank 8 alone take the held-out perplexity from {before:.0f} to "
        "{after:.0f} in {steps} steps.",
        recipes=("llama-3.1-8b-lora", "gemma-4-31b-lora"),
        pages=("adapters",),
    ),
    Entry(
        name="qlora",
        title="QLoRA",
        run=f"{_CPU}/qlora.yaml",
        says="With the frozen weights in 4 bits, the held-out perplexity goes from {before:.0f} to "
        "{after:.0f} in {steps} steps.",
        recipes=("llama-3.1-8b-qlora", "qwen3-30b-a3b-qlora"),
        pages=("adapters",),
    ),
    Entry(
        name="scratch",
        title="Pretraining from scratch",
        run=f"{_CPU}/scratch.yaml",
        says="From random weights, the held-out perplexity of a tiny model is {before:,.0f} at "
        "first and {after:.0f} after {steps} steps.",
        recipes=("smollm2-135m-scratch",),
        pages=("command_line",),
    ),
    Entry(
        name="packing",
        title="Long rows of packed documents",
        run="packing --documents 8 --longest 128",
        says="{padding:.0%} of a padded batch of {documents:.0f} documents is padding. One packed "
        "row has the same loss, {packed_loss:.3f}, in 1/{times_faster:.1f} of the time.",
        recipes=("qwen3-8b-long",),
        pages=("training",),
    ),
    Entry(
        name="memory_plan",
        title="A plan for the memory",
        run="memory_plan llama-3.1-8b",
        needs_model=False,
        says="To fit 8 x 2048 tokens into {budget:.0f} GiB of an H100, {whole:.0f} of {layers:.0f} "
        "layers of Llama-3.1-8B keep all, and the others recompute as little as they must.",
        recipes=("llama-3.1-8b-qlora",),
        pages=("memory",),
    ),
    Entry(
        name="float8",
        title="float8",
        run="float8_error --tokens 64",
        says="In a model with fresh weights, float8 moves the gradients of a step by "
        "{delayed:.0%} (delayed scales) or {rowwise:.0%} (a scale for each row), and bfloat16 by "
        "{bfloat16:.0%}.",
        recipes=("llama-3.1-8b-float8",),
        pages=("float8",),
    ),
    Entry(
        name="experts",
        title="Experts",
        run="experts --balance 0.5",
        says="With the balance loss, the busiest expert of a layer gets {with:.1f} times the mean "
        "at the end, and {without:.1f} times without it.",
        recipes=("qwen3-30b-a3b-qlora", "gpt-oss-20b-lora"),
        pages=("training",),
    ),
    Entry(
        name="two_processes",
        title="Two processes",
        run="two_processes --seq-len 32 --max-steps 4",
        on_gpu="two_processes --seq-len 2048 --rows 8 --max-steps 10",
        says="Two processes that share the model and the rows have the losses of one, to a "
        "relative difference of {difference:.0e}.",
        pages=("parallel",),
    ),
    Entry(
        name="architecture",
        title="An architecture of your own",
        run="shared_keys --max-steps 120",
        on_gpu="shared_keys --hidden-size 2048 --intermediate-size 8192 --num-hidden-layers 16 "
        "--num-attention-heads 32 --num-key-value-heads 8 --sliding-window 512 --seq 2048 "
        "--max-steps 30 --lr 2e-4",
        needs_model=False,
        says="A decoder with shared keys and windows learns bytes: its loss falls from {first:.1f} "
        "to {last:.1f} in {steps} steps, and the saved model generates.",
        pages=("composing",),
    ),
    Entry(
        name="vision",
        title="A vision prefix",
        run="look_and_tell",
        on_gpu="look_and_tell --language {model} --max-steps 200",
        needs_model=False,
        says="A model that sees image patches before its text tells the place of the bright patch "
        "in {right:.0%} of unseen images.",
        pages=("composing",),
    ),
    Entry(
        name="encoder_decoder",
        title="An encoder-decoder, saved and loaded",
        run="encoder_decoder",
        on_gpu="encoder_decoder --hidden-size 1024 --num-hidden-layers 16 --num-attention-heads 16 "
        "--max-steps 300 --lr 2e-4",
        needs_model=False,
        says="It learns to sort letters: {right:.0%} of unseen inputs come out right after the "
        "model was saved and loaded again.",
        pages=("composing",),
    ),
    Entry(
        name="gguf",
        title="An export for llama.cpp",
        run="gguf_names",
        on_gpu="gguf_names",
        says="{named:.0f} of {tensors:.0f} exported tensors have a name in llama.cpp's table.",
        pages=("faq",),
    ),
    Entry(
        name="lm_eval",
        title="lm-eval, with a task of your own",
        run="lm_eval_task --questions 16",
        on_gpu="lm_eval_task --questions 150",
        says="Of {questions:.0f} sentences of a novel, the model finds the one that follows "
        "{right:.0%} of the time, where guessing gives 25%.",
        pages=("command_line",),
    ),
)


def numbers_of(folder: Path) -> dict[str, float]:
    """Return what an entry has found: its numbers, or the first and last evaluation of a run."""
    file = folder / "numbers.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    held = [row["eval_perplexity"] for row in rows if "eval_perplexity" in row]
    return {"before": held[0], "after": min(held), "steps": rows[-1]["step"]}


def start(command: str) -> None:
    """Run a command with this Python."""
    words = shlex.split(command)
    words[:1] = [sys.executable, *(["-m", "ligermodels"] if words[0] == "ligermodels" else [])]
    subprocess.run(words, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def run(
    entry: Entry, model: str, folder: Path, start: Callable[[str], object] = start
) -> dict[str, Any]:
    """Run an entry, and return its numbers and the seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start(entry.command(model, str(folder)))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    found = numbers_of(folder)
    print(f"{entry.title}: {entry.says.format(**found)}", flush=True)
    return {"seconds": round(seconds), "numbers": found}


def run_on_gpu(entry: Entry, model: str, folder: Path) -> dict[str, Any]:
    """Run the GPU's command of an entry, and return its seconds, and GiB of GPU memory or None."""
    words = shlex.split(entry.command(model, str(folder), on_gpu=True))[1:]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path[1:]))},
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - began
    print(done.stdout, flush=True)
    if done.returncode:
        return {"error": f"exit code {done.returncode}", "seconds": round(seconds)}
    peaks = re.findall(r"peak of memory +([\d.]+) GiB", done.stdout)  # of ligermodels finetune
    numbers = numbers_of(folder)
    peak = max(float(each) for each in (*peaks, numbers.pop("peak_gib", 0.0)))
    return {"seconds": round(seconds), "peak GiB": round(peak, 1) or None, "numbers": numbers}


def main(model: str, output_dir: Path, *, only: str = "", publish: int = 0, gpu: int = 0) -> None:
    """Run the entries, and publish pictures and numbers where the documentation finds them."""
    model = os.path.abspath(model) if os.path.isdir(model) else model
    for entry in ENTRIES:
        if (only and entry.name not in only.split(",")) or (gpu and not entry.on_gpu):
            continue
        folder = output_dir.absolute() / entry.name
        if gpu:
            measured = run_on_gpu(entry, model, folder)
            print(entry.name, measured, flush=True)
            for file in (GPU_RESULTS,) if publish else (output_dir / GPU_RESULTS.name,):
                found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
                found["environment"] = environment()
                found["entries"] = found.get("entries", {}) | {entry.name: measured}
                file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            continue
        measured = run(entry, model, folder)
        if not publish:
            continue
        drawn = folder / ("loss.png" if entry.is_recipe else "picture.png")
        shutil.copyfile(drawn, PICTURES / f"{entry.name}.png")
        found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        found["environment"] = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__.partition("+")[0],
            "python": platform.python_version(),
        }
        found["entries"] = found.get("entries", {}) | {entry.name: measured}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    call(main, __doc__)
