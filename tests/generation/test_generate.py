"""generate and stream: tokens, stops, caches and streams, beside transformers' own."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from ligermodels.errors import LigerError
from ligermodels.generation import generate, prefill, stream, stream_text
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.auto import families
from tests.families import sampled
from tests.tiny_models import VOCAB, random_model

from .prompts import PROMPTS, greedy_of, left_padded


def test_embeddings_as_prompts(pair):
    """As in transformers, only new tokens come back. Padding, caches and streams work as usual."""
    theirs, ours = pair
    ids, mask = left_padded(PROMPTS)
    embeds = ours.embed_tokens(ids).detach()
    options = {"attention_mask": mask, "max_new_tokens": 12}
    expected = greedy_of(theirs, ids, mask, 12)[:, ids.shape[1] :]
    hf = theirs.generate(inputs_embeds=embeds, do_sample=False, pad_token_id=0, **options)
    found = generate(ours, inputs_embeds=embeds, **options)
    assert torch.equal(found, expected) and torch.equal(hf, expected)
    assert torch.equal(ours.generate(inputs_embeds=embeds, **options), expected)
    one = {"inputs_embeds": embeds[1:2], "max_new_tokens": 12}
    assert list(stream(ours, **one)) == expected[1].tolist()
    cache = KVCache.of(ours, 1, 40)
    with torch.no_grad():
        ours(inputs_embeds=embeds[1:2, :3], cache=cache)
    continued = generate(ours, cache=cache, **one)
    assert torch.equal(continued, expected[1:2])
    penalised = generate(ours, **one, repetition_penalty=1000.0)
    assert len(set(penalised[0].tolist())) == 12
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="input_ids and inputs_embeds: pass one of them"):
            ours.generate(**inputs)


def test_a_prefix_is_seen_in_both_directions(pair):
    _, ours = pair
    ids, prefix = torch.tensor([PROMPTS[1]]), torch.tensor([4])
    found = ours.generate(ids, prefix_lengths=prefix, max_new_tokens=9)
    for at in range(ids.shape[1], found.shape[1]):
        with torch.no_grad():
            logits = ours.head.logits(ours(found[:, :at], prefix_lengths=prefix)[:, -1])
        assert logits.argmax(-1) == found[0, at]
    assert not torch.equal(found, ours.generate(ids, max_new_tokens=9))


class Everything:
    """A cache with only the methods of the protocol; it returns the last token first."""

    def __init__(self):
        self.length, self.held = 0, {}

    def update(self, layer_index, k, v):
        past = self.held.get(layer_index)
        if past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(past, (k, v)))
        self.held[layer_index] = k, v
        return k.flip(2), v.flip(2)

    def key_positions(self, layer_index, new):
        return torch.arange(self.length + new).flip(0)

    def advance(self, tokens):
        self.length += tokens


@pytest.mark.parametrize("family", sampled(families()))
def test_a_cached_forward_in_any_pieces_equals_the_whole_one(family):
    model, length = random_model(family), 16
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids)
        padded = torch.cat([torch.zeros(1, 6, expected.shape[-1]), model(ids[:1, 6:])], 1)
        padded = torch.cat([padded, expected[1:]])
        cache = KVCache(model.config, 2, length)
        for chunks, with_mask in itertools.product(([9, 1, 1, 1, 1, 3], [1, 4, 11]), (True, False)):
            found = []
            for new in chunks:
                begin, end = cache.length, cache.length + new
                given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
                found.append(model(ids[:, begin:end], cache=cache, **given if with_mask else {}))
            hidden = torch.cat(found, 1)
            if with_mask:
                hidden[0, :6] = 0
            wanted = padded if with_mask else expected
            torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)
            with pytest.raises(ValueError, match="17 tokens in a cache made for 16"):
                model(ids[:, :1], cache=cache)
            cache.reset()


@pytest.mark.parametrize("family", sampled(families()))
def test_a_row_does_not_depend_on_the_other_rows_or_the_cache(family):
    model = random_model(family)
    options = {"max_new_tokens": 12, "eos_token_id": []}
    batch = generate(model, PROMPTS, **options)
    for row, prompt in zip(batch, PROMPTS):
        for cache in (None, *([] if model.is_recurrent else [Everything()])):
            alone = generate(model, prompt, cache=cache, **options)
            assert torch.equal(alone[0, len(prompt) :], row[7:])
    if not model.is_recurrent:
        assert torch.equal(generate(model, PROMPTS, cache=Everything(), **options), batch)


def test_a_prompt_continues_the_tokens_in_a_cache():
    model = random_model("gemma2")
    ids, mask = left_padded(PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": 8, "eos_token_id": []}
    expected = generate(model, ids, **options)
    cache = KVCache(model.config, 3, 14)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5], cache=cache)
    assert torch.equal(generate(model, ids, cache=cache, **options), expected)
    assert cache.length == 14
    with pytest.raises(ValueError, match=r"cache: the cache holds 14 tokens already.*7 long"):
        generate(model, ids, cache=cache, **options)


def test_a_cache_has_the_sizes_of_the_windows_that_layers_have(pair):
    """Also of a window that was changed; a warning tells of positions that are not trained."""
    for family in ("gemma2", "mistral"):
        model, caches = random_model(family, max_position_embeddings=20), []
        model.layers[1].self_attn.sliding_window = None
        model.register_forward_pre_hook(
            lambda *given, caches=caches: caches.append(given[2].get("cache")), with_kwargs=True
        )
        with pytest.warns(UserWarning, match="max_position_embeddings=20"):
            found = generate(model, PROMPTS[1], max_new_tokens=20, eos_token_id=[])
        windows = [layer.self_attn.sliding_window or 26 for layer in model.layers]
        assert caches[0].sizes == windows and len(set(windows)) == 2
        with torch.no_grad():
            assert torch.equal(model.head.logits(model(found)).argmax(-1)[:, 6:-1], found[:, 7:])


def test_streaming_gives_the_same_tokens(pair):
    _, ours = pair
    expected = generate(ours, PROMPTS, max_new_tokens=10)
    steps = []
    generate(ours, PROMPTS, max_new_tokens=10, callback=steps.append)
    assert torch.equal(torch.stack(steps, 1), expected[:, 7:])
    one = generate(ours, PROMPTS[1], max_new_tokens=10)
    tokens = stream(ours, PROMPTS[1], max_new_tokens=10)
    assert torch.is_grad_enabled()
    assert next(tokens) == one[0, 7]
    assert torch.is_grad_enabled()  # Gradients stay enabled between two tokens.
    assert list(tokens) == one[0, 8:].tolist()

    def decode(ids, skip_special_tokens):  # The last token ends within a character.
        return "".join(f"{i} " for i in ids) + "\ufffd" * (ids[-1] == one[0, -1])

    pieces = [*stream_text(ours, SimpleNamespace(decode=decode), PROMPTS[1], max_new_tokens=10)]
    assert pieces == [*(f"{i} " for i in one[0, 7:-1]), f"{one[0, -1]} \ufffd"]
    ours(one, labels=one).loss.backward()  # Generated ids can be trained on.
    ours.zero_grad(set_to_none=True)


def test_options_out_of_range_are_refused(pair, subtests):
    with pytest.raises(ValueError, match="2 prompts"):
        stream(pair[1], [[1], [2]], max_new_tokens=2)
    message = r"^generate\(\) got an .*'max_tokens'; did you mean 'max_new_tokens'"
    for function in (generate, stream):
        with pytest.raises(TypeError, match=message):
            function(pair[1], [1, 2], max_tokens=3)
    elsewhere = SimpleNamespace(device=torch.device("cuda"))
    for options, message in (
        ({"do_sample": True, "generator": elsewhere}, "generator: it is on cuda, and the model is"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 10**18}, r"1 rows of .* tokens need .* GiB .* GiB are free; lower max"),
        ({"eos_token_id": 2**70}, "eos_token_id="),
        ({"eos_token_id": ["x"]}, "eos_token_id="),
        ({"pad_token_id": "a"}, "pad_token_id='a'"),
        ({"pad_token_id": VOCAB}, "pad_token_id=97"),
        ({"temperature": 0.5}, "pass do_sample=True"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"logit_bias": [1.0]}, r"logit_bias=\[1\.0\]: expected \{token id: number\}"),
        ({"logit_bias": {"3": 1.0}}, "expected a token id below 97"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -torch.inf)}, "it forbids all tokens"),
        ({"logits_processor": lambda _, x: x[:, :5]}, r"expected logits of shape \(1, 97\)"),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            generate(pair[1], [1], **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_the_generation(value, subtests):
    model = random_model("llama")
    with torch.no_grad():
        model.embed_tokens.weight[5] = value  # Only a row that has this token is at fault.
    for options in ({}, {"do_sample": True}, {"eos_token_id": []}, {"repetition_penalty": 1.2}):
        with subtests.test(str(options)):
            with pytest.raises(LigerError, match="the logits of row 1 are NaN or infinite"):
                generate(model, [[3, 4], [3, 5]], max_new_tokens=3, **options)
            tokens = stream(model, [3, 5], max_new_tokens=3, **options)
            with pytest.raises(LigerError, match="row 0"):
                next(tokens)


def test_a_row_that_has_stopped_may_be_anything():
    """Its padding is not generated, and so its logits do not count."""
    model = random_model("llama", tie_word_embeddings=False)
    first = generate(model, [3, 4], max_new_tokens=1)[0, 2]
    with torch.no_grad():
        model.embed_tokens.weight[0] = float("nan")
    other = next(
        i for i in range(5, 50) if generate(model, [7, i], max_new_tokens=1)[0, 2] != first
    )
    options = {"eos_token_id": int(first), "pad_token_id": 0, "max_new_tokens": 3}
    found = generate(model, [[3, 4], [7, other]], **options)
    assert found[0].tolist() == [3, 4, int(first), *[0] * (found.shape[1] - 3)]
    assert found.shape[1] > 3


def test_log_probabilities_of_the_new_tokens():
    """They are those of the loss head at the temperature, whatever else changes the choice."""
    model = random_model("gemma2")
    prompts = [[5, 9, 3], [11, 2, 40, 41, 8, 77, 31, 90]]
    rule = {"do_sample": True, "temperature": 0.7, "top_k": 9, "presence_penalty": 1.0}
    options = {"max_new_tokens": 10, "generator": torch.Generator().manual_seed(1), **rule}
    free, _ = generate(model, prompts, return_log_probs=True, eos_token_id=[], **options)
    options["generator"].manual_seed(1)
    found, log_probs = generate(
        model, prompts, return_log_probs=True, eos_token_id=int(free[0, 10]), **options
    )
    assert torch.equal(found[:, :11], free[:, :11]) and log_probs.shape == (2, 10)
    for prompt, row, made in zip(prompts, found, log_probs):
        stops = (row[8:] == free[0, 10]).nonzero()
        new = int(stops[0]) + 1 if len(stops) else 10
        ids = torch.cat([torch.tensor(prompt), row[8 : 8 + new]])[None]
        with torch.no_grad():
            expected, _ = model.head.log_probs(
                model(ids)[:, len(prompt) - 1 : -1], ids[:, len(prompt) :], temperature=0.7
            )
        torch.testing.assert_close(made[:new], expected[0], rtol=1e-5, atol=1e-5)
        assert (made[new:] == 0).all()


def test_a_logits_processor_sees_the_tokens_so_far():
    model = random_model("llama")
    seen = []

    def odd_tokens(ids, logits):
        seen.append(ids)
        return logits.index_fill(1, torch.arange(0, VOCAB, 2), -torch.inf)

    found = generate(
        model, [[5, 9], [4, 3]], max_new_tokens=6, logits_processor=odd_tokens, eos_token_id=[]
    )
    assert (found[:, 2:] % 2 == 1).all()
    assert all(torch.equal(ids, found[:, : 2 + step]) for step, ids in enumerate(seen))


class Letters:
    """A tokenizer whose token i is the i-th letter, if there is one."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i % 26) for i in ids)


def test_stop_strings_end_rows():
    """A row ends with the token that completes a string, also if it began in an earlier token."""
    model = random_model("llama")
    prompts = [[5, 9], [4, 3]]
    free = generate(model, prompts, max_new_tokens=9, eos_token_id=[])
    texts = [Letters().decode(row, True) for row in free[:, 2:].tolist()]
    first = texts[0][2:4]
    ends = [text.index(first) + 2 if first in text else 9 for text in texts]
    options = {"max_new_tokens": 9, "eos_token_id": [], "pad_token_id": 0}
    found = generate(model, prompts, stop_strings=["..", first], tokenizer=Letters(), **options)
    assert ends[0] <= 4 and found.shape[1] == 2 + max(ends)
    for row, expected, end in zip(found[:, 2:], free[:, 2:], ends):
        assert torch.equal(row[:end], expected[:end]) and (row[end:] == 0).all()
    with pytest.raises(ValueError, match="stop_strings"):
        generate(model, prompts, stop_strings=[first])


def test_long_prompts_are_read_in_chunks(monkeypatch):
    """A padded batch, and prompts of equal length of which a pass reads one or a part of one."""
    padded = [[*range(3, 33)], [9, 4], [*range(40, 55)]]
    equal = [[*range(at, at + 20)] for at in (3, 7, 30)]
    for family, prompts in (("mistral", padded), ("gemma2", padded), ("gemma2", equal)):
        model = random_model(family)
        options = {"max_new_tokens": 9, "eos_token_id": [], "return_log_probs": True}
        expected, log_probs = generate(model, prompts, **options)
        with monkeypatch.context() as patch:
            patch.setattr(prefill, "PASS_TOKENS", 12)
            found, again = generate(model, prompts, **options)
        assert torch.equal(found, expected)
        torch.testing.assert_close(again, log_probs, rtol=1e-4, atol=1e-5)
