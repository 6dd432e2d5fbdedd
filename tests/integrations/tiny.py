"""A tokenizer of 128 words, texts in it, and small models of transformers to compare with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.families import Json
from tests.models import hf_models, zoo

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


def ids(batch: int = 2, seq: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 131, (batch, seq), generator=generator)


def checkpoint(family: str, folder: Path, **sizes: int) -> Path:
    """Save a model of transformers with the tokenizer of the tests."""
    config: Json = {"vocab_size": 128, "max_position_embeddings": 128, "eos_token_id": 1, **sizes}
    if zoo.experts_field(family):  # the balance belongs to the loss of the native model
        config["output_router_logits"] = False
    hf_models.build(family, zoo.Feature(config=config)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def theirs(folder: Path, **options: Any) -> Any:
    """Load a checkpoint with transformers' own class."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)
