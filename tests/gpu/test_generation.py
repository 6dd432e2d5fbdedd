import pytest
import torch

from ligermodels.errors import LigerError
from ligermodels.generation import generate
from ligermodels.layers.kv_cache import KVCache
from tests.tiny_models import random_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_positions_hold_no_nan(dtype):
    """They attend to no token, and no NaN from them may reach the real tokens."""
    model = random_model("llama", hidden_size=64, head_dim=16).to("cuda", dtype)
    ids = torch.tensor([[0, 0, 5, 9, 3]], device="cuda")
    with torch.no_grad():
        hidden = model(ids, attention_mask=ids != 0)
        bound = 1e-3 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(hidden[:, 2:], model(ids[:, 2:]), rtol=bound, atol=bound)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen2"])
def test_a_long_prompt_in_pieces_is_the_whole(family):
    """A piece after cached tokens runs through FlexAttention, over the keys in the cache."""
    changes = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 2048}
    model = random_model(family, sliding_window=100, **changes).to("cuda")
    ids = torch.randint(3, 97, (2, 1500), device="cuda")
    with torch.no_grad():
        whole = model(ids)
        cache = KVCache(model.config, 2, 1500)
        pieces = [model(part, cache=cache) for part in ids.split([700, 600, 1, 199], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_the_generation(value, subtests):
    """The error comes with or without stop tokens, and the process can go on using the GPU."""
    model = random_model("llama", hidden_size=64, head_dim=16).to("cuda")
    with torch.no_grad():
        model.embed_tokens.weight[5] = value
    for options in (
        {"eos_token_id": 1},
        {"eos_token_id": [], "do_sample": True, "top_k": 5, "top_p": 0.9},
        {"eos_token_id": [], "repetition_penalty": 1.3},
    ):
        with subtests.test(str(options)):
            with pytest.raises(LigerError, match="the logits of row 1 are NaN or infinite"):
                generate(model, [[3, 4], [3, 5]], max_new_tokens=3, **options)
            torch.cuda.synchronize()
            assert generate(model, [3, 4], max_new_tokens=2).shape[0] == 1
