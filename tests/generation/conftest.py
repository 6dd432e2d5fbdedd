"""A fixture with the same random model in transformers and in this package."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ligermodels.models.llama import LigerLlama
from tests.tiny_models import VOCAB


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same model in transformers and here; its weights are wide, so greedy choices vary."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **ids, max_position_embeddings=64, initializer_range=0.3)
    theirs = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, LigerLlama.from_hf(folder)
