"""Texts of random words, and a tokenizer for them, for the benchmarks that train with TRL."""

import random
from typing import Any

import datasets
import tokenizers
import transformers


def tokenizer() -> Any:
    """Return a tokenizer of 1000 words, each of which is one token."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 1000)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<eos>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )


def data(trainer: str, rows: int, seq: int, steps: int) -> datasets.Dataset:
    """Return a dataset of texts with seq tokens, the end included; half of a pair is its prompt."""
    drawn = random.Random(0)
    names = {"SFT": ["text"], "DPO": ["prompt", "chosen", "rejected"]}[trainer]
    words = (seq - 1) // (2 if trainer == "DPO" else 1)
    count = rows * steps // (2 if trainer == "DPO" else 1)
    texts = {
        name: ["".join(f" w{drawn.randrange(2, 1000)}" for _ in range(words)) for _ in range(count)]
        for name in names
    }
    if trainer == "SFT":  # TRL would add the end to a text without it, and Unsloth would not
        texts["text"] = [f"{text} <eos>" for text in texts["text"]]
    return datasets.Dataset.from_dict(texts)
