import json
import re

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers import LlamaConfig as HFConfig

from ligermodels.errors import CheckpointError
from ligermodels.generation import generate, stream, stream_text
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.auto import AutoLiger, families
from ligermodels.models.llama import LigerLlama
from ligermodels.text.tokenizer import Tokenizer
from tests.families import WINDOW, windows
from tests.models import hf_models, zoo
from tests.tiny_models import VOCAB, random_model

PROMPTS = [[5, 9, 3], [11, 2, 40, 41, 42, 7, 60], [33]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same random weights in transformers and here, spread so that greedy choices vary."""
    torch.manual_seed(0)
    config = HFConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    theirs = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, LigerLlama.from_hf(folder)


def left_padded(prompts, pad=0):
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def greedy_of(theirs, ids, mask, new, eos=None, pad=0):
    return theirs.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def test_greedy_equals_transformers_for_one_prompt(pair):
    theirs, ours = pair
    ids = torch.tensor([PROMPTS[1]])
    expected = greedy_of(theirs, ids, torch.ones_like(ids), 40)
    assert expected[0, 7:].unique().numel() > 5
    assert torch.equal(ours.generate(ids, max_new_tokens=40), expected)
    assert torch.equal(generate(ours, PROMPTS[1], max_new_tokens=40), expected)
    assert torch.equal(generate(ours, ids[0], max_new_tokens=40), expected)


def test_greedy_equals_transformers_for_unequal_prompts(pair):
    theirs, ours = pair
    ids, mask = left_padded(PROMPTS)
    expected = greedy_of(theirs, ids, mask, 30)
    assert torch.equal(generate(ours, PROMPTS, max_new_tokens=30), expected)
    assert torch.equal(
        generate(ours, [torch.tensor(p) for p in PROMPTS], max_new_tokens=30), expected
    )
    assert torch.equal(generate(ours, ids, attention_mask=mask, max_new_tokens=30), expected)
    # a row does not depend on the company it is in
    alone = generate(ours, PROMPTS[0], max_new_tokens=30)
    assert torch.equal(alone[0, 3:], expected[0, 7:])


def test_rows_stop_and_are_padded_as_in_transformers(pair):
    theirs, ours = pair
    ids, mask = left_padded(PROMPTS)
    free = greedy_of(theirs, ids, mask, 30)
    # tokens that come up at different steps, so that rows stop one after another
    stops = [int(free[0, 9]), int(free[1, 20])]
    expected = greedy_of(theirs, ids, mask, 30, eos=stops, pad=96)
    assert (expected == 96).any()
    ours_ids = generate(
        ours, ids, attention_mask=mask, max_new_tokens=30, eos_token_id=stops, pad_token_id=96
    )
    assert torch.equal(ours_ids, expected)
    one = generate(ours, PROMPTS[0], max_new_tokens=30, eos_token_id=stops[0])
    assert one[0, -1] == stops[0] and (one[0, 3:-1] != stops[0]).all()


def test_stop_tokens_come_from_generation_config_then_config(pair, tmp_path):
    theirs, ours = pair
    first, second = generate(ours, PROMPTS[0], max_new_tokens=12)[0, 3:].unique()[:2].tolist()
    theirs.save_pretrained(tmp_path)
    model = LigerLlama.from_hf(tmp_path)
    config_file = tmp_path / "generation_config.json"

    config_file.unlink()
    model.config.eos_token_id = [first]
    assert generate(model, PROMPTS[0], max_new_tokens=12)[0, -1] == first
    config_file.write_text(json.dumps({"eos_token_id": second, "do_sample": True}))
    found = generate(model, PROMPTS[0], max_new_tokens=12)
    assert found[0, -1] == second
    # the file's do_sample changes nothing
    assert torch.equal(found, generate(model, PROMPTS[0], max_new_tokens=12))
    assert generate(model, PROMPTS[0], max_new_tokens=12, eos_token_id=[]).shape == (1, 15)
    for text, message in (
        ("{", "the content is not JSON"),
        ("[]", "the JSON holds a list, expected an object"),
        ('{"eos_token_id": "x"}', "'eos_token_id' is 'x', expected an integer or a list"),
        ('{"eos_token_id": [1, [2]]}', "'eos_token_id' is"),
        ('{"pad_token_id": 1.5}', "'pad_token_id' is 1.5, expected an integer"),
        ('{"repetition_penalty": NaN}', "'repetition_penalty' is nan, expected a positive"),
        ('{"repetition_penalty": 0}', "'repetition_penalty' is 0, expected a positive"),
    ):
        config_file.write_text(text)
        with pytest.raises(CheckpointError, match=rf"generation_config.json: {re.escape(message)}"):
            generate(model, PROMPTS[0])


def test_bfloat16_and_autocast(pair):
    _, ours = pair
    with torch.autocast("cpu", torch.bfloat16):
        assert generate(ours, PROMPTS, max_new_tokens=4).shape == (3, 11)
    half = LigerLlama.from_hf(ours.source_folder, dtype=torch.bfloat16)
    ids = generate(half, PROMPTS[1], max_new_tokens=4)
    # each token is the choice of a forward pass without a cache
    for at in range(7, 11):
        with torch.no_grad():
            logits = half.head.logits(half(ids[:, :at])[:, -1:])
        top = logits[0, 0].float().topk(2)
        assert ids[0, at] in top.indices


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_families_equal_transformers_past_their_windows(family, tmp_path):
    """Unequal prompts, one of them longer than the window, and two stop tokens from the file."""
    folder = tmp_path / family
    # Tied, Gemma's large embeddings would have every token followed by itself.
    feature = zoo.Feature(config={**windows(family, WINDOW), "tie_word_embeddings": False})
    hf_models.save(folder, family, feature)
    prompts = [*PROMPTS, list(range(20, 31))]
    ids, mask = left_padded(prompts, zoo.PAD)
    free = greedy_of(hf_models.load(folder, family), ids, mask, 30, pad=zoo.PAD)
    assert free[:, ids.shape[1] :].unique().numel() > 20
    # as in Gemma 3's [1, 106], tokens that come up at different steps
    stops = [int(free[0, 16]), int(free[1, 30])]
    settings = {"eos_token_id": stops, "pad_token_id": zoo.PAD, "bos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    expected = hf_models.load(folder, family).generate(
        ids, attention_mask=mask, max_new_tokens=30, do_sample=False
    )
    model = AutoLiger.from_hf(folder)
    assert torch.equal(generate(model, prompts, max_new_tokens=30), expected)
    free_of_ours = generate(model, prompts, max_new_tokens=30, eos_token_id=[])
    assert torch.equal(free_of_ours, free)


class Everything:
    """A cache by the protocol alone: it keeps all tokens, and gives them out last first."""

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


@pytest.mark.parametrize("family", families())
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
        for chunks in ([length], [9, 1, 1, 1, 1, 3], [2] * 8, [13, 3], [1, 4, 11]):
            for with_mask in (False, True):
                found = []
                for new in chunks:
                    begin, end = cache.length, cache.length + new
                    given = {}
                    if with_mask:
                        given["attention_mask"] = mask[:, :end]
                        given["position_ids"] = positions[:, begin:end]
                    found.append(model(ids[:, begin:end], cache=cache, **given))
                hidden = torch.cat(found, 1)
                if with_mask:
                    hidden[0, :6] = 0
                torch.testing.assert_close(
                    hidden, padded if with_mask else expected, rtol=1e-4, atol=1e-4
                )
                with pytest.raises(ValueError, match="17 tokens in a cache made for 16"):
                    model(ids[:, :1], cache=cache)
                cache.reset()


@pytest.mark.parametrize("family", families())
def test_a_row_does_not_depend_on_its_company_or_the_kind_of_cache(family):
    model = random_model(family)
    options = {"max_new_tokens": 12, "eos_token_id": []}
    batch = generate(model, PROMPTS, **options)
    for row, prompt in zip(batch, PROMPTS):
        for cache in (None, Everything()):
            alone = generate(model, prompt, cache=cache, **options)
            assert torch.equal(alone[0, len(prompt) :], row[7:])
    assert torch.equal(generate(model, PROMPTS, cache=Everything(), **options), batch)


def test_a_prompt_may_go_on_behind_what_a_cache_holds():
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


def test_the_cache_of_a_layer_is_as_long_as_its_window():
    model, caches = random_model("gemma2"), []
    model.register_forward_pre_hook(
        lambda *given: caches.append(given[2]["cache"]), with_kwargs=True
    )
    generate(model, PROMPTS[1], max_new_tokens=20, eos_token_id=[])
    windows = [window or 26 for window in model.config.sliding_windows]
    assert caches[0].sizes == windows and len(set(windows)) == 2


def test_a_layer_changed_by_hand_sees_what_it_asks_for():
    """The cache follows the layers, not the config that they were made from."""
    model = random_model("mistral")
    for layer in model.layers:
        layer.self_attn.sliding_window = None
    found = generate(model, PROMPTS[1], max_new_tokens=10, eos_token_id=[])
    ids = found[:, :-1]
    with torch.no_grad():
        assert torch.equal(model.head.logits(model(ids)).argmax(-1)[:, 6:], found[:, 7:])


def test_repetition_penalty_equals_transformers(pair, tmp_path):
    theirs, ours = pair
    ids, mask = left_padded(PROMPTS)
    plain = greedy_of(theirs, ids, mask, 30)
    expected = theirs.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=30,
        do_sample=False,
        pad_token_id=0,
        repetition_penalty=1.4,
    )
    assert not torch.equal(plain, expected)
    found = generate(ours, PROMPTS, max_new_tokens=30, repetition_penalty=1.4)
    assert torch.equal(found, expected)
    # as in the generation configs of Qwen 2.5, which transformers follows in greedy decoding too
    theirs.save_pretrained(tmp_path)
    config = {"repetition_penalty": 1.4, "num_beams": 1, "no_repeat_ngram_size": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    model = LigerLlama.from_hf(tmp_path)
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=30), expected)
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=30, repetition_penalty=1), plain)
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4, "min_new_tokens": 3}')
    with pytest.warns(UserWarning, match=r"generation_config.json: .* num_beams, min_new_tokens"):
        generate(model, PROMPTS, max_new_tokens=1)


def test_sampling_is_repeatable_and_differs_from_greedy(pair):
    _, ours = pair
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 2.0, "top_k": 50}
    seeded = [
        generate(ours, PROMPTS, generator=torch.Generator().manual_seed(3), **options)
        for _ in range(2)
    ]
    assert torch.equal(*seeded)
    assert not torch.equal(seeded[0], generate(ours, PROMPTS, max_new_tokens=20))
    likeliest = generate(ours, PROMPTS, max_new_tokens=20, do_sample=True, top_k=1)
    assert torch.equal(likeliest, generate(ours, PROMPTS, max_new_tokens=20))


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
    assert torch.is_grad_enabled()  # also between two tokens
    assert list(tokens) == one[0, 8:].tolist()
    drawn = stream(ours, PROMPTS[1], max_new_tokens=10, do_sample=True, top_k=1)
    assert list(drawn) == one[0, 7:].tolist()


class Letters:
    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(33 + i) for i in ids)


def test_stream_text_does_not_repeat_the_prompt(pair):
    _, ours = pair
    new = generate(ours, PROMPTS[1], max_new_tokens=10)[0, 7:].tolist()
    pieces = list(stream_text(ours, Letters(), PROMPTS[1], max_new_tokens=10))
    assert "".join(pieces) == Letters().decode(new)
    assert len(pieces) == 10


def test_generated_ids_can_be_trained_on(pair):
    _, ours = pair
    ids = generate(ours, PROMPTS[1], max_new_tokens=3)
    ours(ids, labels=ids).loss.backward()
    assert ours.embed_tokens.weight.grad is not None
    ours.zero_grad(set_to_none=True)


def test_going_beyond_the_trained_length_warns(pair):
    theirs, ours = pair
    ids = torch.tensor([PROMPTS[1]])
    with pytest.warns(UserWarning, match="max_position_embeddings=64"):
        found = generate(ours, ids, max_new_tokens=60)
    assert torch.equal(found, greedy_of(theirs, ids, torch.ones_like(ids), 60))


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "there are no tokens"),
        ([[1], []], {}, "prompt 1 is empty"),
        (torch.zeros(2, 0, dtype=torch.int64), {}, "prompt 0 is empty"),
        ([[1, VOCAB]], {}, "token 97 is outside the vocabulary of 97"),
        ([[-1]], {}, "token -1 is outside"),
        ([[0.5]], {}, "expected token ids"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), {}, "expected \\(batch, seq\\)"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([1], {"temperature": 0.5}, "pass do_sample=True"),
        ([1], {"do_sample": True, "temperature": 0.0}, "do_sample=False is greedy"),
        ([1], {"do_sample": True, "top_k": 0}, "top_k=0"),
        ([1], {"do_sample": True, "top_p": 1.5}, "top_p=1.5"),
        ([1], {"pad_token_id": VOCAB}, "pad_token_id=97"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ([1], {"eos_token_id": ["x"]}, "eos_token_id="),
        ([[1]], {"attention_mask": torch.ones(1, 1)}, "leave it out"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.ones(1, 3)}, "differ in shape"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.tensor([[1, 0]])}, "as a list"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.zeros(1, 2)}, "row 0 is all padding"),
    ],
)
def test_mistakes_are_refused(pair, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(pair[1], prompts, **options)


def test_stream_takes_one_prompt(pair):
    with pytest.raises(ValueError, match="2 prompts"):
        stream(pair[1], [[1], [2]], max_new_tokens=2)


@pytest.mark.slow
def test_the_real_checkpoint_chats_as_in_transformers(smollm2):
    tokenizer, theirs_tokenizer = Tokenizer.from_hf(smollm2), AutoTokenizer.from_pretrained(smollm2)
    theirs = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ours = LigerLlama.from_hf(smollm2, dtype=torch.float32)
    chats = [
        [{"role": "user", "content": text}]
        for text in ("Name three colours.", "Say café in Japanese 😀, please: one word.")
    ]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    batch = theirs_tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        return_tensors="pt",
        return_dict=True,
    )
    expected = theirs.generate(**batch, max_new_tokens=24, do_sample=False)
    assert torch.equal(generate(ours, prompts, max_new_tokens=24), expected)
    text = "".join(stream_text(ours, tokenizer, prompts[1], max_new_tokens=24))
    new = expected[1, batch["input_ids"].shape[1] :]
    assert text == theirs_tokenizer.decode(new, skip_special_tokens=True)
