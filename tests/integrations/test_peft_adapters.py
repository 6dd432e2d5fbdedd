"""Every method of PEFT does on a native model what it does on transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig

from ligermodels import AutoLiger, families
from ligermodels.errors import ConfigError, SaveError
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.integrations.peft_adapters import get_peft_model, load_peft_model
from tests.integrations.tiny import ids, theirs

# The arguments with which a method works on a model of 48 features, beside its defaults.
VIRTUAL = {"num_virtual_tokens": 3}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 16},
    "CARTRIDGE": VIRTUAL,
    # A type of tokens that is a multiple of 4 is a label.
    "CPT": {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 4]},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": VIRTUAL | {"num_tasks": 2},
    "PREFIX_TUNING": VIRTUAL,
    "PROMPT_TUNING": VIRTUAL,
    "P_TUNING": VIRTUAL | {"encoder_hidden_size": 8},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 5]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 20},
}
CALLS: dict[str, dict[str, Any]] = {
    name: {"task_ids": torch.tensor([0, 0])} for name in ("POLY", "MULTITASK_PROMPT_TUNING")
}
# They take the insides of transformers' models.
WITHOUT_US = ("ADAPTION_PROMPT", "SHADOW")
IN_THE_SUITE = {"LORA", "IA3", "LN_TUNING", "PREFIX_TUNING"}
METHODS = [
    kind.name if kind.name in IN_THE_SUITE else pytest.param(kind.name, marks=pytest.mark.long)
    for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    if kind.name not in WITHOUT_US
]


def pair(folder: Path, config: Any, wrap: Any = get_peft_model, **options: Any) -> tuple[Any, Any]:
    """Return a native and a transformers model with the same adapter, which is not zero."""
    hf, wrapper = theirs(folder, **options), LigerForCausalLM.from_pretrained(folder, **options)
    torch.manual_seed(0)
    expected = peft.get_peft_model(hf, config)
    torch.manual_seed(0)
    ours = wrap(wrapper, type(config)(**config.to_dict()))
    mine = dict(ours.named_parameters())
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in expected.named_parameters():
            if weight.requires_grad:
                mine[name].copy_(weight.add_(0.05 * torch.randn_like(weight)))
        buffers = dict(ours.named_buffers())
        for name, buffer in expected.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffers[name].copy_(buffer)
    return ours.eval(), expected.eval()


def with_two_adapters(folder: Path) -> dict[str, Any]:
    """Return the arguments of X-LoRA, which mixes adapters that are there already."""
    for number in "01":
        hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(int(number))
        config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
        peft.get_peft_model(hf, config).save_pretrained(folder / number)
    return {"hidden_size": 48, "adapters": {number: str(folder / number) for number in "01"}}


def compare_gradients(*models: Any) -> None:
    mine, hf = (
        {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
        for model in models
    )
    assert mine.keys() == hf.keys()
    for name, gradient in hf.items():
        if gradient is not None:
            scale = gradient.abs().max().item()
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-5 * scale)


def compare(ours: Any, expected: Any, **call: Any) -> None:
    """Compare losses, gradients of the adapters, greedy continuations and state dicts."""
    call = {"attention_mask": torch.ones_like(ids()), **call}
    losses = []
    for model in (ours, expected):
        torch.manual_seed(2)
        losses.append(model(input_ids=ids(), labels=ids(), **call).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    compare_gradients(ours, expected)
    kept = {"max_new_tokens": 3, "pad_token_id": 2, **call}
    made = []
    for model in (ours, expected):
        torch.manual_seed(2)
        made.append(model.generate(input_ids=ids(), **kept))
    assert torch.equal(*made)
    keys = [peft.get_peft_model_state_dict(model).keys() for model in (ours, expected)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("method", METHODS)
def test_method(method: str, folders: dict[str, Path]) -> None:
    if method == "ADAMSS":
        pytest.importorskip("sklearn")
    kind = peft.PeftType[method]
    arguments = ARGUMENTS.get(method, {})
    if method == "XLORA":
        arguments = with_two_adapters(folders["llama"])
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", **arguments)
    # X-LoRA asks for no cache.
    ours, expected = pair(folders["llama"], config, use_cache=method != "XLORA")
    if method == "CPT":  # it computes a loss of its own from the logits
        ours.train(), expected.train()
    compare(ours, expected, **CALLS.get(method, {}))


PATTERNS: dict[str, Any] = {
    "target_modules": ["q_proj", "k_proj", "gate_proj"],
    "rank_pattern": {"k_proj": 3},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 5},
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", PATTERNS | {"use_rslora": True}),
        ("gemma2", {"target_modules": ["embed_tokens", "v_proj"]}),
    ],
    ids=["patterns", "embedding"],
)
def test_lora(
    family: str, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    ours, expected = pair(folders[family], LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    compare(ours, expected)
    # The adapter opens on the other model, and merged models are equal.
    ours.save_pretrained(tmp_path / "ours")
    expected.save_pretrained(tmp_path / "theirs")
    hf, wrapper = theirs(folders[family]), LigerForCausalLM.from_pretrained(folders[family])
    there = peft.PeftModel.from_pretrained(hf, str(tmp_path / "ours"))
    here = load_peft_model(wrapper, str(tmp_path / "theirs"))
    logits = expected(input_ids=ids()).logits
    assert torch.equal(there(input_ids=ids()).logits, logits)
    torch.testing.assert_close(here(input_ids=ids()).logits, logits, rtol=1e-5, atol=1e-5)
    here.merge_and_unload().save_pretrained(tmp_path / "merged")
    # A merge into a tied embedding changes the head as well, so the logits are others then.
    logits = expected.merge_and_unload()(ids()).logits
    again = theirs(tmp_path / "merged")
    torch.testing.assert_close(again(ids()).logits, logits, rtol=1e-5, atol=1e-4)


def in_the_decoder(model: Any, config: Any) -> Any:
    peft.get_peft_model(model.model, config)
    return model


def within_another(model: Any, config: Any) -> Any:
    peft.get_peft_model(torch.nn.Sequential(model), config)
    return model


def through_transformers(model: Any, config: Any) -> Any:
    model.add_adapter(config)
    return model


def as_the_second(model: Any, config: Any) -> Any:
    wrap = get_peft_model if isinstance(model, LigerForCausalLM) else peft.get_peft_model
    adapted = wrap(model, LoraConfig(target_modules=["o_proj"]))
    adapted.add_adapter("second", config)
    adapted.set_adapter("second")
    return adapted


WAYS: dict[str, Any] = {
    "get_peft_model": peft.get_peft_model,
    "ours": get_peft_model,
    "inject_adapter_in_model": lambda model, config: peft.inject_adapter_in_model(config, model),
    "add_adapter": through_transformers,
    "decoder": in_the_decoder,
    "another module": within_another,
    "second": as_the_second,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all linears": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.1\..*_proj"},
    "all biases": {"target_modules": ["o_proj"], "bias": "all"},
    "biases of adapters": {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
    "saved mlp": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
    "saved layer": {"target_modules": r".*\.0\..*q_proj", "modules_to_save": ["layers.1"]},
    "saved projection": {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]},
    "ranks": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 3}},
    "parameters": {"target_modules": [], "target_parameters": ["q_proj.weight", "up_proj.weight"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["v_proj"]},
}
CASES = [(way, "all linears") for way in WAYS]
CASES += [(("get_peft_model", "ours")[i % 2], name) for i, name in enumerate([*OPTIONS][1:])]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_every_way_trains_and_saves_what_it_does_on_hfs_model(
    way: str, name: str, folders: dict[str, Path]
) -> None:
    """The projections are split wherever PEFT is at work; qwen2 has biases in some of them."""
    if way == "decoder":
        name = "regex"  # PEFT takes the last module for the head, and leaves it out of "all-linear"
    made, saved = [], []
    for load in (LigerForCausalLM.from_pretrained, theirs):
        model = load(folders["qwen2"])
        torch.manual_seed(0)
        config = LoraConfig(**{"r": 2, "init_lora_weights": False, **OPTIONS[name]})
        made.append(WAYS[way](model, config).eval())
        if isinstance(made[-1], peft.PeftModel):
            adapter = "second" if way == "second" else "default"
            saved.append(peft.get_peft_model_state_dict(made[-1], adapter_name=adapter))
        made[-1](input_ids=ids(), labels=ids()).loss.backward()
    compare_gradients(*made)
    logits = [model(input_ids=ids()).logits for model in made]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    if saved:
        assert saved[0].keys() == saved[1].keys()
        assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["qkv_proj", "o_proj"]},
        {"target_modules": ["o_proj"], "modules_to_save": ["mlp.gate_up_proj"]},
        {"target_modules": ["o_proj"], "target_parameters": ["self_attn.qkv_proj.weight"]},
        {"target_modules": ["o_proj"], "rank_pattern": {"qkv_proj": 2}},
    ],
)
def test_names_of_packed_projections_are_refused(
    options: dict[str, Any], folders: dict[str, Path]
) -> None:
    """PEFT adapts what else it finds, and says nothing."""
    words = r"adapter '(default|b)' names .*(qkv|gate_up)_proj, which HF's model does not have"
    with pytest.raises(ConfigError, match=words):
        get_peft_model(LigerForCausalLM.from_pretrained(folders["llama"]), LoraConfig(**options))
    wrapper = LigerForCausalLM.from_pretrained(folders["llama"])
    adapted = get_peft_model(wrapper, LoraConfig(target_modules=["o_proj"]))
    with pytest.raises(ConfigError, match=words):
        adapted.add_adapter("b", LoraConfig(**options))


EXPERTS = {
    "modules": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "one": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    "both": {
        "target_modules": ["v_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "use_rslora": True,
    },
}


@pytest.mark.parametrize(
    ("wrap", "name"),
    [(get_peft_model, "modules"), (get_peft_model, "one"), (peft.get_peft_model, "both")],
    ids=[*EXPERTS],
)
def test_adapters_of_experts(wrap: Any, name: str, folders: dict[str, Path], tmp_path) -> None:
    """PEFT adapts whole parameters of all experts, also where target_modules names projections."""
    ours, expected = pair(folders["qwen3_moe"], LoraConfig(r=3, **EXPERTS[name]), wrap)
    losses = [model(input_ids=ids(), labels=ids()).loss for model in (ours, expected)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    compare_gradients(ours, expected)
    saved = [peft.get_peft_model_state_dict(model) for model in (ours, expected)]
    assert saved[0].keys() == saved[1].keys()
    logits = ours(input_ids=ids()).logits
    ours.save_pretrained(tmp_path / "adapter")
    with ours.disable_adapter():
        base = ours(input_ids=ids()).logits
    plain = LigerForCausalLM.from_pretrained(folders["qwen3_moe"])
    torch.testing.assert_close(base, plain(input_ids=ids()).logits)
    again = load_peft_model(plain, str(tmp_path / "adapter"))
    torch.testing.assert_close(again(input_ids=ids()).logits, logits)
    merged = ours.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids()).logits, logits, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    exported = LigerForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(exported(input_ids=ids()).logits, logits, rtol=1e-4, atol=1e-5)


def test_adapters_of_experts_that_alternate_are_refused() -> None:
    """In gpt-oss's parameters, gate and up alternate, and PEFT would add to other rows."""
    cls = families()["gpt_oss"]
    for wrap in (get_peft_model, peft.get_peft_model):
        wrapper = LigerForCausalLM.from_native(cls(cls.config_class.small()))
        config = LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
        with pytest.raises(ConfigError, match=r"adapts model\.layers\.0\.mlp\.down_proj, which"):
            wrap(wrapper, config)


def test_repeated_layers_need_split_projections(folders: dict[str, Path]) -> None:
    """PEFT copies layers before it looks for projections."""
    config = LoraConfig(target_modules=["q_proj"], layer_replication=[[0, 1], [0, 1]])
    with pytest.raises(ConfigError, match="layer_replication of PEFT has repeated blocks"):
        peft.get_peft_model(LigerForCausalLM.from_pretrained(folders["llama"]), config)
    wrapper = LigerForCausalLM.from_pretrained(folders["llama"], split_projections=True)
    losses = [
        peft.get_peft_model(model, config)(input_ids=ids(), labels=ids(), use_cache=False).loss
        for model in (wrapper, theirs(folders["llama"]))
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


def test_projections_without_adapter_stay_packed(folders: dict[str, Path]) -> None:
    model = LigerForCausalLM.from_native(AutoLiger.from_hf(folders["llama"]))
    expected = model(input_ids=ids()).logits
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    assert adapted.active_adapter == "default"
    names = {name.rpartition(".")[2] for name, _ in adapted.named_modules()}
    assert {"q_proj", "k_proj", "v_proj", "gate_up_proj"} <= names and "up_proj" not in names
    adapted(input_ids=ids())
    torch.testing.assert_close(adapted.unload()(input_ids=ids()).logits, expected)


@pytest.mark.parametrize(
    "targets, message",
    [
        ({"q_proj"}, r"no place for 4 tensors .*v_proj\.lora_A"),
        ({"q_proj", "v_proj", "o_proj"}, r"4 tensors that the config names .*o_proj\.lora_A"),
    ],
)
def test_an_adapter_is_not_loaded_in_part(
    targets: set[str], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT loads the other tensors, and transformers only warns."""
    _, expected = pair(folders["llama"], LoraConfig(task_type="CAUSAL_LM", r=4))
    expected.save_pretrained(tmp_path)
    config = peft.PeftConfig.from_pretrained(tmp_path)
    config.target_modules = targets
    config.save_pretrained(tmp_path)
    for load in (load_peft_model, lambda wrapper, path: wrapper.load_adapter(path)):
        wrapper = LigerForCausalLM.from_pretrained(folders["llama"])
        before = wrapper(ids()).logits
        with pytest.raises(ConfigError, match=message):
            load(wrapper, str(tmp_path))
        assert torch.equal(wrapper(ids()).logits, before)
    with pytest.raises(ConfigError, match=message):
        LigerForCausalLM.from_pretrained(tmp_path)  # loads the model that the adapter names


def test_a_replaced_embedding_is_not_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """PEFT unties the head then, and the checkpoint holds both weights."""
    config = LoraConfig(task_type="CAUSAL_LM", modules_to_save=["embed_tokens"])
    ours, expected = pair(folders["gemma2"], config)
    logits = expected(input_ids=ids()).logits
    torch.testing.assert_close(ours(input_ids=ids()).logits, logits, rtol=1e-5, atol=1e-5)
    merged = ours.merge_and_unload()
    walked = dict(merged.hf_named_parameters())
    assert torch.equal(walked["lm_head.weight"], merged.lm_head.weight)
    merged.save_pretrained(tmp_path)
    again = theirs(tmp_path)
    torch.testing.assert_close(again(ids()).logits, logits, rtol=1e-5, atol=1e-4)


def test_adapters_through_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    """`add_adapter` and `load_adapter` are methods of every model of transformers.

    The folder of an adapter names its model, and PEFT's own loader splits packed projections.
    """
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"])
    _, expected = pair(folders["llama"], config)
    expected.save_pretrained(tmp_path)
    logits = expected(input_ids=ids()).logits
    wrapper = LigerForCausalLM.from_pretrained(folders["llama"])
    wrapper.load_adapter(str(tmp_path))
    by_its_folder = LigerForCausalLM.from_pretrained(tmp_path)
    packed = LigerForCausalLM.from_pretrained(folders["llama"])
    for loaded in (wrapper, by_its_folder, peft.PeftModel.from_pretrained(packed, str(tmp_path))):
        found = loaded.eval()(input_ids=ids()).logits
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


def test_the_walk_of_tensors_has_merged_adapters(folders: dict[str, Path]) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "o_proj"])
    ours, expected = pair(folders["llama"], config)
    wrapper = ours.get_base_model()
    with pytest.raises(SaveError, match=r"has an adapter that is not merged.*call merge_adapter"):
        dict(wrapper.hf_named_parameters())
    ours.merge_adapter()
    walked = {name: weight.clone() for name, weight in wrapper.hf_named_parameters()}
    ours.unmerge_adapter()
    merged = expected.merge_and_unload().state_dict()
    assert walked.keys() == merged.keys()
    for name, weight in walked.items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-5, atol=1e-5)
    saved = LoraConfig(task_type="CAUSAL_LM", modules_to_save=["norm"])
    ours, _ = pair(folders["llama"], saved)
    ours.merge_adapter()
    with pytest.raises(
        SaveError, match=r"norm.weight is not among .*for one of PEFT call merge_and_unload"
    ):
        dict(ours.get_base_model().hf_named_parameters())


def test_a_native_model_needs_its_wrapper(folders: dict[str, Path]) -> None:
    native = AutoLiger.from_hf(folders["llama"])
    for make, what in ((get_peft_model, LoraConfig(task_type="CAUSAL_LM")), (load_peft_model, "x")):
        with pytest.raises(ConfigError, match=r"native model.*LigerForCausalLM.from_native\(model"):
            make(native, what)
