"""Optimizers by name: what they train, that they learn, and that a run resumes bitwise."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer

from ligermodels import LigerLlama, LigerQwen3Moe, Qwen3MoeConfig
from ligermodels.adapters.adapted_model import add_adapters, quantize
from ligermodels.converters.hf_config import to_hf
from ligermodels.errors import ConfigError
from ligermodels.training.config import OPTIMIZERS, FinetuneConfig
from ligermodels.training.optimizers import (
    Muon,
    allocate_state,
    freeze,
    make_optimizer,
    parameter_groups,
    set_learning_rate,
    state_of,
)
from tests.training.tiny_run import forget, run, same, tensors, tiny_config


def make(name, model=None, **options):
    torch.manual_seed(0)
    model = LigerLlama(tiny_config()) if model is None else model
    config = FinetuneConfig.from_options(
        model="m", train_files=["t"], output_dir="o", optimizer=name, learning_rate=1e-2, **options
    )
    optimizer = make_optimizer(model, config.optimizer)
    set_learning_rate(optimizer, 1e-2)
    return model, optimizer


def test_matrices_decay_and_norms_and_biases_do_not():
    model = LigerLlama(tiny_config(attention_bias=True, mlp_bias=True))
    decayed, plain = parameter_groups(model.parameters(), 0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert all("norm" in names[p] or names[p].endswith("bias") for p in plain["params"])
    assert not any("norm" in names[p] or names[p].endswith("bias") for p in decayed["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_a_factor_multiplies_the_learning_rate_of_what_it_names():
    factors = ["layers.0=0.25", "layers.0.mlp=4", "embed_tokens=0.5"]
    model, optimizer = make("adamw", lr_factors=factors, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # AdamW's first step is the learning rate, times the sign
    for name, parameter in model.named_parameters():
        factor = {"embed_tokens.weight": 0.5}.get(name, 0.25 if "layers.0." in name else 1.0)
        factor = 4.0 if "layers.0.mlp." in name else factor
        torch.testing.assert_close(
            before[name] - parameter, torch.full_like(parameter, factor / 100)
        )
    for wrong in ("embed_tokens", "embed_tokens=0", "embed_tokens=x", "=2", "norm=nan"):
        with pytest.raises(ConfigError, match="expected NAME=FACTOR"):
            make("adamw", lr_factors=[wrong])
    with pytest.raises(ConfigError, match="'embed_token' matches no parameter"):
        make("adamw", lr_factors=["embed_token=2"])
    frozen = LigerLlama(tiny_config())
    frozen.embed_tokens.requires_grad_(False)
    with pytest.raises(ConfigError, match="names only parameters that are frozen"):
        make("adamw", frozen, lr_factors=["embed_tokens=2"])
    with pytest.raises(ConfigError, match="muon has one learning rate"):
        make("muon", lr_factors=["embed_tokens=2"])


def test_a_factor_that_names_nothing_is_refused_before_the_data_are_read(checkpoint, tmp_path):
    (nothing := tmp_path / "nothing.txt").write_text("")
    with pytest.raises(ConfigError, match="'embed_token' matches no parameter"):
        run(checkpoint, nothing, tmp_path / "run", lr_factors=["embed_token=2"])


def test_a_factor_for_lora_b_makes_the_groups_of_lora_plus():
    """PEFT's optimizer has as many weights of each kind, with the same rates and decays."""
    model = LigerLlama(tiny_config())
    add_adapters(model, 4, 8.0)
    _, ours = make("adamw", model, lr_factors=["*.lora_b=16"], weight_decay=0.1)
    there = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf(tiny_config())))
    there = peft.get_peft_model(there, peft.LoraConfig(r=4, target_modules="all-linear"))
    given = {"lr": 1e-2, "loraplus_lr_ratio": 16, "loraplus_weight_decay": 0.1}
    theirs = create_loraplus_optimizer(there, torch.optim.AdamW, **given)
    counts = []
    for each, optimizer in ((model, ours), (there, theirs)):
        kinds = {p: name.lower().rpartition(".lora_")[2][0] for name, p in each.named_parameters()}
        counts.append(Counter())
        for group in optimizer.param_groups:
            for p in group["params"]:
                counts[-1][kinds[p], group["lr"], group["weight_decay"]] += p.numel()
    assert counts[0] == counts[1]


# torchao compiles its step.
LONG = {"adamw_8bit": [pytest.mark.long]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG.get(name, [])) for name in OPTIMIZERS]
)
def test_every_optimizer_learns_and_resumes_bitwise(checkpoint, text, tmp_path, name):
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    given = {"optimizer": name, "max_steps": 6, "save_steps": 3, "eval_steps": 6}
    if name == "adafactor":
        given["learning_rate"] = 0.05
    straight = run(checkpoint, text, tmp_path / "a", **given)
    assert straight.eval_after["eval_perplexity"] < 0.8 * straight.eval_before["eval_perplexity"]
    forget(straight.output_dir, 6)
    again = run(checkpoint, text, tmp_path / "a", **given, resume=True)
    assert same(tensors(again.model_dir), straight.model.state_dict())


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_allocating_the_state_changes_no_weight(name):
    model, optimizer = make(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    allocate_state(optimizer)
    assert same(model.state_dict(), before)
    for parameter in model.parameters():
        state = dict(state_of(optimizer, parameter))
        assert state and state.get("step", 0) == 0 and parameter.grad is None


def test_muon_takes_each_projection_by_itself():
    model, optimizer = make("muon", weight_decay=0.1)
    assert isinstance(optimizer, Muon)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    qkv = model.layers[0].self_attn.qkv_proj.weight
    name = next(n for n, p in model.named_parameters() if p is qkv)
    assert name.startswith("layers.0.")
    query = torch.nn.Parameter(qkv[:64].detach().clone())
    query.grad = qkv.grad[:64].clone()
    theirs = torch.optim.Muon([query], lr=5e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    embedding = torch.nn.Parameter(model.embed_tokens.weight.detach().clone())
    embedding.grad = model.embed_tokens.weight.grad.clone()
    adamw = torch.optim.AdamW([embedding], lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    set_learning_rate(optimizer, 5e-3)
    for each in (optimizer, theirs, adamw):
        each.step()
        each.step()
    assert torch.equal(qkv[:64], query)
    torch.testing.assert_close(model.embed_tokens.weight, embedding)


@pytest.mark.parametrize("load_in", [None, 4])
def test_muon_takes_each_factor_of_an_adapter_by_itself(load_in):
    model = LigerLlama(tiny_config())
    if load_in is not None:
        quantize(model, load_in, torch.device("cpu"))
    add_adapters(model, 4, 8.0, targets=["q_proj", "v_proj", "down_proj"])
    qkv = model.layers[0].self_attn.qkv_proj
    optimizer = make("muon", model=model)[1]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    alone = []
    for end in ("lora_a", "lora_b"):
        packed = getattr(qkv, end)
        sizes = [4, 4] if end == "lora_a" else [part.size for part in qkv.parts]
        for part, grad in zip(packed.detach().split(sizes), packed.grad.split(sizes)):
            alone.append(torch.nn.Parameter(part.clone()))
            alone[-1].grad = grad.clone()
    theirs = torch.optim.Muon(alone, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for each in (optimizer, theirs):
        each.step()
    assert torch.equal(qkv.lora_a, torch.cat(alone[:2]))
    assert torch.equal(qkv.lora_b, torch.cat(alone[2:]))


@pytest.mark.parametrize("adapted", [False, True])
def test_muon_takes_each_projection_of_an_expert_by_itself(adapted):
    model = LigerQwen3Moe(Qwen3MoeConfig.small(num_hidden_layers=1))
    experts, inner = model.layers[0].mlp, model.config.moe_intermediate_size
    if adapted:
        add_adapters(model, 4, 8.0)
    weight = experts.gate_up_proj.lora_a if adapted else experts.gate_up_proj
    optimizer = make("muon", model=model)[1]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    up = slice(4, 8) if adapted else slice(inner, 2 * inner)  # of the first expert
    alone = torch.nn.Parameter(weight[up].detach().clone())
    alone.grad = weight.grad[up].clone()
    theirs = torch.optim.Muon([alone], lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for each in (optimizer, theirs):
        each.step()
    assert torch.equal(weight[up], alone)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match="adamw_8bit needs torchao"):
        make("adamw_8bit")


def test_parameters_are_frozen_by_name():
    model = LigerLlama(tiny_config())

    def frozen():
        found = [name for name, p in model.named_parameters() if not p.requires_grad]
        model.requires_grad_(True)
        return found

    freeze(model, ["embed_tokens"])
    assert frozen() == ["embed_tokens.weight"]
    freeze(model, ["layers.0", "*norm*"])
    found = frozen()
    assert all(name.startswith("layers.0.") or "norm" in name for name in found)
    freeze(model, ["layers.[1-3].mlp"], only=True)
    found = frozen()
    assert not any(name.startswith("layers.1.mlp") for name in found)
    assert "embed_tokens.weight" in found and "norm.weight" in found
    with pytest.raises(ConfigError, match=r"freeze: 'embed_token' matches no .* 'embed_tokens'"):
        freeze(model, ["embed_token"])
    with pytest.raises(ConfigError, match="freeze: nothing is left to train"):
        freeze(model, ["*"])


@pytest.mark.parametrize("changes", [{"freeze": ["layers.0"]}, {"train_only": ["layers.1"]}])
def test_what_is_frozen_stays_as_it_was(checkpoint, text, tmp_path, changes):
    given = {"max_steps": 4, "save_steps": 2, "eval_steps": 4, **changes}
    done = run(checkpoint, text, tmp_path / "a", **given)
    before = tensors(checkpoint)
    for name, value in done.model.state_dict().items():
        trained = name.startswith("layers.1") or ("freeze" in changes and "layers.0" not in name)
        assert torch.equal(value, before[name]) != trained, name
    forget(done.output_dir, 4)
    again = run(checkpoint, text, tmp_path / "a", **given, resume=True)
    assert same(tensors(again.model_dir), done.model.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_every_optimizer_trains_and_goes_on(checkpoint, text, tmp_path, name):
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    given = {"optimizer": name, "max_steps": 8, "save_steps": 4, "eval_steps": 8, "device": "cuda"}
    if name == "adafactor":
        given["learning_rate"] = 0.05
    straight = run(checkpoint, text, tmp_path / "a", **given)
    assert straight.eval_after["eval_perplexity"] < 0.8 * straight.eval_before["eval_perplexity"]
    assert 0 < straight.metrics[-2]["mfu"] < 1
    forget(straight.output_dir, 8)
    again = run(checkpoint, text, tmp_path / "a", **given, resume=True)
    # Some kernels add in an order that changes between runs.
    assert again.eval_after["eval_loss"] == pytest.approx(
        straight.eval_after["eval_loss"], rel=1e-2
    )


def test_the_rate_of_a_compiled_step_is_written_into_its_tensor():
    """torchao's optimizers keep the rate in a tensor, so that it is no constant of the graph."""
    rate = torch.tensor(1.0)
    set_learning_rate(SimpleNamespace(param_groups=[{"lr": rate}]), 0.5)
    assert rate == 0.5
