"""The mixed decoder starts from a checkpoint, learns, and has every feature of the layers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

import ligermodels.layers as ll
from examples import mixed
from ligermodels import AutoLiger, ConfigError, LigerLlama, LlamaConfig


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The folder of a tiny Llama checkpoint with random weights, whose tokens are bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    LigerLlama(config).save_hf(folder)
    return folder


@pytest.fixture(scope="module")
def data() -> torch.Tensor:
    return torch.tensor(list((mixed.DATA / "persuasion-train.txt").read_bytes()[:60_000]))


@pytest.fixture
def model(source) -> mixed.Mixed:
    torch.manual_seed(1)
    return mixed.start(source, sliding_window=8)[0]


NEW = [
    "layers.3.self_attn.q_norm.weight",
    "layers.3.self_attn.k_norm.weight",
    "layers.5.post_attention_layernorm.weight",
    "layers.5.post_feedforward_layernorm.weight",
]


def test_the_report_lists_loaded_and_new_parameters(source):
    model, report = mixed.start(source)
    llama = LigerLlama.from_hf(source).state_dict()
    assert sorted(report.loaded.values()) == sorted(llama)
    assert report.new == NEW
    assert (report.mismatched, report.unused) == ({}, [])
    for name, theirs in report.loaded.items():
        assert torch.equal(model.state_dict()[name], llama[theirs]), name
        assert name == theirs or "layers.5.pre_feedforward" in name


def test_without_new_parts_it_is_the_checkpoints_own_model(source, data, monkeypatch):
    for part in ("has_head_norms", "has_sandwich_norms"):
        monkeypatch.setattr(mixed.MixedConfig, part, lambda config, layer: False)
    changes = {"sliding_window": 999, "attn_logit_softcapping": 1e6, "final_logit_softcapping": 1e6}
    model, report = mixed.start(source, **changes)
    assert report.new == []
    ids = data[None, :64]
    llama = LigerLlama.from_hf(source)
    torch.testing.assert_close(model(ids), llama(ids))
    torch.testing.assert_close(model.loss(ids, ids), llama.loss(ids, ids), atol=1e-5, rtol=0)


def test_layers_alternate(model):
    attention = [layer.self_attn for layer in model.layers]
    assert [a.sliding_window for a in attention] == [8, None, 8, None, 8, None]
    assert [a.softcap for a in attention] == [50.0, None, 50.0, None, 50.0, None]
    assert [a.q_norm is not None for a in attention] == [i == 3 for i in range(6)]
    assert [isinstance(b, ll.SandwichBlock) for b in model.layers] == [i == 5 for i in range(6)]


def test_fitted_norms_keep_the_scale_of_what_comes_in(source, data):
    model, report = mixed.start(source)
    mixed.fit_new_norms(model, report, data[None, :128])
    norm = model.layers[5].post_attention_layernorm
    seen = []
    norm.register_forward_hook(lambda module, inputs, out: seen.extend([*inputs, out]))
    model(data[None, :128])
    before, after = (x.square().mean(-1).sqrt().median() for x in seen)
    torch.testing.assert_close(before, after, rtol=1e-2, atol=0)


def test_the_held_out_loss_falls_and_the_model_can_be_saved_and_loaded(model, data, tmp_path):
    held_out = data[-2048:]
    before = mixed.held_out_loss(model, held_out, rows=4)
    mixed.train(model, data[:-2048], steps=60, batch=4, seq=64, learning_rate=3e-3)
    assert mixed.held_out_loss(model, held_out, rows=4) < before - 1.5
    model.save_hf(tmp_path)
    again = mixed.Mixed.from_hf(tmp_path)
    ids = data[None, :64]
    assert torch.equal(model(ids), again(ids))
    assert torch.equal(model.loss(ids, ids), again.loss(ids, ids))


def test_activation_checkpointing_gives_the_same_gradients(model, data):
    ids = data[:64].view(2, 32)
    gradients = []
    for enable in (model.activation_checkpointing_disable, model.activation_checkpointing_enable):
        enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient)


def test_generation_with_windowed_caches_is_the_whole_pass_token_by_token(model, data):
    ids = data[None, :20]
    found = model.generate(ids, max_new_tokens=12)
    assert found.shape == (1, 32)
    with torch.no_grad():
        for _ in range(12):
            logits = model.head.logits(model(ids)[:, -1])
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, ids)


def test_packed_documents_are_computed_apart(model, data):
    packed = model(data[None, :40], cu_seqlens=torch.tensor([0, 25, 40]))
    alone = torch.cat([model(data[None, :25]), model(data[None, 25:40])], 1)
    torch.testing.assert_close(packed, alone)


@pytest.mark.long
def test_torch_compile_equals_eager(model, data):
    ids = data[:64].view(2, 32)
    labels = ids.masked_fill(ids == ord("e"), -100)
    expected = model(ids, labels=labels).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(ids, labels=labels).loss
    torch.testing.assert_close(found, expected)
    names = [name for name, _ in model.named_parameters()]
    gradients = [torch.autograd.grad(loss, model.parameters()) for loss in (expected, found)]
    for name, want, got in zip(names, *gradients):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def test_the_report_on_kernels_lists_both_kinds_of_attention(model):
    report = model.kernels()
    assert {"attention", "attention, window 8, soft cap 50", "qk_norm_rope"} <= report.keys()
    assert report["norm + linear, linear + rope, glu + linear"] == "fused"


def test_it_is_not_saved_as_a_llama(model, tmp_path):
    model.save_hf(tmp_path)
    with pytest.raises(ConfigError, match="model_type 'mixed' is not supported"):
        AutoLiger.from_hf(tmp_path)
    with pytest.raises(ConfigError, match="mixed"):
        LigerLlama.from_hf(tmp_path)


def test_the_whole_pretrained_checkpoint_is_loaded(smollm2):
    _, report = mixed.start(smollm2)
    layers = 30
    assert len(report.loaded) == 2 + 6 * layers
    assert len(report.new) == 4 * (layers // 6)
    assert (report.mismatched, report.unused) == ({}, [])


def test_the_whole_example_runs(smollm2, tmp_path, capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    LigerLlama(LlamaConfig(vocab_size=49152, **sizes, **heads)).save_hf(tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path / "tiny" / name)
    mixed.main(tmp_path / "tiny", tmp_path / "run", steps=3)
    printed = capsys.readouterr().out
    assert "\nloaded: 38\n" in printed and "\nnew, left as they were: 4\n" in printed
    losses = [float(x) for x in re.findall(r"held-out loss ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[2] < losses[1]
    assert "the hidden states are the same: True" in printed
