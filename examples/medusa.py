"""Train heads that draft the tokens after the next one, and generate with them.

    python -m examples.medusa build/smollm2 --output-dir runs/medusa

The heads learn from what the model itself writes after the beginnings of sentences of a novel. The
run prints how many tokens a forward pass gives, for sentences that the heads have not seen, and
checks that they are the tokens of greedy generation.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch

from examples.command import DATA, call, tune, write_lines
from ligermodels import AutoLiger, DecoderModel, Tokenizer
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.heads.medusa_file import load_heads


def beginnings(text: Path, count: int, seed: int = 0) -> list[str]:
    """Return the first eight words of some sentences."""
    sentences = text.read_text(encoding="utf-8").replace("\n", " ").split(". ")
    starts = [" ".join(each.split()[:8]) for each in sentences if len(each.split()) >= 12]
    return random.Random(seed).sample(starts, count)


def continued(
    model: DecoderModel, tokenizer: Tokenizer, prompts: list[str], new: int, batch_size: int = 64
) -> Iterator[dict[str, str]]:
    """Yield each prompt with the text that the model writes after it."""
    for start in range(0, len(prompts), batch_size):
        ids = [tokenizer.encode(prompt) for prompt in prompts[start : start + batch_size]]
        rows = model.generate(ids, max_new_tokens=new, repetition_penalty=1.0)
        for prompt, row in zip(prompts[start:], rows[:, -new:].tolist()):
            yield {"prompt": prompt, "completion": tokenizer.decode(row)}


def tokens_per_forward(
    model: DecoderModel, heads: MedusaHeads, tokenizer: Tokenizer, prompts: list[str], new: int
) -> tuple[float, float]:
    """Return how many tokens a pass gives, and the share of the tokens that are the greedy ones."""
    passes: list[torch.Tensor] = []
    same, total = 0, 0
    options = {"max_new_tokens": new, "repetition_penalty": 1.0}
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        made = model.generate([ids], heads=heads, callback=passes.append, **options)
        greedy = model.generate([ids], **options)
        length = min(made.shape[1], greedy.shape[1])
        same += int((made[:, len(ids) : length] == greedy[:, len(ids) : length]).sum())
        total += length - len(ids)
    return len(torch.cat(passes)) / len(passes), same / total


def main(
    model: str,
    output_dir: Path,
    *,
    heads: int = 3,
    prompts: int = 1024,
    held_out: int = 16,
    new: int = 96,
    **options: object,
) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = Tokenizer.from_hf(model)
    body = AutoLiger.from_hf(model, dtype=dtype, device=device).eval()
    files = {name: output_dir / f"{name}.jsonl" for name in ("train", "heldout")}
    for name, count in (("train", prompts), ("heldout", held_out)):
        starts = beginnings(DATA / f"persuasion-{name}.txt", count)
        write_lines(files[name], continued(body, tokenizer, starts, new))
    settings: dict = {"batch_size": 16, "learning_rate": 1e-3, "seq_len": 512, "max_steps": 200}
    settings |= {"loss": "medusa", "medusa_heads": heads} | options
    result = tune(model, output_dir / "run", *files.values(), **settings)
    # In float32, because a pass over several tokens rounds in another way than one over a token.
    exact = AutoLiger.from_hf(result.model_dir, dtype=torch.float32, device=device).eval()
    trained = load_heads(exact, result.model_dir)
    assert trained is not None
    unseen = beginnings(DATA / "persuasion-heldout.txt", held_out)
    rate, same = tokens_per_forward(exact, trained, tokenizer, unseen, new)
    for i in range(1, heads + 1):
        key = f"eval_head_{i}_loss"
        print(f"{key}: {result.eval_before[key]:.3f} -> {result.eval_after[key]:.3f}")
    print(f"tokens per forward: {rate:.2f}; {same:.1%} of them are those of greedy generation")
    return rate


if __name__ == "__main__":
    call(main, __doc__)
