"""Many prompts in a batch that stays full: the tokens of each prompt alone."""

import pytest
import torch

from ligermodels.generation import generate, generate_many, prefill
from ligermodels.layers.kv_cache import KVCache, PackedRows
from ligermodels.models.auto import families
from tests.families import sampled
from tests.generation.test_decode_step import ROPES
from tests.tiny_models import VOCAB, random_model

LENGTHS = (5, 1, 19, 8, 3, 12, 2)


def prompts_of(lengths=LENGTHS, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length in lengths]


def check_each(model, prompts, found, **options):
    assert len(found) == len(prompts)
    for prompt, (tokens, log_probs) in zip(prompts, found):
        ids, expected = generate(model, prompt, return_log_probs=True, **options)
        assert torch.equal(ids[0, len(prompt) :], tokens)
        torch.testing.assert_close(log_probs, expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", sampled(families()))
def test_families_past_their_windows(family):
    """Rows end at different times, and the next prompts take their places."""
    model, prompts = random_model(family), prompts_of()
    options = {"max_new_tokens": 14, "eos_token_id": 7}
    found = generate_many(model, prompts, max_batch=3, return_log_probs=True, **options)
    check_each(model, prompts, list(found), **options)


@pytest.mark.parametrize("kind", ROPES)
def test_angles_that_depend_on_the_length(kind):
    model = random_model("llama", rope_scaling=ROPES[kind], head_dim=4, max_position_embeddings=16)
    prompts, options = prompts_of(), {"max_new_tokens": 9, "eos_token_id": []}
    found = generate_many(model, prompts, max_batch=4, return_log_probs=True, **options)
    check_each(model, prompts, list(found), **options)


def test_samples_share_their_prompt_and_follow_the_generator():
    model, prompts = random_model("gemma2"), prompts_of((4, 9, 2))
    rule = {"do_sample": True, "eos_token_id": [], "max_batch": 4, "num_samples": 2}

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return [*generate_many(model, prompts, 6, generator=generator, **rule)]

    found = draw(0)
    assert len(found) == 6 and all(len(tokens) == 6 for tokens in found)
    assert not torch.equal(found[0], found[1])
    assert all(map(torch.equal, found, draw(0)))
    assert not all(map(torch.equal, found, draw(1)))
    greedy = [*generate_many(model, prompts, 6, max_batch=5, num_samples=2, eos_token_id=[])]
    assert all(map(torch.equal, greedy[::2], greedy[1::2]))


def test_prompts_are_read_in_chunks_and_packed(monkeypatch):
    """Chunks of few tokens, and documents of one packed row, give the keys of whole prompts."""
    monkeypatch.setattr(prefill, "PASS_TOKENS", 6)
    for family in ("mistral", "gemma3"):
        model, prompts = random_model(family), prompts_of((5, 17, 9))
        expected, found, packed = (KVCache.of(model, 3, 20) for _ in range(3))
        ids = [torch.tensor(prompt) for prompt in prompts]
        prefill.read_prompts(model, found, [2, 0, 1], ids)
        with torch.no_grad():
            monkeypatch.setattr(prefill, "PASS_TOKENS", 100)
            prefill.read_prompts(model, expected, [2, 0, 1], ids)
            monkeypatch.setattr(prefill, "PASS_TOKENS", 6)
            ends = torch.tensor([0, 5, 22, 31], dtype=torch.int32)
            row = torch.cat(ids)[None]
            context = model.prepare_context(row, cu_seqlens=ends, max_seqlen=17)
            for each in context.layers:
                each.cache = PackedRows(packed, [2, 0, 1], [5, 17, 9], row.device)
            model.run_layers(model.embed_tokens(row), context)
        for index, size in enumerate(expected.sizes):
            for buffers in ("keys", "values"):
                wanted = getattr(expected, buffers)[index]
                for made in (found, packed):
                    for place, length in ((2, 5), (0, 17), (1, 9)):
                        slots = torch.arange(max(0, length - size), length) % size
                        torch.testing.assert_close(
                            getattr(made, buffers)[index][place][:, slots],
                            wanted[place][:, slots],
                            rtol=1e-4,
                            atol=1e-5,
                        )


def test_a_model_with_hooks_generates_batch_by_batch():
    model, prompts = random_model("llama"), prompts_of()
    options = {"max_new_tokens": [8, 3, 1, 9, 5, 8, 2], "eos_token_id": [7, 20]}
    expected = [*generate_many(model, prompts, max_batch=2, **options)]
    model.layers[0].register_forward_hook(lambda *_: None)
    found = [*generate_many(model, prompts, max_batch=3, **options)]
    assert all(map(torch.equal, found, expected))


def test_requests_that_cannot_be_met_are_refused(monkeypatch):
    model = random_model("llama")
    assert [*generate_many(model, [])] == []
    with pytest.raises(ValueError, match="2 max_new_tokens for 1 prompts"):
        generate_many(model, [[3]], [4, 5])
    with pytest.raises(ValueError, match=r"max_new_tokens=1\.5; expected an integer"):
        generate_many(model, [[3]], 1.5)
    with pytest.raises(TypeError, match=r"generate_many.*'temprature'; did you mean"):
        generate_many(model, [[3]], temprature=0.5)
    with pytest.raises(ValueError, match="a prompt has shape"):
        generate_many(model, [[[1, 2], [3, 4]]])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generate_many(model, [[3], [VOCAB]])
    with pytest.raises(ValueError, match=r"GiB of .* free ones may be used; lower max_batch"):
        generate_many(model, [[3]] * 100, 10**9, max_batch=50)
    with pytest.raises(ValueError, match=r"num_samples"):
        generate_many(model, [[3]], num_samples=3, max_batch=2)
