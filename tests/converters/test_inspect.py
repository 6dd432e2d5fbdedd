import torch

from ligermodels.converters.inspect import describe
from ligermodels.models.llama import LigerLlama
from tests.tiny_models import random_model

from .conftest import random_tensors


def test_describe(make):
    norm = torch.ones(16, dtype=torch.float32)
    folder, config = make(shards=2, tie_word_embeddings=True, add={"model.norm.weight": norm})
    described = describe(folder, LigerLlama)
    stored = random_tensors(config)
    count = sum(tensor.numel() for tensor in stored.values())
    assert described.family == "llama" and described.folder == folder
    assert described.parameters == count
    assert described.dtype_bytes == {"BF16": 2 * (count - 16), "F32": 64}
    assert described.config["head_dim"] == 4 and "extra" not in described.config
    assert described.unknown_keys == {"is_llama_config": True}
    assert described.files["model-00001-of-00002.safetensors"] > 0
    assert {"config.json", "tokenizer.model"} <= described.files.keys()
    assert described.memory["weights as stored"] == 2 * count + 32
    assert described.memory["AdamW training in float32, without activations"] == 16 * count
    # k and v (2) * 2 layers * 2 heads * head_dim 4 * 2 bytes * 1000 tokens
    assert described.memory["key/value cache in bfloat16, 1,000 tokens"] == 64_000
    length = config.max_position_embeddings
    longest = f"key/value cache in bfloat16, longest row ({length:,} tokens)"
    assert described.memory[longest] == 64 * length


def test_a_window_bounds_the_cache(tmp_path):
    model = random_model("gemma2", sliding_window=5, max_position_embeddings=50)
    model.save_hf(tmp_path)
    memory = describe(tmp_path, type(model)).memory
    # k and v (2) * 2 heads * head_dim 8 * 2 bytes; the layers keep 5, 50 and 5 tokens.
    longest = "key/value cache in bfloat16, longest row (50 tokens)"
    assert memory[longest] == 64 * (5 + 50 + 5)


def test_a_stored_tied_head_is_counted_once(make):
    folder, config = make(tie_word_embeddings=True)
    parameters = describe(folder, LigerLlama).parameters
    head = random_tensors(config)["model.embed_tokens.weight"]
    folder, _ = make("with_head", tie_word_embeddings=True, add={"lm_head.weight": head})
    assert describe(folder, LigerLlama).parameters == parameters
