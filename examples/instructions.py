"""Teach a chat model an instruction: only the answers are learned, not the questions.

    python -m examples.instructions build/smollm2 --output-dir runs/instructions

The model is asked who is named in a sentence of a novel. The records are conversations, and the
loss covers only the turns of the assistant. The run prints the share of right answers about
sentences that it has not seen, before and after.
"""

import random
import re
from pathlib import Path

import torch

from examples.command import HELD_OUT, TRAIN, call, draw_bars, report, tune, write_lines
from ligermodels import AutoLiger, DecoderModel, Tokenizer

NAMES = (
    "Anne Elliot Wentworth Musgrove Mary Charles Louisa Henrietta Walter Elizabeth Russell "
    "Frederick Harville Benwick Croft Clay Shepherd Dalrymple"
).split()
ASK = "Which people does this sentence name? {}"


def questions(text: Path, count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return questions about sentences that name one to three people, and the answers."""
    found = []
    for sentence in text.read_text(encoding="utf-8").replace("\n", " ").split(". "):
        names = [*dict.fromkeys(name for name in re.findall(r"\w+", sentence) if name in NAMES)]
        if 1 <= len(names) <= 3 and 6 <= len(sentence.split()) <= 24:
            found.append((ASK.format(sentence), ", ".join(names)))
    return random.Random(seed).sample(found, count)


def conversations(asked: list[tuple[str, str]]) -> list[dict]:
    """Return the questions and answers as records of a chat."""
    turns = ("user", "assistant")
    return [{"messages": [{"role": r, "content": c} for r, c in zip(turns, x)]} for x in asked]


@torch.no_grad()
def share_right(model: DecoderModel, tokenizer: Tokenizer, asked: list[tuple[str, str]]) -> float:
    """Return the share of the questions that the model answers as it should."""
    model.eval()
    right = 0
    for question, answer in asked:
        message = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        made = model.generate([ids], max_new_tokens=16, repetition_penalty=1.0)[0, len(ids) :]
        right += tokenizer.decode(made).strip() == answer
    return right / len(asked)


def main(
    model: str, output_dir: Path, *, examples: int = 300, held_out: int = 20, **options: object
) -> dict[str, float]:
    """Train on so many questions, and return the shares of right answers."""
    unseen = questions(HELD_OUT, held_out)
    train = write_lines(output_dir / "train.jsonl", conversations(questions(TRAIN, examples)))
    tests = write_lines(output_dir / "heldout.jsonl", conversations(unseen))
    tokenizer = Tokenizer.from_hf(model)
    before = share_right(AutoLiger.from_hf(model, dtype=torch.float32), tokenizer, unseen)
    settings: dict = {"batch_size": 4, "seq_len": 256, "learning_rate": 1e-4} | options
    result = tune(model, output_dir / "run", train, tests, **settings)
    after = share_right(result.model, tokenizer, unseen)
    shares = {"before": before, "after": after}
    draw_bars(output_dir, "share of right answers about unseen sentences", shares, "{:.0%}")
    return report(output_dir, **shares, examples=examples, steps=result.steps)


if __name__ == "__main__":
    call(main, __doc__)
