"""The models composed of layers learn, see what they should, generate, and come back from disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor

from examples import encoder, look_and_tell, mixed, shared_keys, two_ahead
from ligermodels import AutoLiger, ConfigError, KVCache, LigerLlama, LlamaConfig, MemoryPlan
from ligermodels import register as register_family
from ligermodels.layers.recompute import POLICIES
from tests.models.pairs import gradients
from tests.training.tiny_run import make_tokenizer

DECODERS = ("mixed", "shared_keys")
SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96}


@pytest.fixture(scope="module")
def data() -> Tensor:
    return torch.tensor(list((mixed.DATA / "persuasion-train.txt").read_bytes()[:60_000]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama checkpoint with random weights, whose tokens are bytes."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = LlamaConfig(**SIZES, **heads, vocab_size=256, num_hidden_layers=6, eos_token_id=None)
    folder = tmp_path_factory.mktemp("checkpoint")
    LigerLlama(config).save_hf(folder)
    return folder


@pytest.fixture
def models(source: Path) -> dict[str, Any]:
    """Return a small model of each example."""
    torch.manual_seed(0)
    config = shared_keys.SharedKeysConfig(
        **SIZES, num_hidden_layers=4, num_attention_heads=4, sliding_window=8
    )
    return {
        "encoder": encoder.Encoder(hidden=48, layers=2, heads=4),
        "look_and_tell": look_and_tell.LookAndTell(look_and_tell.tiny_llama()),
        "mixed": mixed.start(source, sliding_window=8)[0],
        "shared_keys": shared_keys.SharedKeys(config),
        "two_ahead": two_ahead.TwoAhead(hidden=48, layers=2, heads=4, kv_heads=2),
    }


def loss_of(name: str, model: Any, data: Tensor) -> Tensor:
    generator, ids = torch.Generator().manual_seed(0), data[:64].view(2, 32)
    if name == "encoder":
        return model(**encoder.batch_of(data, generator))
    if name == "look_and_tell":
        return model(*look_and_tell.make_examples(2, generator))
    return sum(model.losses(ids)) if name == "two_ahead" else model.loss(ids, ids)


@pytest.mark.parametrize("name", ["encoder", "look_and_tell", "mixed", "shared_keys", "two_ahead"])
def test_every_parameter_learns_under_every_plan(
    name: str, models: dict[str, Any], data: Tensor
) -> None:
    model = models[name]
    loss_of(name, model, data).backward()
    expected = gradients(model)
    assert len(expected) == len([*model.parameters()])
    assert all(gradient.count_nonzero() for gradient in expected.values())
    decoder = model.language if name == "look_and_tell" else model
    for policy in POLICIES if hasattr(decoder, "set_memory_plan") else ():
        model.zero_grad()
        decoder.set_memory_plan(MemoryPlan.uniform(len(decoder.layers), policy))
        loss_of(name, model, data).backward()
        for key, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[key])


@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_the_whole_pass_token_by_token(
    name: str, models: dict[str, Any], data: Tensor
) -> None:
    model, ids = models[name], data[None, :20]
    cache = KVCache.of(model, 1, 32)
    found = model.generate(ids, max_new_tokens=12, cache=cache)
    with torch.no_grad():
        for _ in range(12):
            logits = model.head.logits(model(ids)[:, -1])
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, ids)
    held = [0 if keys is None else keys.shape[2] for keys in cache.keys]
    assert held == ([8, 32] * 3 if name == "mixed" else [8, 0, 32, 0])


@pytest.mark.parametrize("name", DECODERS)
def test_packed_documents_are_computed_apart(
    name: str, models: dict[str, Any], data: Tensor
) -> None:
    model = models[name]
    packed = model(data[None, :40], cu_seqlens=torch.tensor([0, 25, 40]))
    alone = torch.cat([model(data[None, :25]), model(data[None, 25:40])], 1)
    torch.testing.assert_close(packed, alone)


@pytest.mark.usefixtures("registry")
def test_they_are_saved_and_loaded(
    models: dict[str, Any], source: Path, data: Tensor, tmp_path: Path
) -> None:
    ids, loaded = data[None, :64], {}
    for name in DECODERS:
        models[name].save_hf(tmp_path / name)
    save_model(models["two_ahead"], str(tmp_path / "two_ahead.safetensors"))
    register_family(shared_keys.SharedKeys)
    loaded["mixed"] = mixed.Mixed.from_hf(tmp_path / "mixed")
    loaded["shared_keys"] = AutoLiger.from_hf(tmp_path / "shared_keys")
    loaded["two_ahead"] = two_ahead.TwoAhead(hidden=48, layers=2, heads=4, kv_heads=2)
    load_model(loaded["two_ahead"], tmp_path / "two_ahead.safetensors")
    for name, model in loaded.items():
        assert torch.equal(model(ids), models[name](ids)), name
    with pytest.raises(ConfigError, match="model_type 'mixed' is not supported"):
        AutoLiger.from_hf(tmp_path / "mixed")


@pytest.mark.long
def test_they_learn(models: dict[str, Any], data: Tensor) -> None:
    history = shared_keys.train(models["shared_keys"], data, steps=50, seq=64)
    assert sum(history[-5:]) / 5 < 3.1
    history = two_ahead.train(models["two_ahead"], data, steps=60, batch=4, seq=96)
    assert sum(history[-5:]) / 5 < 3.0
    model, held_out = models["mixed"], data[-2048:]
    before = mixed.held_out_loss(model, held_out, rows=4)
    mixed.train(model, data[:-2048], steps=60, batch=4, seq=64, learning_rate=3e-3)
    assert mixed.held_out_loss(model, held_out, rows=4) < before - 1.5
    # Each byte is one more than the byte before it, so that both neighbours tell it.
    counting = torch.arange(600) % 10 + 48
    history = encoder.train(models["encoder"], counting, steps=140, seq=32)
    assert sum(history[-10:]) / 10 < 0.3
    assert encoder.fill_in(models["encoder"], "345_78901_345") == "3456789012345"
    toy = models["look_and_tell"]
    assert look_and_tell.train(toy, steps=100)[-1] < 0.05
    images, texts = look_and_tell.make_examples(8, torch.Generator().manual_seed(9))
    assert toy.tell(images) == [bytes(text).decode() for text in texts.tolist()]


def changed_by(model: Any, ids: Tensor, place: int) -> list[int]:
    """Return the places whose hidden state changes when the byte at `place` does."""
    other = ids.clone()
    other[0, place] = (other[0, place] + 1) % 256
    difference = (model(ids) - model(other))[0].abs().amax(-1)
    return (difference > 0).nonzero().flatten().tolist()


def test_what_each_token_sees(models: dict[str, Any], data: Tensor) -> None:
    ids = data[None, :40]
    assert changed_by(models["encoder"], ids, 20) == [*range(40)]
    near = encoder.Encoder(hidden=48, layers=2, heads=4, window=4)
    near.layers = near.layers[:1]
    assert changed_by(near, ids, 20) == [*range(17, 24)]
    assert changed_by(models["two_ahead"], ids, 20) == [*range(20, 40)]
    padded = F.pad(ids[:, :30], (0, 10), value=encoder.PADDING)
    tokens = torch.arange(40)[None] < 30
    torch.testing.assert_close(
        models["encoder"](padded, tokens)[:, :30], models["encoder"](ids[:, :30])
    )


def test_patches_see_both_directions_and_text_does_not(models: dict[str, Any]) -> None:
    model, generator = models["look_and_tell"], torch.Generator().manual_seed(0)
    images, texts = look_and_tell.make_examples(1, generator)
    hidden = model.language(**model.look(images, texts))
    images[0, -4:, -4:] += 1  # the last patch, which the others and the text see
    before = model.language(**model.look(images, texts))
    assert (hidden != before).any(-1).all()
    texts[0, -1] = ord("9")
    same = (before == model.language(**model.look(images, texts))).all(-1)[0]
    assert same.tolist() == [True] * (look_and_tell.PATCHES + 13) + [False]


def test_both_losses_are_cross_entropy_of_the_right_tokens(
    models: dict[str, Any], data: Tensor
) -> None:
    model, ids = models["two_ahead"], data[:80].view(2, 40)
    hidden = model(ids)
    for loss, head, ahead in zip(model.losses(ids), (model.next, model.next_but_one), (1, 2)):
        logits = head.logits(hidden[:, :-ahead])
        expected = F.cross_entropy(logits.flatten(0, 1), ids[:, ahead:].flatten())
        torch.testing.assert_close(loss, expected)


def test_the_mixed_decoder_starts_from_a_checkpoint(
    source: Path, data: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, report = mixed.start(source)
    llama = LigerLlama.from_hf(source)
    assert report.new == [
        "layers.3.self_attn.q_norm.weight",
        "layers.3.self_attn.k_norm.weight",
        "layers.5.post_attention_layernorm.weight",
        "layers.5.post_feedforward_layernorm.weight",
    ]
    assert sorted(report.loaded.values()) == sorted(llama.state_dict())
    for name, theirs in report.loaded.items():
        assert torch.equal(model.state_dict()[name], llama.state_dict()[theirs]), name
    mixed.fit_new_norms(model, report, data[None, :128])
    seen: list[Tensor] = []
    norm = model.layers[5].post_attention_layernorm
    norm.register_forward_hook(lambda module, inputs, out: seen.extend([*inputs, out]))
    model(data[None, :128])
    before, after = (x.square().mean(-1).sqrt().median() for x in seen)
    torch.testing.assert_close(before, after, rtol=1e-2, atol=0)
    # Without new parts it is the checkpoint's own model.
    for part in ("has_head_norms", "has_sandwich_norms"):
        monkeypatch.setattr(mixed.MixedConfig, part, lambda config, layer: False)
    changes = {"sliding_window": 999, "attn_logit_softcapping": 1e6, "final_logit_softcapping": 1e6}
    model, report = mixed.start(source, **changes)
    ids = data[None, :64]
    assert report.new == []
    torch.testing.assert_close(model(ids), llama(ids))
    torch.testing.assert_close(model.loss(ids, ids), llama.loss(ids, ids), atol=1e-5, rtol=0)


def test_the_scripts_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_keys.main(tmp_path / "shared", max_steps=2)
    assert re.search(r"step +1  loss \d\.\d+\nCaptain Wentworth ", capsys.readouterr().out)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    LigerLlama(LlamaConfig(vocab_size=258, **sizes, **heads)).save_hf(tmp_path / "tiny")
    make_tokenizer(tmp_path / "tiny")
    for name in ("persuasion-train.txt", "persuasion-heldout.txt"):  # the novel is long
        (tmp_path / name).write_text((mixed.DATA / name).read_text()[:8000])
    monkeypatch.setattr(mixed, "DATA", tmp_path)
    mixed.main(tmp_path / "tiny", tmp_path / "run", steps=3)
    printed = capsys.readouterr().out
    assert "\nloaded: 38\n" in printed and "\nnew, left as they were: 4\n" in printed
    losses = [float(x) for x in re.findall(r"held-out loss ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[2] < losses[1]
    assert "the hidden states are the same: True" in printed
