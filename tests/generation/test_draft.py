"""Generation with drafts gives the tokens of generation without them, for fewer passes."""

from __future__ import annotations

import copy

import pytest
import torch

from ligermodels.errors import LigerError
from ligermodels.generation import Sampling
from ligermodels.generation.draft import DraftModel, _checked
from ligermodels.generation.generate import stream
from ligermodels.generation.sampling import Sampler
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.layers import LossHead
from tests.generation.test_decode_step import ROPES
from tests.tiny_models import random_model

VOCAB = 40
LLAMA_ROPES = [("llama", kind) for kind in ROPES]
# The windows of the latter, of five tokens, soon overwrite their keys.
each = pytest.mark.parametrize("family", ["llama", "mistral"])


def with_heads(family: str, num_heads: int = 3):
    """Return a model with wide weights, and untrained heads that guess wrong or right."""
    model = random_model(family, vocab_size=VOCAB, max_position_embeddings=256)
    return model, MedusaHeads(model.head, num_heads)


def perturbed(model, share: float = 0.05):
    """Return a draft model that often agrees: a copy whose weights are a little different."""
    torch.manual_seed(0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.layers.parameters():
            weight += share * weight.std() * torch.randn_like(weight)
    return other


def drafted(model, heads, prompt, **options):
    """Return the tokens of a generation with drafts, and how many of them each pass gave."""
    passes: list[torch.Tensor] = []
    ids = model.generate(prompt, heads=heads, callback=passes.append, **options)
    assert torch.equal(torch.cat(passes), ids[0, -sum(map(len, passes)) :])
    return ids, [len(x) for x in passes]


@pytest.mark.parametrize("family, rope", [("llama", None), ("mistral", None), *LLAMA_ROPES])
def test_a_draft_model(family, rope) -> None:
    """Its guesses are right and wrong. Angles that depend on the length are those of each token."""
    options = {"vocab_size": VOCAB, "max_position_embeddings": 256}
    if rope is not None:
        options |= {"rope_scaling": ROPES[rope], "head_dim": 4, "max_position_embeddings": 8}
    model = random_model(family, **options)
    small, prompt = perturbed(model), torch.tensor([[7]])
    greedy = model.generate(prompt, max_new_tokens=36, eos_token_id=[])
    for count in (1, 4):
        drafts = DraftModel(small, count)
        ids, passes = drafted(model, drafts, prompt, max_new_tokens=36, eos_token_id=[])
        assert torch.equal(ids, greedy) and len(set(passes[count + 1 : -1])) > 1
    given = {"max_new_tokens": 36, "eos_token_id": [], "draft_model": small, "num_drafts": 2}
    assert torch.equal(model.generate(prompt, **given), greedy)
    assert [*stream(model, prompt, **given)] == greedy[0, 1:].tolist()


class Letters:
    """A tokenizer whose token i is the i-th letter, if there is one."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.mark.parametrize("drafter", ["heads", "draft_model"])
def test_options_hold_for_drafts(drafter) -> None:
    """Penalties count the drafts before a token, also one from generation_config.json."""
    model, heads = with_heads("llama")
    given = {"heads": heads} if drafter == "heads" else {"draft_model": perturbed(model)}
    model.source.generation_config = {"repetition_penalty": 1.3}
    prompt, end = [3, 9, 7], {"max_new_tokens": 40, "eos_token_id": []}
    for options in (
        {},
        {"repetition_penalty": 1.0, "presence_penalty": 0.7},
        {"presence_penalty": -0.4, "logit_bias": {3: 0.5, 5: -torch.inf}},
    ):
        expected, values = model.generate(prompt, return_log_probs=True, **options, **end)
        found, made = model.generate(prompt, return_log_probs=True, **options, **end, **given)
        assert torch.equal(found, expected)
        torch.testing.assert_close(made, values, rtol=1e-4, atol=1e-5)
        texts = {"tokenizer": Letters(), "stop_strings": [Letters().decode(found[0, 20:22], False)]}
        expected = model.generate(prompt, **options, **end, **texts)
        assert torch.equal(model.generate(prompt, **options, **end, **texts, **given), expected)
        assert 3 < expected.shape[1] < 43


@each
def test_draws_of_the_same_model_are_all_right(family) -> None:
    """The small model's probabilities after the drafts are those of a pass over all of them."""
    model, _ = with_heads(family)
    options = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "eos_token_id": []}
    options |= {"generator": torch.Generator().manual_seed(0), "max_new_tokens": 41}
    assert drafted(model, DraftModel(model, 4), list(range(8)), **options)[1] == [1] + [5] * 8


@pytest.mark.parametrize("drawn", [True, False])
def test_draws_have_the_distribution_of_the_model(drawn) -> None:
    """Two tokens of a Markov chain, by a chi-squared test of its 16 outcomes.

    37.7 is passed by 1 in 1,000 fair tests. The drafts are draws of another chain, or its likeliest
    token each.
    """
    torch.manual_seed(0)
    chain, other = 0.8 * torch.randn(2, 4, 4)
    draw = torch.Generator().manual_seed(1)
    rule = Sampling(do_sample=True, temperature=0.8)
    sampler = Sampler(rule, 1, 4, torch.device("cpu"), draw)
    q = rule.filter(other).softmax(-1)
    counts, runs = torch.zeros(4, 4), 4000
    for _ in range(runs):
        found = [0]
        while len(found) < 3:
            drafts = [found[-1]]
            for _ in range(2):
                last = q[drafts[-1]]
                guess = last.multinomial(1, generator=draw) if drawn else last.argmax()
                drafts.append(int(guess))
            given = q[drafts[:2]] if drawn else None
            made, _ = _checked(chain[drafts], torch.tensor(drafts[1:]), given, sampler)
            new, failed, *tokens = made.tolist()
            assert not failed
            found += tokens[:new]
        counts[found[1], found[2]] += 1
    p = rule.filter(chain).softmax(-1)
    expected = runs * p[0][:, None] * p
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 37.7


def draft_greedily(model, heads, prompt: torch.Tensor, count: int) -> None:
    """Train the heads on a greedy continuation, until they know it by heart."""
    ids = model.generate(prompt, max_new_tokens=count, eos_token_id=[])
    hidden = model(ids).detach()
    optimizer = torch.optim.Adam(heads.parameters(), lr=2e-2)
    for _ in range(40):
        heads(hidden, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_trained_heads_need_fewer_passes_and_end_at_a_stop_token() -> None:
    model, heads = with_heads("qwen2")
    prompt = torch.randint(0, VOCAB, (1, 6), generator=torch.Generator().manual_seed(5))
    draft_greedily(model, heads, prompt, 40)
    ids, passes = drafted(model, heads, prompt, max_new_tokens=37, eos_token_id=[])
    greedy = model.generate(prompt, max_new_tokens=37, eos_token_id=[])
    assert torch.equal(ids, greedy) and len(passes) <= 20
    for stop in greedy[0, 6:].unique().tolist()[:4]:
        wanted = model.generate(prompt, max_new_tokens=30, eos_token_id=stop)
        ids, _ = drafted(model, heads, prompt, max_new_tokens=30, eos_token_id=stop)
        assert torch.equal(ids, wanted)


def test_refusals() -> None:
    model, heads = with_heads("llama")
    with pytest.raises(ValueError, match="2 prompts; drafts are for one prompt"):
        model.generate(torch.ones(2, 3, dtype=torch.int64), heads=heads)
    prompt = torch.tensor([[1, 2]])
    for vocab, size in ((VOCAB + 1, 32), (VOCAB, 16)):  # a GPU would look up tokens out of bounds
        other = MedusaHeads(LossHead(size, vocab), 1)
        with pytest.raises(ValueError, match=f"vocabulary of {vocab} and hidden states of {size}"):
            model.generate(prompt, heads=other)
    for options in ({"logits_processor": lambda _, x: x}, {"attention_mask": [[0, 1]]}):
        with pytest.raises(ValueError, match="one prompt at a time, or leave out heads"):
            model.generate(prompt, heads=heads, **options)
    with pytest.raises(ValueError, match="pass one of them"):
        model.generate(torch.tensor([[1]]), heads=heads, draft_model=model)
    small = random_model("llama", vocab_size=VOCAB - 1)
    with pytest.raises(ValueError, match="its vocabulary has 39 tokens, and the model's has 40"):
        model.generate(torch.tensor([[1]]), draft_model=small, repetition_penalty=1.0)
    torch.nn.init.constant_(model.head.weight, torch.nan)
    with pytest.raises(LigerError, match="row 0 are NaN or infinite, at new token 0"):
        model.generate(torch.tensor([[1]]), heads=heads, repetition_penalty=1.0)
