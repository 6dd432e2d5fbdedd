"""Adapters on experts: as products, in PEFT's format, merged, and on weights of few bits."""

from __future__ import annotations

import copy
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligermodels import AutoLiger, DecoderModel, LigerGptOss, LigerMixtral, LigerQwen3Moe, kernels
from ligermodels.adapters import LoraLinear, QuantizedLinear
from ligermodels.adapters.adapted_model import (
    adapter_of,
    add_adapters,
    export_adapter,
    merged,
    quantize,
    stacked_linear,
)
from ligermodels.adapters.lora import RowRange
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.layers import Experts, Router
from tests.training.tiny_run import make_text, make_tokenizer, run, same, tensors

HIDDEN, INNER, COUNT = 16, 24, 6
IDS = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
P = "base_model.model.model.layers.0.mlp.experts"
long = partial(pytest.param, marks=pytest.mark.long)
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def adapted(gate_up: tuple[int, ...], down: bool, like: str = "", **options: Any) -> Experts:
    """Return experts of which gate (0), up (1) and down have an adapter."""
    how: dict[str, Any] = {}
    if like == "gpt-oss":
        how = {"bias": True, "activation": ClampedSwiGLU(limit=1.0)}
    torch.manual_seed(0)
    layer = Experts(Router(HIDDEN, COUNT, 2), HIDDEN, INNER, **how).double().requires_grad_(False)
    if layer.down_bias is not None:
        nn.init.normal_(layer.gate_up_bias), nn.init.normal_(layer.down_bias)
    parts = {
        "gate_up_proj": [
            RowRange((2 * e + i) * INNER, INNER) for e in range(COUNT) for i in gate_up
        ],
        "down_proj": [RowRange(e * HIDDEN, HIDDEN) for e in range(COUNT) if down],
    }
    for name, rows in parts.items():
        if rows:
            base = stacked_linear(getattr(layer, name))
            lora = LoraLinear(base, rows, rank=3, experts=COUNT, **options).double()
            nn.init.normal_(lora.lora_b)
            delattr(layer, name)
            setattr(layer, name, lora)
    return layer


def by_formula(layer: Experts, x: Tensor) -> Tensor:
    """Return the output of experts whose weights contain their adapters."""
    weights, experts, _ = layer.router(x)
    stacks = []
    for each in (layer.gate_up_proj, layer.down_proj):
        whole = each if isinstance(each, Tensor) else each.base_layer.weight
        for rows, a, b in [] if isinstance(each, Tensor) else each.factors():
            here = whole[rows.slice] + each.scaling * b @ a
            whole = torch.cat([whole[: rows.start], here, whole[rows.start + rows.size :]])
        stacks.append(whole.unflatten(0, (COUNT, -1)))
    names = ("gate_up_bias", "down_bias")
    biases = {n: None if (b := getattr(layer, n)) is None else b.view(COUNT, -1) for n in names}
    return kernels.expert_mlp(x, *stacks, weights, experts, layer.activation, **biases)


@pytest.mark.parametrize(
    ("gate_up", "down", "like"),
    [
        ((0, 1), True, ""),
        ((0,), False, ""),
        ((1,), True, ""),
        ((), True, ""),
        ((0, 1), True, "gpt-oss"),
    ],
    ids=str,
)
def test_outputs_and_gradients(gate_up, down, like) -> None:
    layer = adapted(gate_up, down, like, alpha=5.0)
    x = torch.randn(2, 5, HIDDEN).double().requires_grad_()
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    assert len(leaves) == 1 + 2 * bool(gate_up) + 2 * down
    (out, _), expected = layer(x), by_formula(layer, x)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    ):
        torch.testing.assert_close(ours, theirs)


def test_dropout_drops_inputs_of_the_adapters_alone() -> None:
    """The gradients are those of finite differences, at the same random numbers."""
    layer, x = adapted((0, 1), True, dropout=0.5), torch.randn(4, HIDDEN).double()
    leaves = [x.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]

    def call(*_: Tensor) -> Tensor:
        torch.manual_seed(1)
        return layer(x)[0]

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    expected = torch.autograd.grad(call().square().sum(), leaves)
    layer.policy = "no_gate_up"  # backward computes gate and up again, of what was dropped
    for again in (call(), checkpoint(call, use_reentrant=False)):
        assert all(map(torch.equal, torch.autograd.grad(again.square().sum(), leaves), expected))
    with torch.no_grad():
        assert not torch.equal(call(), by_formula(layer, x))
        torch.testing.assert_close(layer.eval()(x)[0], by_formula(layer, x))
        for each in (layer.gate_up_proj, layer.down_proj):
            each.enable_adapters(False)
        plain = copy.deepcopy(layer)
        for each in (plain.gate_up_proj, plain.down_proj):
            each.enable_adapters(True)
            each.lora_b.zero_()
        torch.testing.assert_close(layer(x)[0], by_formula(plain, x))


def test_nothing_of_the_size_of_a_weight_is_kept() -> None:
    layer, x = adapted((0, 1), True), torch.randn(5, HIDDEN).double().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer(x)
    own = {p.data_ptr() for p in layer.parameters()} | {x.data_ptr()}
    sizes = sorted(t.numel() for t in kept if t.data_ptr() not in own and t.is_floating_point())
    # Of each of 10 rows: A x of gate and up, and gate and up. All else is smaller.
    assert sizes[-2:] == [10 * 2 * 3, 10 * 2 * INNER] and sizes[-3] <= 10 * 3


def checkpoint_of(family: type[DecoderModel], folder: Path, **fields: Any) -> Path:
    torch.manual_seed(0)
    family(family.config_class.small(vocab_size=258, **fields)).save_hf(folder)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(LigerQwen3Moe, tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(LigerMixtral, tmp_path_factory.mktemp("mixtral"))


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def disturbed(model: nn.Module) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.head.logits(model(IDS))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(LigerGptOss, tmp_path_factory.mktemp("gpt_oss"))


@pytest.mark.parametrize(
    "targets", [None, long(["experts.gate_up_proj"]), long(["experts.down_proj"])], ids=str
)
def test_an_adapter_of_experts_in_one_tensor_opens_in_peft(targets, gpt_oss, tmp_path) -> None:
    model = AutoLiger.from_hf(gpt_oss)
    add_adapters(model, 4, 8.0, targets=targets)
    disturbed(model)
    export_adapter(model, tmp_path, str(gpt_oss), None)
    written = load_file(tmp_path / "adapter_model.safetensors")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(x.numel() for x in written.values()) == trained
    again = AutoLiger.from_hf(tmp_path)
    assert same(again.state_dict(), merged(model).state_dict())
    found = peft.PeftModel.from_pretrained(theirs(gpt_oss), tmp_path).eval()
    torch.testing.assert_close(found(IDS).logits, logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["folder", long("mixtral")])
def test_an_adapter_has_a_name_for_each_expert_and_opens_in_peft(family, request, tmp_path) -> None:
    folder = request.getfixturevalue(family)
    model = AutoLiger.from_hf(folder)
    add_adapters(model, 4, 8.0, dropout=0.1)
    disturbed(model)
    export_adapter(model, tmp_path, str(folder), None)
    written = load_file(tmp_path / "adapter_model.safetensors")
    name = f"{P}.3.gate_proj"
    if family == "mixtral":
        name = f"{P.replace('mlp', 'block_sparse_moe')}.3.w1"
    assert f"{name}.lora_A.weight" in written
    made, experts = adapter_of(model)[0], model.layers[0].mlp.num_experts
    each = model.config.num_hidden_layers * (4 + 3 * experts)  # projections
    assert len(made) == len(written) == 2 * each
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(x.numel() for x in written.values()) == trained
    assert same(written, made)
    again = AutoLiger.from_hf(tmp_path)
    assert same(again.state_dict(), merged(model).state_dict())
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-6)
    found = peft.PeftModel.from_pretrained(theirs(folder), tmp_path).eval()
    torch.testing.assert_close(found(IDS).logits, logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", [None, long(["layers.1.mlp.up_proj", "q_proj"])], ids=str)
def test_an_adapter_of_dense_layers_beside_experts_opens_in_peft(targets, tmp_path) -> None:
    folder = checkpoint_of(LigerQwen3Moe, tmp_path / "base", mlp_only_layers=[1])
    model = AutoLiger.from_hf(folder)
    add_adapters(model, 4, 8.0, targets=targets)
    disturbed(model)
    export_adapter(model, tmp_path, str(folder), None)
    assert same(AutoLiger.from_hf(tmp_path).state_dict(), merged(model).state_dict())
    found = peft.PeftModel.from_pretrained(theirs(folder), tmp_path).eval()
    torch.testing.assert_close(found(IDS).logits, logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        long("folder", {"target_modules": ["gate_proj", "up_proj", "down_proj", "q_proj"]}),
        long("folder", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
        long("folder", {"target_modules": ["k_proj"], "target_parameters": [GATE_UP], "r": 3}),
        ("folder", {"target_modules": "all-linear", "use_rslora": True}),
        long("mixtral", {"target_modules": "all-linear"}),
        ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": [GATE_UP, DOWN]}),
    ],
    ids=str,
)
def test_an_adapter_that_peft_writes_for_parameters_of_experts(
    family, options, request, tmp_path
) -> None:
    folder = request.getfixturevalue(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = disturbed(peft.get_peft_model(theirs(folder), LoraConfig(**options)))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(IDS).logits
    torch.testing.assert_close(logits(AutoLiger.from_hf(tmp_path)), expected, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    for name in [name for name in weights if "experts" in name]:
        rest = {key: x for key, x in weights.items() if key != name}
        save_file(rest, tmp_path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            AutoLiger.from_hf(tmp_path)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    config["target_parameters"].append("experts.other")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'experts\.other' is no weight of all experts"):
        AutoLiger.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("targets", "projections"),
    [
        (["experts"], "down_proj gate_proj up_proj"),
        (["mlp.experts.down_proj"], "down_proj"),
        (["experts.gate_up_proj", "v_proj"], "gate_proj up_proj v_proj"),
        (["up_proj"], "up_proj"),
    ],
    ids=str,
)
def test_targets(targets, projections, folder) -> None:
    model = AutoLiger.from_hf(folder)
    add_adapters(model, 2, 4.0, targets=targets)
    found = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter_of(model)[0]}
    assert " ".join(sorted(found)) == projections
    by_default, by_name = (AutoLiger.from_hf(folder) for _ in range(2))
    add_adapters(by_default, 2, 4.0)
    add_adapters(by_name, 2, 4.0, targets=["all-linear"])
    assert same(by_default.state_dict(), by_name.state_dict())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["experts", "w1"], "'w1' is no linear .* down_proj, experts, experts.down_proj, "),
        (["experts.1.up_proj"], "is the projection of one of 4 experts .* name gate_proj"),
    ],
)
def test_targets_that_cannot_have_adapters(targets, message, folder) -> None:
    with pytest.raises(ConfigError, match=message):
        add_adapters(AutoLiger.from_hf(folder), 2, 4.0, targets=targets)


def test_what_makes_no_adapter_and_no_merge(folder) -> None:
    model = AutoLiger.from_hf(folder)
    for dropout in (1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"lora_dropout: {dropout}; give 0 or more, and less"):
            add_adapters(model, 2, 4.0, dropout)
    made = type(model)(model.config)  # not loaded
    add_adapters(made, 2, 4.0)
    with pytest.raises(ConfigError, match="merged: the model is of no checkpoint; load it"):
        merged(made)


def test_experts_are_not_kept_in_float8(folder) -> None:
    with pytest.raises(ConfigError, match=r"load_in: layers\.0\.mlp\.gate_up_proj: .* 4 or 8"):
        quantize(AutoLiger.from_hf(folder), "float8", torch.device("cpu"))


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_merged_equals_unmerged(bits, folder) -> None:
    model = AutoLiger.from_hf(folder)
    if bits is not None:
        quantize(model, bits, torch.device("cpu"))
    add_adapters(model, 4, 8.0)
    disturbed(model)
    whole = merged(model)
    if bits is None:
        torch.testing.assert_close(logits(model), logits(whole), rtol=1e-6, atol=1e-6)
    else:
        difference = (logits(model) - logits(whole)).norm() / logits(whole).norm()
        assert 0 < difference < (0.2 if bits == 4 else 0.02)


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_of_few_bits(bits) -> None:
    """They compute what their values give, forward and backward."""
    layer = adapted((0, 1), True).float()
    exact = copy.deepcopy(layer)
    for name in ("gate_up_proj", "down_proj"):
        lora, other = getattr(layer, name), getattr(exact, name)
        lora.base_layer = QuantizedLinear(lora.base_layer, bits)
        other.base_layer.weight.copy_(lora.base_layer.dequantized(torch.float32))
    x = torch.randn(5, HIDDEN, requires_grad=True)
    grad, found = torch.randn(5, HIDDEN), []
    for each in (layer, exact):
        leaves = [x, *(p for p in each.parameters() if p.requires_grad)]
        out, _ = each(x)
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)


def test_a_run_on_experts_of_4_bits(folder, tmp_path) -> None:
    text = make_text(tmp_path / "words.txt", 4)
    options: dict[str, Any] = {"lora_r": 4, "load_in": "4bit", "lora_targets": ["experts"]}
    options |= {"max_steps": 2, "seq_len": 32, "learning_rate": 0.02, "eval_fraction": 0}
    made = run(folder, text, tmp_path / "run", **options)
    before, after = tensors(folder), tensors(made.model_dir)
    changed = {name for name in before if not after[name].equal(before[name])}
    assert changed == {
        f"layers.{i}.mlp.{end}" for i in (0, 1) for end in ("gate_up_proj", "down_proj")
    }
    alone = run(folder, text, tmp_path / "run", resume=True, export="adapter", **options)
    assert same(tensors(alone.model_dir), after)
