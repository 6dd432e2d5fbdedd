"""A tokenizer of 128 words for the trainers' tests, and texts in it."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(125))]
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' }}{% generation %}{{ 'w7 ' + m.content + ' <eos>' }}{% endgeneration %}"
    "{% else %}{{ ' w8 ' + m.content }}{% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT,
    )


def texts(count: int, seed: int = 0, longest: int = 12) -> list[str]:
    """Return texts of 2 to `longest` words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS[3:], k=draw.randint(2, longest))) for _ in range(count)]
