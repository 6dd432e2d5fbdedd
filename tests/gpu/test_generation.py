import pytest
import torch

from ligermodels.generation import generate
from ligermodels.models.llama import LigerLlama, LlamaConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unequal_prompts_agree_with_each_alone(dtype):
    """Padded positions see nothing at all, and no NaN of theirs may reach the tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = LigerLlama(config).to("cuda", dtype)
    prompts = [[5, 9, 3], list(range(40)), [33]]
    batch = generate(model, prompts, max_new_tokens=20, eos_token_id=[])
    for i, prompt in enumerate(prompts):
        alone = generate(model, prompt, max_new_tokens=20, eos_token_id=[])
        # The first token depends on the whole padded prefill already; later ones, where rounding
        # may tip a choice, are compared in float32 only.
        last = 60 if dtype == torch.float32 else 41
        assert torch.equal(batch[i, 40:last], alone[0, len(prompt) :][: last - 40])
    with torch.no_grad():
        ids = torch.tensor([prompts[0]], device="cuda")
        mask = torch.tensor([[0, 0, 1, 1, 1]], device="cuda")
        padded = torch.cat([ids.new_zeros(1, 2), ids], 1)
        hidden = model(padded, attention_mask=mask)
    assert hidden.isfinite().all()


def test_greedy_on_the_gpu_is_the_cpus():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = LigerLlama(config)
    prompts = [[5, 9, 3], [11, 2, 40, 41], [33]]
    on_cpu = generate(model, prompts, max_new_tokens=16, eos_token_id=[])
    on_gpu = generate(model.to("cuda"), prompts, max_new_tokens=16, eos_token_id=[])
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), on_cpu)
