"""Generation with heads gives the greedy tokens, for fewer forward passes."""

from __future__ import annotations

import pytest
import torch

from ligermodels import Gemma3Config, LigerGemma3, LigerLlama, LlamaConfig
from ligermodels.generation import generate_ahead
from ligermodels.models.heads import MedusaHeads, MedusaModel

VOCAB = 40


def llama() -> LigerLlama:
    return LigerLlama(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    )


def gemma3() -> LigerGemma3:
    """Return a model with windows of five tokens, which soon overwrite their keys."""
    return LigerGemma3(
        Gemma3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            max_position_embeddings=256,
        )
    )


def with_heads(make, num_heads: int = 3):
    """Return a model with wide weights, and untrained heads that guess wrong or right."""
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model, MedusaHeads(model.head, num_heads)


@pytest.mark.parametrize("make", [llama, gemma3])
def test_the_tokens_are_the_greedy_ones(make) -> None:
    model, heads = with_heads(make)
    for seed in range(4):
        prompt = torch.randint(0, VOCAB, (1, 6), generator=torch.Generator().manual_seed(seed))
        greedy = model.generate(prompt, max_new_tokens=30, eos_token_id=[])
        out = generate_ahead(model, heads, prompt, max_new_tokens=30, eos_token_id=[])
        assert torch.equal(out.ids, greedy)
        assert sum(out.tokens_per_forward) == 30
        assert torch.equal(
            model.generate(prompt, max_new_tokens=30, eos_token_id=[], heads=heads), greedy
        )


def guess_greedily(model, heads, prompt: torch.Tensor, count: int) -> None:
    """Train the heads on a greedy continuation, until they know it by heart."""
    ids = model.generate(prompt, max_new_tokens=count, eos_token_id=[])
    trained = MedusaModel(model, heads)
    optimizer = torch.optim.Adam(heads.parameters(), lr=2e-2)
    for _ in range(60):
        trained(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [llama, gemma3])
def test_trained_heads_need_fewer_passes(make) -> None:
    model, heads = with_heads(make)
    prompt = torch.randint(0, VOCAB, (1, 6), generator=torch.Generator().manual_seed(5))
    guess_greedily(model, heads, prompt, 40)
    passes = []
    out = generate_ahead(
        model, heads, prompt, max_new_tokens=37, eos_token_id=[], callback=passes.append
    )
    assert torch.equal(out.ids, model.generate(prompt, max_new_tokens=37, eos_token_id=[]))
    assert len(out.tokens_per_forward) <= 20
    assert torch.equal(torch.cat(passes), out.ids[0, 6:])
    assert [len(x) for x in passes] == out.tokens_per_forward


def test_it_ends_at_a_stop_token() -> None:
    model, heads = with_heads(llama)
    prompt = torch.tensor([[1, 2, 3]])
    guess_greedily(model, heads, prompt, 40)
    greedy = model.generate(prompt, max_new_tokens=30, eos_token_id=[])
    for stop in greedy[0, 3:].unique().tolist():
        wanted = model.generate(prompt, max_new_tokens=30, eos_token_id=stop)
        assert torch.equal(
            generate_ahead(model, heads, prompt, max_new_tokens=30, eos_token_id=stop).ids, wanted
        )


def test_refusals() -> None:
    model, heads = with_heads(llama)
    with pytest.raises(ValueError, match="got 2 prompts; expected one"):
        generate_ahead(model, heads, torch.ones(2, 3, dtype=torch.int64))
    prompt = torch.tensor([[1, 2]])
    model.source_generation_config = {"repetition_penalty": 1.3}
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.3, given or from"):
        generate_ahead(model, heads, prompt)
    found = model.generate(prompt, heads=heads, repetition_penalty=1.0, max_new_tokens=9)
    assert torch.equal(found, model.generate(prompt, repetition_penalty=1.0, max_new_tokens=9))
    with pytest.raises(ValueError, match="heads take input_ids and"):
        model.generate(torch.tensor([[1]]), heads=heads, do_sample=True)
