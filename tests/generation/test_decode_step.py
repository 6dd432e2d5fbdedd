"""A step of decoding, whose launches do not depend on where it is: the logits of a forward."""

from importlib import import_module

import pytest
import torch

from ligermodels.generation import generate
from ligermodels.generation.decode_step import StepDecoder, _state_of
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.auto import families
from tests.families import sampled
from tests.tiny_models import VOCAB, random_model

ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 4.0],
        "original_max_position_embeddings": 8,
    },
}


def steps_equal_forwards(model, padded, cached=False, new=12):
    """Decode tokens of two rows, and compare each step's logits with those of a forward.

    The forward has the whole rows, or with `cached` the new tokens and a cache of its own.
    """
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 7 + new), generator=draw)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = KVCache.of(model, 2, 7 + new)
    given = mask[:, :7] if padded else None
    with torch.no_grad():
        model(ids[:, :7], attention_mask=given, position_ids=positions[:, :7], cache=cache)
        decoder = StepDecoder(model, cache, None, given)
        other = KVCache.of(model, 2, 7 + new) if cached else None
        for at in range(7, 7 + new):
            found = decoder(ids[:, at : at + 1])
            start = 0 if other is None else other.length
            options = {"attention_mask": mask[:, : at + 1], "cache": other}
            options["position_ids"] = positions[:, start : at + 1]
            hidden = model(ids[:, start : at + 1], **options)
            expected = model.head.logits(hidden[:, -1])
            torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=2e-5)
            assert cache.length == at + 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", sampled(families()))
def test_families_past_their_windows(family, padded):
    steps_equal_forwards(random_model(family).double(), padded)


@pytest.mark.parametrize("kind", ROPES)
def test_angles_that_depend_on_the_length(kind):
    """Keys in a cache keep the angles of the length that they were written at."""
    sizes = {"head_dim": 4, "max_position_embeddings": 8}
    steps_equal_forwards(
        random_model("llama", rope_scaling=ROPES[kind], **sizes), True, cached=True
    )


def test_a_cache_goes_on_after_steps():
    """What a step writes serves a forward, and a forward's tokens serve a step."""
    model = random_model("gemma2")
    ids = torch.arange(3, 23)[None]
    cache, expected = KVCache.of(model, 1, 20), model(ids)[:, -1]
    with torch.no_grad():
        model(ids[:, :6], cache=cache)
        decoder = StepDecoder(model, cache)
        for at in range(6, 12):
            decoder(ids[:, at : at + 1])
        found = model(ids[:, 12:], cache=cache)[:, -1]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cannot put 21 tokens in a cache made for 20"):
        decoder(ids[:, :1])


@pytest.mark.parametrize("family", ["mistral", "qwen3_5"])
def test_generate_decodes_by_steps(family, monkeypatch):
    """Without a GPU the graph is left out; tokens, stops and padding are those of forwards."""
    model = random_model(family)
    prompts = [[5, 9, 3], [11, 2, 40, 41, 8, 77, 31, 90], [33]]
    free = generate(model, prompts, max_new_tokens=16, eos_token_id=[])
    options = {"max_new_tokens": 16, "eos_token_id": int(free[1, 14]), "pad_token_id": 0}
    sampled = {"do_sample": True, "top_k": 9, "repetition_penalty": 1.3}
    given = [options, options | sampled]

    def run(each):
        torch.manual_seed(0)
        return generate(model, prompts, **each)

    expected = [run(each) for each in given]
    module = import_module("ligermodels.generation.generate")
    monkeypatch.setattr(module, "can_decode", lambda *_: True)
    for each, tokens in zip(given, expected):
        assert torch.equal(run(each), tokens)


def test_what_a_kept_graph_depends_on():
    """Values of weights may change in place. Other tensors and settings are another model."""
    model = random_model("qwen3")
    before = _state_of(model)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(2)
    assert before is not None and _state_of(model) == before
    attention = model.layers[1].self_attn
    attention.scale *= 2
    assert _state_of(model) != before
    attention.scale /= 2
    assert _state_of(model) == before
    weight = attention.o_proj.weight
    attention.o_proj.weight = torch.nn.Parameter(weight.detach().clone())
    assert _state_of(model) != before
    attention.o_proj.weight = weight
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.clone()
    assert _state_of(model) != before

    class Coded(torch.nn.Parameter):
        """A weight that keeps its numbers in another form."""

    attention.o_proj.weight = Coded(weight.detach())
    assert _state_of(model) is None
