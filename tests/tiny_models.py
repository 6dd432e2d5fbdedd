"""Small random models of every family, with windows shorter than the tests' inputs."""

from __future__ import annotations

import torch

from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from tests.families import FAMILIES, WINDOW, windows

VOCAB = 97


def random_model(family: str, **changes) -> DecoderModel:
    """Make a model of three layers, with weights spread so that greedy choices vary."""
    family = FAMILIES[family].text_model or family
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    cls = families()[family]
    settings |= windows(family, WINDOW) | FAMILIES[family].experts | FAMILIES[family].mixers
    if (cls.config_class.pad_token_id or 0) >= VOCAB:
        settings["pad_token_id"] = None
    return cls(cls.config_class(**(settings | changes))).eval()
