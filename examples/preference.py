"""Teach a model to prefer a sentence as it was written to the same sentence with its words mixed.

    python examples/preference.py build/smollm2 --output-dir runs/preference

The pairs are made from a novel. The run prints how often the model prefers the right end of
sentences that it has not seen, before and after.
"""

import argparse
import json
import random
from pathlib import Path

from ligermodels.training.config import FinetuneConfig
from ligermodels.training.finetune import FinetuneResult, finetune

DATA = Path(__file__).parent / "data"


def write_pairs(text: Path, file: Path, count: int, seed: int = 0) -> None:
    """Write pairs of the end of a sentence and the same words in another order."""
    draw = random.Random(seed)
    sentences = text.read_text(encoding="utf-8").replace("\n", " ").split(". ")
    fitting = [each.split() for each in sentences if 12 <= len(each.split()) <= 24]
    records = []
    for words in draw.sample(fitting, count):
        start, end = words[:8], words[8:]
        mixed = end.copy()
        while mixed == end:
            draw.shuffle(mixed)
        prompt, chosen, rejected = (" ".join(part) for part in (start, end, mixed))
        records.append({"prompt": prompt, "chosen": f" {chosen}.", "rejected": f" {rejected}."})
    file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")


def main(
    model: str,
    output_dir: Path,
    *,
    loss: str = "dpo",
    pairs: int = 512,
    held_out: int = 64,
    **options: object,
) -> FinetuneResult:
    output_dir.mkdir(parents=True, exist_ok=True)
    files = {name: output_dir / f"{name}.jsonl" for name in ("train", "heldout")}
    for name, count in (("train", pairs), ("heldout", held_out)):
        write_pairs(DATA / f"persuasion-{name}.txt", files[name], count)
    settings: dict = {"batch_size": 8, "learning_rate": 1e-5, "seq_len": 128} | options
    config = FinetuneConfig(
        model=model,
        train_files=[str(files["train"])],
        eval_files=[str(files["heldout"])],
        output_dir=str(output_dir / "run"),
        loss=loss,
        overwrite_output_dir=True,
        **settings,
    )
    result = finetune(config)
    for key in ("eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"):
        print(f"{key}: {result.eval_before[key]:.4f} -> {result.eval_after[key]:.4f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="hub id or local folder")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--loss", default="dpo", choices=["dpo", "orpo", "cpo", "simpo"])
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    given = parser.parse_args()
    main(
        given.model,
        given.output_dir,
        loss=given.loss,
        pairs=given.pairs,
        learning_rate=given.learning_rate,
    )
