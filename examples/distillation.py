"""Teach a model of half the layers what the whole model says, beside training on text alone.

    python -m examples.distillation build/smollm2 --output-dir runs/distillation

The student begins with every second layer of its teacher. It is trained twice on a part of a novel,
with the same batches in the same order: on the text alone, which it soon knows by heart, and with
the teacher. The run prints the held-out loss of the next token before, and after each.
"""

import copy
from pathlib import Path

import torch

from examples.command import DATA, call, draw_bars, report, tune
from ligermodels import AutoLiger


def make_student(teacher: str, folder: Path, every: int = 2) -> None:
    """Write a model that has every `every`-th layer of the teacher, and all else of it."""
    whole = AutoLiger.from_hf(teacher, dtype=torch.float32)
    kept = [*range(0, len(whole.layers), every)]
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = len(kept)
    student = type(whole)(config)
    weights = whole.state_dict()
    for name in student.state_dict():
        room, _, rest = name.partition(".")
        if room == "layers":
            index, _, rest = rest.partition(".")
            weights[name] = whole.state_dict()[f"layers.{kept[int(index)]}.{rest}"]
    student.load_state_dict({name: weights[name] for name in student.state_dict()})
    student.source.files = whole.source.files
    student.save_hf(folder)


def main(
    model: str,
    output_dir: Path,
    *,
    every: int = 2,
    characters: int = 60_000,
    distill_weight: float = 0.8,
    temperature: float = 1.0,
    **options: object,
) -> dict[str, float]:
    output_dir.mkdir(parents=True, exist_ok=True)
    make_student(model, output_dir / "student", every)
    text = (DATA / "persuasion-train.txt").read_text(encoding="utf-8")[:characters]
    (output_dir / "train.txt").write_text(text, encoding="utf-8")
    settings: dict = {
        "batch_size": 8,
        "learning_rate": 2e-4,
        "seq_len": 512,
        "max_steps": 150,
        "eval_steps": 1000,
    }
    settings |= options
    taught = {"loss": "distillation", "teacher": model, "beta": 0.0}
    taught |= {"temperature": temperature, "distill_weight": distill_weight}
    losses = {}
    for name, extra in (("text alone", {}), ("with the teacher", taught)):
        result = tune(
            str(output_dir / "student"),
            output_dir / name.replace(" ", "-"),
            output_dir / "train.txt",
            DATA / "persuasion-heldout.txt",
            **settings | extra,
        )
        key = "eval_nll" if extra else "eval_loss"
        losses |= {"before": result.eval_before[key], name: result.eval_after[key]}
    draw_bars(output_dir, "held-out loss of the next token (nats)", losses)
    report(output_dir, **{name.replace(" ", "_"): loss for name, loss in losses.items()})
    return losses


if __name__ == "__main__":
    call(main, __doc__)
