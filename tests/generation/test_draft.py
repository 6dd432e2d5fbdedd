"""Generation with heads gives the greedy tokens, for fewer forward passes."""

from __future__ import annotations

import pytest
import torch

from ligermodels.generation import generate_drafted
from ligermodels.generation.generate import stream
from ligermodels.heads.medusa import MedusaHeads, MedusaModel
from ligermodels.heads.multi_token import MultiTokenModel
from ligermodels.layers import LossHead
from tests.tiny_models import random_model

VOCAB = 40
# The windows of the latter, of five tokens, soon overwrite their keys.
each = pytest.mark.parametrize("family", ["llama", "gemma3_text"])


def with_heads(family: str, num_heads: int = 3):
    """Return a model with wide weights, and untrained heads that guess wrong or right."""
    model = random_model(family, vocab_size=VOCAB, max_position_embeddings=256)
    return model, MedusaHeads(model.head, num_heads)


@each
def test_the_tokens_are_the_greedy_ones(family) -> None:
    model, heads = with_heads(family)
    for seed in range(2):
        prompt = torch.randint(0, VOCAB, (1, 6), generator=torch.Generator().manual_seed(seed))
        greedy = model.generate(prompt, max_new_tokens=30, eos_token_id=[])
        out = generate_drafted(model, heads, prompt, max_new_tokens=30, eos_token_id=[])
        assert torch.equal(out.ids, greedy)
        assert sum(out.tokens_per_forward) == 30
        assert torch.equal(
            model.generate(prompt, max_new_tokens=30, eos_token_id=[], heads=heads), greedy
        )


def draft_greedily(model, heads, prompt: torch.Tensor, count: int) -> None:
    """Train the heads on a greedy continuation, until they know it by heart."""
    ids = model.generate(prompt, max_new_tokens=count, eos_token_id=[])
    trained = MedusaModel(model, heads)
    optimizer = torch.optim.Adam(heads.parameters(), lr=2e-2)
    for _ in range(40):
        trained(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_trained_heads_need_fewer_passes_and_end_at_a_stop_token() -> None:
    model, heads = with_heads("gemma3_text")
    prompt = torch.randint(0, VOCAB, (1, 6), generator=torch.Generator().manual_seed(5))
    draft_greedily(model, heads, prompt, 40)
    passes = []
    out = generate_drafted(
        model, heads, prompt, max_new_tokens=37, eos_token_id=[], callback=passes.append
    )
    greedy = model.generate(prompt, max_new_tokens=37, eos_token_id=[])
    assert torch.equal(out.ids, greedy)
    assert len(out.tokens_per_forward) <= 20
    assert torch.equal(torch.cat(passes), out.ids[0, 6:])
    assert [len(x) for x in passes] == out.tokens_per_forward
    for stop in greedy[0, 6:].unique().tolist()[:4]:
        wanted = model.generate(prompt, max_new_tokens=30, eos_token_id=stop)
        assert torch.equal(
            generate_drafted(model, heads, prompt, max_new_tokens=30, eos_token_id=stop).ids, wanted
        )


def test_refusals() -> None:
    model, heads = with_heads("llama")
    with pytest.raises(ValueError, match="got 2 prompts; expected one"):
        generate_drafted(model, heads, torch.ones(2, 3, dtype=torch.int64))
    prompt = torch.tensor([[1, 2]])
    for vocab, size in ((VOCAB + 1, 32), (VOCAB, 16)):  # a GPU would look up tokens out of bounds
        other = MedusaHeads(LossHead(size, vocab), 1)
        with pytest.raises(ValueError, match=f"vocabulary of {vocab} and hidden states of {size}"):
            generate_drafted(model, other, prompt)
    model.source.generation_config = {"repetition_penalty": 1.3}
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.3, given or from"):
        generate_drafted(model, heads, prompt)
    found = model.generate(prompt, heads=heads, repetition_penalty=1.0, max_new_tokens=9)
    assert torch.equal(found, model.generate(prompt, repetition_penalty=1.0, max_new_tokens=9))
    with pytest.raises(ValueError, match="heads take input_ids and"):
        model.generate(torch.tensor([[1]]), heads=heads, do_sample=True)


def guesses_of_a_whole_forward(modules: MultiTokenModel, ids: torch.Tensor) -> list[int]:
    """Return what the modules guess after ids, from forwards over all tokens, without caches."""
    model, hidden = modules.model, modules.model(ids[:, :-1])
    for k, module in enumerate(modules.mtp, 1):
        context = model.prepare_context(hidden).layers[-1]
        embeds = model.embed_tokens(ids[:, k:])
        hidden = module(hidden, embeds, context)
        guess = model.head.logits(hidden[:, -1:]).argmax(-1)
        ids = torch.cat((ids, guess), 1)
    return ids[0, -len(modules.mtp) :].tolist()


@each
def test_multi_token_modules(family: str) -> None:
    """The tokens are the greedy ones, and the caches change no guess."""
    prompt_length = 1 if family == "llama" else 6
    model, _ = with_heads(family)
    modules = MultiTokenModel(model, 3)
    for module in modules.mtp:
        torch.nn.init.normal_(module.proj.weight, std=0.3)
    prompt = torch.randint(0, VOCAB, (1, prompt_length), generator=torch.Generator().manual_seed(5))
    greedy = model.generate(prompt, max_new_tokens=30, eos_token_id=[])
    optimizer = torch.optim.Adam(modules.mtp.parameters(), lr=3e-3)
    for _ in range(40):  # until the modules know the greedy tokens by heart
        modules(greedy, labels=greedy).loss.backward()
        optimizer.step()
        modules.zero_grad()
    drafter, length = modules.drafter(64), 1
    with torch.no_grad():
        hidden = model(greedy)
        for new in (prompt_length, 1, 3, 1, 2):  # tokens that are known since the last call
            part = slice(length - 1, length - 1 + new)
            after = slice(length, length + new)
            found = drafter(hidden[:, part], greedy[:, after])
            length += new
            assert found[0].tolist() == guesses_of_a_whole_forward(modules, greedy[:, :length])
    out = generate_drafted(model, modules, prompt, max_new_tokens=30, eos_token_id=[])
    assert torch.equal(out.ids, greedy)
    assert len(out.tokens_per_forward) <= 20
    streamed = stream(model, prompt, heads=modules, max_new_tokens=30, eos_token_id=[])
    assert [*streamed] == greedy[0, prompt_length:].tolist()
    with pytest.raises(ValueError, match="belong to another model"):
        generate_drafted(random_model(family), modules, prompt)
