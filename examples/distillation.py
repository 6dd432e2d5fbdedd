"""Teach a model of half the layers what the whole model says, beside training on text alone.

    python -m examples.distillation build/smollm2 --output-dir runs/distillation

The student begins with every second layer of its teacher. It is trained twice on a part of a novel,
with the same batches in the same order: on the text alone, which it soon knows by heart, and with
the teacher. The run prints the held-out loss of the next token before, and after each.
"""

import copy
from pathlib import Path

import torch

from examples.command import call
from ligermodels import AutoLiger
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.finetune import finetune

DATA = Path(__file__).parent / "data"


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
        config = FinetuneConfig.from_options(
            model=str(output_dir / "student"),
            train_files=[str(output_dir / "train.txt")],
            eval_files=[str(DATA / "persuasion-heldout.txt")],
            output_dir=str(output_dir / name.replace(" ", "-")),
            overwrite_output_dir=True,
            save_steps=0,
            **settings | extra,
        )
        result = finetune(config)
        key = "eval_nll" if extra else "eval_loss"
        losses |= {"before": result.eval_before[key], name: result.eval_after[key]}
    for name, loss in losses.items():
        print(f"held-out loss of the next token, {name}: {loss:.3f}")
    return losses


if __name__ == "__main__":
    call(
        main,
        __doc__,
        characters=60_000,
        max_steps=150,
        learning_rate=2e-4,
        distill_weight=0.8,
        temperature=1.0,
    )
