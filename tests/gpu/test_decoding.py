"""Decoding in a CUDA graph: the logits of launched steps, and of the weights of today."""

import copy

import pytest
import torch

from examples.multi_token import MultiTokenModel
from ligermodels.adapters.adapted_model import add_adapters, quantize
from ligermodels.adapters.reference import adapters_off
from ligermodels.generation import DraftModel, generate, generate_many
from ligermodels.generation.decode_step import StepDecoder
from ligermodels.generation.draft import _DraftDecoder
from ligermodels.generation.sampling import Sampler, Sampling
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.auto import families
from ligermodels.models.base import kept_for_generation
from tests.tiny_models import VOCAB, random_model

pytestmark = pytest.mark.gpu
GRAPH = "CUDA graph of a step with its sampling; a logits_processor runs outside of it"
SIZES = {"hidden_size": 64, "head_dim": 16}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", families())
def test_a_graph_computes_what_launched_steps_do(family, padded):
    """The logits are equal bitwise past the window, and no step waits for the device."""
    model = random_model(family, **SIZES).to("cuda", torch.bfloat16)
    ids = torch.randint(3, VOCAB, (2, 20), device="cuda")
    mask = torch.ones(2, 6, dtype=torch.int64, device="cuda")
    mask[0, :2] = 0
    given = mask if padded else None
    found = {}
    with torch.no_grad():
        for captures in (False, True):
            cache = KVCache.of(model, 2, 20)
            model(ids[:, :6], attention_mask=given, cache=cache)
            decoder = StepDecoder(model, cache, None, given, captures)
            logits = [decoder(ids[:, at : at + 1]).clone() for at in range(6, 9)]
            torch.cuda.set_sync_debug_mode("error")
            try:
                logits += [decoder(ids[:, at : at + 1]).clone() for at in range(9, 20)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found[captures] = torch.stack(logits)
    assert decoder.graph is not None
    assert torch.equal(found[True], found[False])


def test_draws_in_a_graph_are_those_of_launched_steps():
    """Tokens and log-probabilities, with every rule, and no step waits for the device."""
    model = random_model("llama", **SIZES, initializer_range=0.3).to("cuda", torch.bfloat16)
    ids = torch.randint(3, VOCAB, (4, 6), device="cuda")
    greedy = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {7: -torch.inf}}
    drawn = {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
    for seed, rule in ((None, greedy), (3, drawn), (3, drawn | greedy)):
        found = {}
        for captures in (False, True):
            generator = None if seed is None else torch.Generator("cuda").manual_seed(seed)
            choice = Sampling(**rule, stops=range(VOCAB - 20, VOCAB))
            sampler = Sampler(choice, 4, VOCAB, ids.device, generator, with_log_probs=True)
            cache = KVCache.of(model, 4, 30)
            with torch.no_grad():
                logits = model.head.logits(model(ids, cache=cache)[:, -1]).float()
                decoder = StepDecoder(model, cache, sampler, captures=captures)
                tokens, made = decoder(sampler(logits)[:, None]), []
                for step in range(16):
                    if step == 2:
                        torch.cuda.set_sync_debug_mode("error")
                    tokens = decoder()
                    made += [tokens.double(), sampler.log_probs_B.double()]
                torch.cuda.set_sync_debug_mode("default")
            found[captures] = torch.stack(made)
        assert torch.equal(found[True], found[False])


@pytest.mark.parametrize("rule", [{}, {"do_sample": True, "top_p": 0.9}])
@pytest.mark.parametrize("kind", ["medusa", "model"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_graph_checks_drafts_and_makes_new_ones(family, kind, rule):
    """Its passes are those of launched kernels bitwise, past the window, and wait for nothing."""
    model = random_model(family, **SIZES).to("cuda", torch.bfloat16)
    small = random_model(family, **SIZES).to("cuda", torch.bfloat16)
    for weight in small.layers.parameters():
        weight.data += 0.05 * weight.std() * torch.randn_like(weight)
    heads = {
        "medusa": lambda: MedusaHeads(model.head, 3),
        "model": lambda: DraftModel(small, 3),
    }[kind]()
    prompt, found = torch.randint(3, VOCAB, (1, 9), device="cuda"), {}
    with torch.no_grad():
        for captures in (False, True):
            generator = torch.Generator("cuda").manual_seed(0)
            sampler = Sampler(Sampling(**rule), 1, VOCAB, prompt.device, generator)
            cache = KVCache.of(model, 1, 120, extra=3)
            hidden = model(prompt[:, :8], cache=cache)
            decoder = _DraftDecoder(model, heads, cache, 120, sampler)
            assert decoder.captures
            decoder.captures = captures
            decoder.draft(hidden, prompt, decoder.ends_1.clone())
            made = [decoder.replay()[0].clone() for _ in range(3)]
            torch.cuda.set_sync_debug_mode("error")
            try:
                made += [decoder.replay()[0].clone() for _ in range(17)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found[captures] = torch.stack(made)
    assert decoder.graph is not None
    assert torch.equal(found[True], found[False])


@pytest.mark.parametrize("kind", ["medusa", "modules", "model"])
def test_drafts_change_no_token(kind):
    """In float32, with a stop token, which the device runs past."""
    model = random_model("mistral", **SIZES).to("cuda")
    small = random_model("mistral", **SIZES).to("cuda")
    for weight in small.layers.parameters():
        weight.data += 0.05 * weight.std() * torch.randn_like(weight)
    drafts = {
        "medusa": lambda: {"heads": MedusaHeads(model.head, 3)},
        "modules": lambda: {"heads": MultiTokenModel(model, 3)},
        "model": lambda: {"draft_model": small, "num_drafts": 3},
    }[kind]()
    free = generate(model, [5, 9, 3], max_new_tokens=60, eos_token_id=[])
    for stop in ([], int(free[0, 40])):
        options = {"max_new_tokens": 60, "eos_token_id": stop}
        plain = generate(model, [5, 9, 3], **options)
        assert torch.equal(generate(model, [5, 9, 3], **options, **drafts), plain)


def test_a_kept_graph_serves_the_next_call_and_no_other_model():
    """In evaluation mode the second call replays the first one's graph, if the model allows it."""
    torch.manual_seed(0)
    model = random_model("llama", **SIZES, initializer_range=0.3).to("cuda").eval()
    options = {"max_new_tokens": 12, "eos_token_id": []}

    def check(prompt, same, **more):
        before = kept_for_generation.get(model)
        found = generate(model, prompt, **options, **more)
        assert (kept_for_generation[model] is before) == same
        model.train().eval()
        assert model not in kept_for_generation
        if "generator" in more:
            more["generator"].manual_seed(1)
        assert torch.equal(generate(model, prompt, **options, **more), found)
        return found

    first = check([5, 9, 3], same=False)
    assert not torch.equal(check([5, 9, 4, 4], same=True)[:, 4:], first[:, 3:])
    check([5] * 250, same=False)  # needs a larger cache
    check([[5, 9, 3], [4]], same=False)
    check([[5, 9], [4, 3, 2]], same=True)
    draws = {"do_sample": True, "generator": torch.Generator("cuda").manual_seed(1)}
    check([5, 9, 3], same=False, **draws)
    draws["generator"].manual_seed(1)
    check([5, 9, 3], same=True, **draws)
    first = check([5, 9, 3], same=False)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(-3)
    second = check([5, 9, 3], same=True)
    assert not torch.equal(first, second)
    model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(
        torch.randn_like(model.layers[1].mlp.down_proj.weight)
    )
    assert not torch.equal(check([5, 9, 3], same=False), second)
    add_adapters(model, 4, 8.0)
    model.eval()
    for name, weight in model.named_parameters():
        if "lora_b" in name:
            torch.nn.init.normal_(weight, std=0.3)
    with_adapters = check([5, 9, 3], same=False)
    with adapters_off(model):
        assert not torch.equal(check([5, 9, 3], same=False), with_adapters)


@pytest.mark.parametrize("family", families())
def test_many_prompts(family):
    """In float32 each answer is that of its prompt alone; in bfloat16 prompts are read packed."""
    model = random_model(family, **SIZES).cuda()
    draw = torch.Generator().manual_seed(1)
    lengths = (5, 1, 19, 8, 3, 12, 2, 30, 7)
    prompts = [torch.randint(3, VOCAB, (length,), generator=draw) for length in lengths]
    options = {"eos_token_id": 7, "max_batch": 4, "return_log_probs": True}
    on_gpu = [prompt.cuda() for prompt in prompts]
    for prompt, (tokens, _) in zip(prompts, generate_many(model, on_gpu, 14, **options)):
        expected = generate(model, prompt, max_new_tokens=14, eos_token_id=7)[0, len(prompt) :]
        assert torch.equal(tokens, expected.cpu())
    low = copy.deepcopy(model).to(torch.bfloat16)
    found = [*generate_many(low, prompts, 14, **options)]
    again = [*generate_many(low, prompts, 14, **options)]
    errors: list[list[torch.Tensor]] = [[], []]  # of the batch, and of each prompt alone
    for prompt, (tokens, log_probs), (same, _) in zip(prompts, found, again):
        assert torch.equal(tokens, same)
        ids, alone = generate(low, prompt, max_new_tokens=14, eos_token_id=7, return_log_probs=True)
        batch = torch.cat([prompt, tokens])[None].cuda(), log_probs.cuda()
        for kind, (row, made) in zip(errors, (batch, (ids, alone[0]))):
            with torch.no_grad():
                hidden = model(row)[:, len(prompt) - 1 : -1]
                exact, _ = model.head.log_probs(hidden, row[:, len(prompt) :])
            kind.append(made - exact[0])
    batch_error, alone_error = (torch.cat(kind).double().square().mean().sqrt() for kind in errors)
    assert batch_error <= 1.3 * alone_error


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_on_each_gpu(bits):
    """A second GPU is not the current one."""
    expected = None
    for device in range(torch.cuda.device_count()):
        torch.manual_seed(0)
        model = random_model("llama", **SIZES)
        quantize(model, bits, torch.device(f"cuda:{device}"))
        assert model.kernels()["decoding"] == GRAPH
        found = generate(model, [5, 9, 3], max_new_tokens=12, eos_token_id=1).cpu()
        assert expected is None or torch.equal(found, expected)
        expected = found


def test_the_report_says_what_decodes():
    model = random_model("llama", **SIZES).to("cuda")
    assert model.kernels()["decoding"] == GRAPH
    model.layers[0].compile()
    assert model.kernels()["decoding"] == "eager (layers.0 is compiled)"
    model = random_model("llama", **SIZES).to("cuda")
    model.layers[1].register_forward_hook(lambda *_: None)
    assert model.kernels()["decoding"] == "eager (layers.1 has hooks or another forward)"
