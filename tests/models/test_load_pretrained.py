"""Starting a module from a checkpoint: the loaded tensors, the report and the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ligermodels.layers as ll
from ligermodels import (
    CheckpointError,
    Gemma3Config,
    LigerGemma3,
    LigerLlama,
    LigerQwen3,
    LlamaConfig,
    Qwen3Config,
    load_pretrained,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
EMBEDDING = "embed_tokens.weight"


def llama(seed: int = 1, **changes) -> LigerLlama:
    torch.manual_seed(seed)
    model = LigerLlama(LlamaConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of an untied Llama checkpoint."""
    llama().save_hf(tmp_path / "llama")
    return tmp_path / "llama"


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_untouched(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def refused(module: nn.Module, source: Path, match: str, **options) -> str:
    """Return the error's message, and assert that the module did not change."""
    before = values(module) if not any(p.is_meta for p in module.parameters()) else {}
    with pytest.raises(CheckpointError, match=match) as caught:
        load_pretrained(module, source, **options)
    if before:
        assert_untouched(module, before)
    return str(caught.value)


def test_parameters_that_the_checkpoint_lacks_stay_unchanged(source):
    torch.manual_seed(2)
    model = LigerQwen3(Qwen3Config(**SIZES))
    before = values(model)
    report = load_pretrained(model, source)
    assert report.new == [
        f"layers.{i}.self_attn.{norm}.weight" for i in range(3) for norm in ("q_norm", "k_norm")
    ]
    original = llama().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name in report.new else original[name]), name
    assert report.unused == []


def test_names_can_be_changed_or_left_out(source):
    module = nn.ModuleDict({"norm": ll.RMSNorm(48), "one": nn.Linear(48, 80, bias=False)})
    names = {"norm.weight": None, "layers.1.self_attn.qkv_proj.weight": "one.weight"}
    report = load_pretrained(module, source, rename=lambda name: names.get(name, name))
    assert report.loaded == {"one.weight": "layers.1.self_attn.qkv_proj.weight"}
    assert report.new == ["norm.weight"]
    assert "norm.weight" in report.unused
    assert torch.equal(module["one"].weight, llama().layers[1].self_attn.qkv_proj.weight)
    assert "one.weight <- layers.1.self_attn.qkv_proj.weight" in str(report)


def sandwiched(model: LigerLlama) -> LigerLlama:
    block = model.layers[1]
    norms = (ll.RMSNorm(48) for _ in range(4))
    model.layers[1] = ll.SandwichBlock(block.self_attn, block.mlp, *norms)
    return model


def test_a_norm_in_another_place_does_not_take_the_weight(source):
    model = sandwiched(llama(seed=2))
    message = refused(
        model, source, "has its place before the MLP in the checkpoint's family, after"
    )
    assert "layers.1.post_attention_layernorm" in message

    def rename(name: str) -> str:
        old, new = "layers.1.post_attention", "layers.1.pre_feedforward"
        return name.replace(old, new)

    report = load_pretrained(model, source, rename=rename)
    assert report.new == [
        "layers.1.post_attention_layernorm.weight",
        "layers.1.post_feedforward_layernorm.weight",
    ]
    expected = llama().layers[1].post_attention_layernorm.weight
    assert torch.equal(model.layers[1].pre_feedforward_layernorm.weight, expected)


def test_a_head_tied_on_one_side_only(tmp_path, source):
    tied = llama(seed=2, tie_word_embeddings=True)
    report = load_pretrained(tied, source)
    assert report.unused == ["head.proj.weight"]
    tied.save_hf(tmp_path / "tied")
    own = llama(seed=3)
    report = load_pretrained(own, tmp_path / "tied")
    assert report.new == ["head.proj.weight"]


def test_one_parameter_under_two_names(tmp_path, source):
    model = llama(seed=2)
    model.head.proj.weight = model.embed_tokens.weight
    refused(model, source, "'head.proj.weight' is the same parameter as 'embed_tokens.weight'")
    llama(tie_word_embeddings=True).save_hf(tmp_path / "tied")
    report = load_pretrained(model, tmp_path / "tied")
    assert report.loaded["head.proj.weight"] == report.loaded[EMBEDDING] == EMBEDDING
    assert report.new == []
    assert torch.equal(model.head.proj.weight, llama(tie_word_embeddings=True).head.weight)
    refused(
        model,
        source,
        r"rename puts both 'layers\.0\.input_layernorm.*' and .* into 'norm\.weight'",
        rename=lambda name: "norm.weight" if "norm" in name else name,
    )


def test_the_module_keeps_dtypes_memory_and_requires_grad(source):
    model = llama(seed=2).to(torch.bfloat16)
    model.norm.float()
    model.embed_tokens.requires_grad_(False)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_pretrained(model, source)
    original = llama().state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == addresses[name]
        assert parameter.dtype == (torch.float32 if name == "norm.weight" else torch.bfloat16)
        assert torch.equal(parameter, original[name].to(parameter.dtype)), name
    assert not model.embed_tokens.weight.requires_grad and model.norm.weight.requires_grad


def test_weights_that_mean_something_else_are_refused(tmp_path):
    LigerGemma3(Gemma3Config(**SIZES)).save_hf(tmp_path)
    body = llama(seed=2, tie_word_embeddings=True)
    message = refused(body, tmp_path, "has scale 6.9282 in the checkpoint's family, 1 in")
    assert "layers.*.input_layernorm.weight [48] has offset 1 in" in message
    report = load_pretrained(body, tmp_path, ignore_mismatched_sizes=True)
    assert all("norm" not in name and "embed" not in name for name in report.loaded)


def on_meta() -> LigerLlama:
    with torch.device("meta"):
        return LigerLlama(LlamaConfig(**SIZES))


def with_integers() -> LigerLlama:
    model = llama(seed=2)
    model.norm.weight = nn.Parameter(torch.zeros(48, dtype=torch.int32), requires_grad=False)
    return model


def with_norm(norm: nn.Module | None = None, **attributes: Any) -> LigerLlama:
    model = llama(seed=2)
    model.norm = norm or model.norm
    if norm is None:
        weight = nn.Parameter(torch.zeros(48))
        model.norm.weight = weight
        vars(weight).update(attributes)
    return model


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: llama(seed=2, vocab_size=101),
            r"model.safetensors: 'model.embed_tokens.weight' .*\[97, 48\] in the checkpoint, "
            r"\[101, 48\] in the module .the first of 2 that do not match.*\n  head.proj.weight",
        ),
        (
            lambda: llama(seed=2, num_key_value_heads=3),
            r"'model.layers.0.self_attn.q_proj.weight' and others.*\[80, 48\] .*\[144, 48\]",
        ),
        (
            lambda: llama(seed=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8),
            "3 and 1 of size 16 in the checkpoint's family, 6 and 2 of size 8 in",
        ),
        (
            lambda: with_norm(ll.RMSNorm(48, offset=1.0, casting_mode="gemma")),
            r"\[48\] has offset 0 in the checkpoint's family, 1 in the module",
        ),
        (nn.Identity, "no parameter of the checkpoint's names"),
        (
            lambda: nn.ModuleDict({"body": llama(seed=2)}),
            r"no parameter of the checkp.*\n  layers.\*.mlp.down_proj.weight \(3 layers\)\n"
            r".*\n  body.layers.\*.mlp.down_proj.weight \(3 layers\)\n",
        ),
        (on_meta, r"'embed_tokens\.weight' is on the meta device"),
        (with_integers, r"'norm\.weight' has torch.int32; give it a floating point dtype"),
        # load_pretrained knows a DTensor by this method.
        (lambda: with_norm(full_tensor=None), r"'norm\.weight' is sharded; load before sharding"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_and_left_unchanged(make, complaint, source):
    refused(make(), source, f"(?s){complaint}")


def test_mismatches_can_be_allowed_and_are_reported(source):
    wide = sandwiched(llama(seed=2, vocab_size=101))
    before = values(wide)
    report = load_pretrained(wide, source, ignore_mismatched_sizes=True)
    assert [*report.mismatched] == [
        *(EMBEDDING, "layers.1.post_attention_layernorm.weight", "head.proj.weight")
    ]
    assert "[97, 48]" in report.mismatched[EMBEDDING] and "[101, 48]" in str(report)
    assert torch.equal(wide.embed_tokens.weight, before[EMBEDDING])
    assert torch.equal(wide.norm.weight, llama().norm.weight)
    text = str(report)
    assert text.splitlines()[:2] == [str(source), "loaded: 18"]
    assert "\n  layers.*.mlp.down_proj.weight (3 layers)\n" in text
    assert "new, left as they were: 2\n  layers.1.pre_feedforward_layernorm.weight\n" in text
    assert "\nmismatched, left as they were: 3\n  embed_tokens.weight: has shape" in text
    others = {f"n{i}": nn.Linear(2, 2) for i in range(9)}
    longest = str(load_pretrained(nn.ModuleDict({"norm": ll.RMSNorm(48), **others}), source))
    assert "new, left as they were: 18\n  n0.weight\n" in longest
    assert "\n  ... and 8 more\n" in longest


def test_a_checkpoint_that_from_hf_refuses_is_refused(source):
    file = source / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    refused(nn.ModuleDict({"norm": ll.RMSNorm(48)}), source, r"'lm_head\.weight' is missing")
    head[3, 4] = float("nan")
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
    model = llama(seed=2)
    refused(model, source, r"'lm_head\.weight' holds NaN")
    load_pretrained(model, source, allow_nonfinite=True)
    assert (~model.head.proj.weight.isfinite()).sum() == 1
    # The load does not read tensors that the module lacks.
    assert load_pretrained(nn.ModuleDict({"norm": ll.RMSNorm(48)}), source).unused
