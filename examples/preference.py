"""Teach a model to prefer "&" to "and", which it finds less likely at first.

    python -m examples.preference build/smollm2 --output-dir runs/preference

The pairs are made from a novel. The run prints for how many sentences that it has not seen the
model gives the form with "&" the higher probability, before and after.
"""

import random
from pathlib import Path

import torch

from examples.command import DATA, call, draw_losses, report, tune, write_lines
from ligermodels import AutoLiger, DecoderModel, Tokenizer, token_log_probs
from ligermodels.training.data import read_pairs
from ligermodels.training.finetune import FinetuneResult
from ligermodels.training.packing import GroupedRows


def write_pairs(text: Path, file: Path, count: int, seed: int = 0) -> None:
    """Write pairs of the end of a sentence, with "&" and with "and" in one place."""
    sentences = text.read_text(encoding="utf-8").replace("\n", " ").split(". ")
    records = []
    for sentence in sentences:
        words = sentence.split()
        start, end = " ".join(words[:8]), " ".join(words[8:])
        if 12 <= len(words) <= 40 and end.count(" and ") == 1:
            chosen = f" {end.replace(' and ', ' & ')}."
            records.append({"prompt": start, "chosen": chosen, "rejected": f" {end}."})
    write_lines(file, random.Random(seed).sample(records, count))


@torch.no_grad()
def share_preferred(model: DecoderModel, tokenizer: Tokenizer, file: Path) -> float:
    """Return the share of the pairs whose chosen end is the likelier one."""
    rows = GroupedRows(read_pairs([file], tokenizer), 128)
    right = 0.0
    for i in range(len(rows)):
        batch = rows.batch([i])
        ids, labels, positions, mask = (
            x.to(model.embed_tokens.weight.device)
            for x in (batch.input_ids, batch.labels, batch.position_ids, batch.mask)
        )
        log_probs = token_log_probs(model, ids, labels, position_ids=positions)
        chosen, rejected = (log_probs * mask).sum(1)
        right += float(chosen > rejected)
    return right / len(rows)


def main(
    model: str,
    output_dir: Path,
    *,
    loss: str = "dpo",
    pairs: int = 256,
    held_out: int = 16,
    **options: object,
) -> FinetuneResult:
    files = {name: output_dir / f"{name}.jsonl" for name in ("train", "heldout")}
    for name, count in (("train", pairs), ("heldout", held_out)):
        write_pairs(DATA / f"persuasion-{name}.txt", files[name], count)
    settings: dict = {"batch_size": 8, "learning_rate": 1e-5, "seq_len": 128} | options
    tokenizer = Tokenizer.from_hf(model)
    before = share_preferred(AutoLiger.from_hf(model), tokenizer, files["heldout"])
    result = tune(model, output_dir / "run", *files.values(), loss=loss, **settings)
    after = share_preferred(result.model, tokenizer, files["heldout"])
    print(f"held-out sentences where & is likelier: {before:.2f} -> {after:.2f}")
    margins = [row["rewards/margins"] for row in result.metrics if "rewards/margins" in row]
    title = "how much likelier than before the chosen ends become"
    draw_losses(output_dir, title, {"": margins}, "margin (nats)")
    report(
        output_dir,
        before=before,
        after=after,
        margin=result.eval_after["eval_rewards/margins"],
        pairs=pairs,
    )
    return result


if __name__ == "__main__":
    call(main, __doc__)
