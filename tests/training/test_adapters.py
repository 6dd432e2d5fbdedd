"""Runs with adapters: they learn, resume bitwise, and are exported merged or alone."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels import AutoLiger, LigerLlama
from ligermodels.adapters import LoraLinear, QuantizedLinear
from ligermodels.adapters.adapted_model import (
    STACKS,
    adapter_of,
    add_adapters,
    export_adapter,
    merged,
    module_at,
    quantize,
    train_whole,
)
from ligermodels.adapters.peft_format import add_lora
from ligermodels.errors import CheckpointError, ConfigError, SaveError
from ligermodels.layers import Experts
from ligermodels.models.auto import families
from tests.families import sampled
from tests.rounding import ADAM_EPSILON
from tests.tiny_models import VOCAB, random_model
from tests.training.tiny_run import (
    forget,
    make_checkpoint,
    run,
    same,
    tensors,
    timeless,
    tiny_config,
)

LORA = {"lora_r": 4, "lora_alpha": 8.0, "lora_dropout": 0.1}
RATE = {"learning_rate": 0.02}


@pytest.fixture(scope="module")
def finished(checkpoint, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    return run(checkpoint, text, folder, max_steps=12, save_steps=5, **LORA, **RATE)


def loss_of(model) -> torch.Tensor:
    ids = torch.randint(0, 258, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(ids, labels=ids).loss


def test_it_learns_and_the_export_is_the_merged_model(finished, checkpoint):
    assert finished.eval_after["eval_perplexity"] < 0.7 * finished.eval_before["eval_perplexity"]
    exported = AutoLiger.from_hf(finished.model_dir)
    assert same(exported.state_dict(), finished.model.state_dict())
    before = AutoLiger.from_hf(checkpoint).state_dict()
    moved = {name for name, value in exported.state_dict().items() if not value.equal(before[name])}
    assert moved == {name for name in before if name.startswith("layers.") and "norm" not in name}


def test_a_checkpoint_holds_the_adapters_and_their_optimizer_alone(finished):
    (file,) = (finished.output_dir / "checkpoints" / "step-00000010").glob("*.safetensors")
    names = load_file(file)
    assert names and all(".lora_" in name for name in names)


@pytest.mark.parametrize(
    "load_in",
    ["4bit", *(pytest.param(x, marks=pytest.mark.long) for x in (None, "8bit", "float8"))],
)
def test_a_killed_run_resumes_bitwise(checkpoint, text, tmp_path, load_in):
    options = {"max_steps": 4, "save_steps": 2, "load_in": load_in, **LORA, **RATE}
    whole = run(checkpoint, text, tmp_path / "whole", **options)
    cut = run(checkpoint, text, tmp_path / "cut", **options)
    forget(cut.output_dir, 4)
    again = run(checkpoint, text, tmp_path / "cut", resume=True, **options)
    assert same(tensors(whole.model_dir), tensors(again.model_dir))
    assert timeless(whole.output_dir) == timeless(again.output_dir)


def test_an_adapter_export_opens_in_peft(checkpoint, text, tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    options = {"max_steps": 3, **LORA, "lora_targets": ["q_proj", "up_proj"], **RATE}
    alone = run(checkpoint, text, tmp_path / "alone", export="adapter", **options)
    whole = run(checkpoint, text, tmp_path / "whole", **options)
    written = json.loads((alone.model_dir / "adapter_config.json").read_text())
    assert written["target_modules"] == ["q_proj", "up_proj"]
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (4, 8, 0.1)
    assert written["base_model_name_or_path"] == str(checkpoint)
    assert not (alone.model_dir / "config.json").exists()
    assert (alone.model_dir / "tokenizer.json").exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = peft.PeftModel.from_pretrained(theirs, alone.model_dir)
    state = load_file(alone.model_dir / "adapter_model.safetensors")
    assert {f"{name.replace('.weight', '.default.weight')}" for name in state} == {
        name for name, _ in theirs.named_parameters() if "lora_" in name
    }
    torch.testing.assert_close(loss_of(whole.model), loss_of(theirs), rtol=1e-5, atol=0)
    assert same(tensors(alone.model_dir), tensors(whole.model_dir))
    with pytest.raises(CheckpointError, match="this is an adapter; make a whole checkpoint of it"):
        run(alone.model_dir, text, tmp_path / "again", **options)
    torch.testing.assert_close(loss_of(whole.model), loss_of(alone.model), rtol=1e-5, atol=0)


def test_the_kind_of_export_may_change_on_resume(checkpoint, text, tmp_path):
    options = {"max_steps": 2, "lora_r": 2, **RATE}
    first = run(checkpoint, text, tmp_path / "run", export="adapter", **options)
    assert (first.model_dir / "adapter_config.json").exists()
    second = run(checkpoint, text, tmp_path / "run", resume=True, export="merged", **options)
    assert not list(second.model_dir.glob("adapter*"))
    third = run(checkpoint, text, tmp_path / "run", resume=True, export="adapter", **options)
    assert not (third.model_dir / "model.safetensors").exists()


@pytest.mark.parametrize(
    "options, theirs",
    [
        ({}, {}),
        ({"dora": True, "rslora": True}, {"use_dora": True, "use_rslora": True}),
        ({"dora": True, "targets": ["k_proj", "down_proj"]}, {"use_dora": True}),
    ],
)
def test_training_equals_peft(checkpoint, tmp_path, options, theirs):
    """Three steps of AdamW from the same adapters, on transformers' model and on ours.

    Beside them the embedding learns, which is also the head. PEFT then reads our export.
    """
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    ours = AutoLiger.from_hf(checkpoint)
    add_adapters(ours, 4, 8.0, **options)
    train_whole(ours, ["embed_tokens"], torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    targets = options.get("targets", "all-linear")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=targets,
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
        task_type="CAUSAL_LM",
        **theirs,
    )
    theirs = peft.get_peft_model(base, config)
    found = dict(theirs.named_parameters())
    for name, x in adapter_of(ours)[0].items():
        if name.endswith(("lora_A.weight", "lora_B.weight")):
            found[name.replace(".weight", ".default.weight")].data.copy_(x)
    ids = torch.randint(0, 258, (2, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for model in (ours, theirs):
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=ADAM_EPSILON)
        mine = []
        for _ in range(3):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        losses.append(mine)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][2] < losses[0][0] - 0.01
    export_adapter(ours, tmp_path, str(checkpoint), None)
    again = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    merges = [merged(ours), AutoLiger.from_hf(tmp_path)]
    for model in (again, *merges):
        torch.testing.assert_close(loss_of(model), loss_of(ours), rtol=1e-5, atol=0)
    assert same(*(x.state_dict() for x in merges))


@pytest.mark.parametrize("module", ["model.layers.0.input_layernorm", "input_layernorm", "norm"])
def test_whole_modules_of_one_layer_or_of_all_are_exported(module, checkpoint, tmp_path):
    ours = AutoLiger.from_hf(checkpoint)
    add_adapters(ours, 2, 4.0, targets=["q_proj"])
    train_whole(ours, [module], torch.float32)
    with torch.no_grad():
        for x in (p for p in ours.parameters() if p.requires_grad):
            x.add_(0.1)
    expected = loss_of(ours)
    export_adapter(ours, tmp_path, str(checkpoint), None)
    for model in (merged(ours), AutoLiger.from_hf(tmp_path)):
        torch.testing.assert_close(loss_of(model), expected, rtol=1e-5, atol=0)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"]
    assert saved == [{"norm": "model.norm"}.get(module, module)]  # PEFT's ends need no dot before


def test_only_linears_of_the_layers_get_adapters():
    torch.manual_seed(0)
    model = LigerLlama(tiny_config(tie_word_embeddings=False))
    add_adapters(model, 2, 4.0, targets=["layers.1.self_attn.v_proj"])
    adapted = {name for name, each in model.named_modules() if isinstance(each, LoraLinear)}
    assert adapted == {"layers.1.self_attn.qkv_proj"}
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {f"layers.1.self_attn.qkv_proj.lora_{end}" for end in "ab"}
    untouched = LigerLlama(tiny_config())
    with pytest.raises(ConfigError, match=r"'lm_head' is no linear .* down_proj, gate_proj, k_pr"):
        add_adapters(untouched, 2, 4.0, targets=["q_proj", "lm_head"])
    assert not any(isinstance(each, LoraLinear) for each in untouched.modules())
    assert all(parameter.requires_grad for parameter in untouched.parameters())


def test_a_linear_that_4_bits_cannot_hold_is_named(tmp_path):
    model = AutoLiger.from_hf(make_checkpoint(tmp_path, intermediate_size=97))
    with pytest.raises(ConfigError, match=r"load_in: layers.0.mlp.down_proj: .*in_features=97"):
        quantize(model, 4, torch.device("cpu"))
    quantize(model, 8, torch.device("cpu"))


def test_the_values_of_new_adapters_follow_from_the_seed(checkpoint):
    states = []
    for seed in (0, 0, 1):
        model = AutoLiger.from_hf(checkpoint)
        add_adapters(model, 2, 4.0, seed=seed)
        states.append(model.layers[0].mlp.down_proj.lora_a)
    assert states[0].equal(states[1]) and not states[0].equal(states[2])


@pytest.mark.parametrize("bits", [4, 8, "float8"])
def test_quantised_models_train_and_are_merged_into_the_checkpoints_weights(checkpoint, bits):
    exact = AutoLiger.from_hf(checkpoint)
    model = AutoLiger.from_hf(checkpoint)
    quantize(model, bits, torch.device("cpu"))
    assert {type(each.qkv_proj) for each in (layer.self_attn for layer in model.layers)} == {
        QuantizedLinear
    }
    torch.testing.assert_close(loss_of(model), loss_of(exact), rtol=0.01, atol=0)
    add_adapters(model, 2, 4.0)
    assert same(merged(model).state_dict(), exact.state_dict())


def test_adapters_that_overflow_are_not_exported(checkpoint, tmp_path):
    model = AutoLiger.from_hf(checkpoint, dtype=torch.float16)
    add_adapters(model, 2, 1e7, targets=["down_proj"])
    lora = model.layers[1].mlp.down_proj
    torch.nn.init.ones_(lora.lora_a), torch.nn.init.ones_(lora.lora_b)
    with pytest.raises(
        CheckpointError, match=r"model.layers.1.mlp.down_proj.weight holds .*torch.float16"
    ):
        merged(model)
    export_adapter(model, tmp_path, "base", None)
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    torch.nn.init.constant_(lora.lora_b, 1e6)
    with pytest.raises(SaveError, match=r"layers.1.mlp.down_proj.lora_B.weight .*torch.float16"):
        export_adapter(model, tmp_path, "base", torch.float16)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before


def test_adapters_are_not_added_to_weights_that_were_replaced(text, tmp_path, monkeypatch):
    base = make_checkpoint(tmp_path / "base")

    def replaced(model):
        file = base / "model.safetensors"
        save_file({name: -x if "norm" in name else x for name, x in load_file(file).items()}, file)
        return adapter_of(model)

    monkeypatch.setattr("ligermodels.training.finetune.adapter_of", replaced)
    with pytest.raises(CheckpointError, match="safetensors changed; restore it"):
        run(base, text, tmp_path / "run", max_steps=1, load_in="4bit", **LORA)


@pytest.mark.parametrize("family", sampled(families()))
def test_every_family_takes_adapters_on_quantised_linears(family):
    """With adapters on all linears, a model equals one with the sums as its weights."""
    torch.manual_seed(0)
    model = random_model(family)
    whole = copy.deepcopy(model)
    ids = torch.randint(VOCAB, (2, 9))
    add_adapters(model, 2, 4.0)
    adapters = {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}
    linears = {name for name, m in whole.layers.named_modules() if type(m) is torch.nn.Linear}
    for name, m in whole.layers.named_modules():
        linears |= {f"{name}.{end}" for end in STACKS if isinstance(m, Experts)}
    assert {f"layers.{name}" for name in linears} == adapters.keys()
    for adapter in adapters.values():
        torch.nn.init.normal_(adapter.lora_b, std=0.1)
    add_lora(dict(whole.named_parameters()), *adapter_of(model), whole.hf_map())
    torch.testing.assert_close(model(ids), whole(ids), rtol=1e-4, atol=1e-4)
    quantize(whole, 8, torch.device("cpu"))
    assert all(type(module_at(whole, name)) is QuantizedLinear for name in adapters)
    assert torch.isfinite(whole(ids)).all()


def test_dora_changes_nothing_at_first_in_bfloat16():
    torch.manual_seed(0)
    model, ids = LigerLlama(tiny_config()).bfloat16(), torch.arange(20).view(1, 20)
    before = model(ids)
    add_adapters(model, 4, 8.0, dora=True, dtype=torch.bfloat16)
    assert torch.equal(model(ids), before)


def test_dora_and_whole_modules_in_mixed_precision_with_a_plan(checkpoint, text, tmp_path):
    """The adapters and the modules are float32, the frozen weights and the export bfloat16."""
    given = {"lora_r": 4, "lora_dora": True, "modules_to_save": ["embed_tokens", "norm"]}
    mixed = {"precision": "bf16-mixed", "memory": "1GiB", "max_steps": 8, **RATE}
    done = run(checkpoint, text, tmp_path / "run", **given, **mixed)
    assert done.eval_after["eval_perplexity"] < 0.5 * done.eval_before["eval_perplexity"]
    assert {x.dtype for x in tensors(done.model_dir).values()} == {torch.bfloat16}
    assert AutoLiger.from_hf(done.model_dir).norm.weight.ne(1).any()
