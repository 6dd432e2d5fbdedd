"""Tokenizer folders for the tests, and both libraries' tokenizers of one."""

import json

from transformers import AutoTokenizer

from ligermodels.text import Tokenizer

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "a small town by the sea, with 1234 people in it",
    "  two leading spaces and  double ones",
    "def f(x): return x + 1",
    "to be or not to be, that is the question",
] * 3
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def added(index, content, special=True, **more):
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {str(index): {"content": content, "special": special, **flags, **more}}


SLOW = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "added_tokens_decoder": {
        **added(0, "<unk>"),
        **added(1, "<s>"),
        **added(2, "</s>"),
        **added(360, "<|im|>"),
        **added(361, "[X]", special=False),
    },
}


def configure(source, target, **config):
    """A copy of a tokenizer folder with this tokenizer_config.json; both libraries' tokenizer."""
    for path in source.glob("tokenizer.*"):
        (target / path.name).write_bytes(path.read_bytes())
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(target), Tokenizer.from_hf(target)
