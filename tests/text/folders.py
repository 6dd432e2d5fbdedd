"""Tokenizer folders for the tests, and the comparison of both libraries' tokenizers."""

import json
import random

from transformers import AutoTokenizer

from ligermodels.text import Tokenizer

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "a small town by the sea, with 1234 people in it",
    "  two leading spaces and  double ones",
    "def f(x): return x + 1",
    "to be or not to be, that is the question",
] * 3
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def added(index, content, special=True, **more):
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {str(index): {"content": content, "special": special, **flags, **more}}


def configure(source, target, **config):
    """Copy a tokenizer folder with this tokenizer_config.json; return both libraries' tokenizer."""
    for path in source.glob("tokenizer.*"):
        (target / path.name).write_bytes(path.read_bytes())
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(target), Tokenizer.from_hf(target)


TEXTS = [
    "the dog",
    "to be  or not\n\n\tto be ",
    "naïve é€😀 東京 x",
    "the<|im|>the dog<|im|> and a sea<|im|><|im|>",
    "<s>the sea</s>",
    "12 dogs: 1234!",
    "",
    "<|im|>",
    "not special: <|i m|> [X]the [X] dog",
]


def assert_same(theirs, ours, texts, seed=0):
    for text in texts:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, (text, special)
            for skip in (True, False):
                decoded = theirs.decode(expected, skip_special_tokens=skip)
                assert ours.decode(expected, skip_special_tokens=skip) == decoded
    draw = random.Random(seed)
    for _ in range(100):
        ids = [draw.randrange(len(theirs)) for _ in range(12)]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), ids
    for name in ("bos", "eos", "pad", "unk"):
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    assert ours.vocab_size == len(ours) == len(theirs)
