"""Loading models and saving them: dtypes, files, own architectures, and what cannot be saved."""

import copy
import dataclasses
import enum
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ligermodels import (
    AutoLiger,
    CheckpointError,
    ConfigError,
    LigerLlama,
    LlamaConfig,
    SaveError,
    load_pretrained,
    register,
)
from ligermodels.converters.verify import compare, verify
from ligermodels.layers import Attention, DecoderBlock, GatedMLP, LossHead, RMSNorm, RotaryEmbedding
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.shard import read_slices

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LigerLlama:
    torch.manual_seed(0)
    model = LigerLlama(LlamaConfig(**{**SIZES, **changes})).to(dtype)
    model.save_hf(folder)
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            result |= {name: file.get_tensor(name) for name in file.keys()}
    return result


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_stored_head_that_differs_from_the_tied_embedding_is_refused(
    tmp_path: Path, device: str
) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    held = tensors(tmp_path)
    for change in (0, 1):
        head = held["model.embed_tokens.weight"] + change
        save_file(held | {"lm_head.weight": head}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="differs") if change else nullcontext():
            model = LigerLlama.from_hf(tmp_path, device=device)
            if device == "meta":  # A rank allocates its parameters before it reads them.
                read_slices(model.to_empty(device="cpu"))


def test_the_dtype_of_a_load_and_of_its_export(tmp_path: Path) -> None:
    saved(tmp_path)
    for asked, dtype in (
        (None, torch.bfloat16),
        ("auto", torch.bfloat16),
        (torch.float32, torch.float32),
        ("torch.float16", torch.float16),
        ("fp32", torch.float32),
    ):
        model = AutoLiger.from_hf(tmp_path, dtype=asked)
        assert {p.dtype for p in model.parameters()} == {dtype}, asked
        model.half().save_hf(tmp_path / "half")
        config = json.loads((tmp_path / "half" / "config.json").read_text())
        assert config["torch_dtype"] == config["dtype"] == "float16"
    for wrong in (torch.int8, torch.float8_e4m3fn, "int8", "float"):
        with pytest.raises(ValueError, match=r"dtype is .*; expected one of \[torch.float64"):
            LigerLlama.from_hf(tmp_path, dtype=wrong)


def test_wrong_arguments_name_the_right_ones(tmp_path: Path) -> None:
    saved(tmp_path)
    for device in ("auto", "cuda:999", None):
        said = rf"device is {device!r}, which cannot be used .* expected one of 'cpu', 'meta'"
        with pytest.raises(ValueError, match=said):
            LigerLlama.from_hf(tmp_path, device=device)
    for given, meant in (("torch_dtype", "dtype"), ("device_map", "device")):
        with pytest.raises(TypeError, match=f"argument '{given}'; did you mean '{meant}'"):
            AutoLiger.from_hf(tmp_path, **{given: "auto"})


def test_projections_of_two_dtypes_need_a_choice(tmp_path: Path) -> None:
    saved(tmp_path, torch.float32)
    file, held = tmp_path / "model.safetensors", tensors(tmp_path)
    held["model.norm.weight"] = held["model.norm.weight"].double()  # a norm may have another dtype
    save_file(held, file, metadata={"format": "pt"})
    assert LigerLlama.from_hf(tmp_path).norm.weight.dtype == torch.float64
    for name in ("model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        save_file(held | {name: held[name].bfloat16()}, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"{name}' is stored in bfloat16, but .*dtype="):
            LigerLlama.from_hf(tmp_path)
        LigerLlama.from_hf(tmp_path, dtype=torch.float32)


def replace_with(name: str, change: Any) -> Any:
    """Return a function that changes the weight of one module of a model."""

    def damage(model: LigerLlama) -> None:
        module = model.get_submodule(name)
        module.weight = torch.nn.Parameter(change(module.weight.detach()))

    return damage


class Quantised(torch.Tensor):
    pass


def wrap(model: LigerLlama) -> None:
    model.layers[0].mlp.down_proj = torch.nn.Sequential(model.layers[0].mlp.down_proj)


def grow(model: LigerLlama) -> None:
    model.embed_tokens = torch.nn.Embedding(98, 48)


def set_nan(model: LigerLlama) -> None:
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")


def divide(model: LigerLlama) -> None:
    """As DeepSpeed's ZeRO-3: leave an empty tensor, with the attributes ds_id and ds_status."""
    status = enum.Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE"])
    weight: Any = model.norm.weight
    weight.data, weight.ds_id, weight.ds_status = torch.empty(0), 7, status.NOT_AVAILABLE


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (wrap, r"down_proj.*merge_and_unload"),
        (grow, r"embed_tokens.weight.*\(98, 48\).*\(97, 48\)"),
        (set_nan, r"'layers.1.mlp.down_proj.weight' .*allow_nonfinite=True"),
        (divide, r"'norm.weight' is divided .* ZeRO-3; .*GatheredParam"),
        (lambda model: model.to("meta"), "meta device"),
        (
            replace_with("embed_tokens", lambda x: x.float().to_sparse()),
            r"'embed_tokens.weight' is a Parameter of torch.sparse_coo, not a plain",
        ),
        (
            replace_with("layers.0.mlp.down_proj", lambda x: x.as_subclass(Quantised)),
            r"'layers.0.mlp.down_proj.weight' is a Quantised of torch.strided, not a plain",
        ),
        (
            lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
            r"config.rms_norm_eps is 0.001.*built with 1e-06",
        ),
    ],
)
def test_a_model_that_no_checkpoint_can_hold_is_not_saved(
    tmp_path: Path, damage: Any, complaint: str
) -> None:
    model = saved(tmp_path / "a")
    before = tensors(tmp_path / "a")
    damage(model)
    with pytest.raises(SaveError, match=complaint):
        model.save_hf(tmp_path / "a")
    after = tensors(tmp_path / "a")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_config_may_change_where_the_weights_do_not_depend_on_it(tmp_path: Path) -> None:
    model = saved(tmp_path)
    model.config.eos_token_id = [1, 2]
    model.config.max_position_embeddings = 77  # plain rope does not use it
    model.save_hf(tmp_path)
    again = LlamaConfig.from_hf(tmp_path)
    assert again.max_position_embeddings == 77 and again.eos_token_id == [1, 2]
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = LigerLlama(dataclasses.replace(model.config, rope_scaling=scaling, extra={}))
    model.config.max_position_embeddings = 99
    with pytest.raises(SaveError, match=r"max_position_embeddings is 99.*built with 77"):
        model.save_hf(tmp_path)


def test_heads_that_are_tied_by_hand(tmp_path: Path) -> None:
    """An untied config saves both names; a head of an embedding that was replaced is refused."""
    model = saved(tmp_path)
    model.head.proj.weight = model.embed_tokens.weight
    model.save_hf(tmp_path)
    again = LigerLlama.from_hf(tmp_path)
    assert torch.equal(again.head.proj.weight, again.embed_tokens.weight)
    # peft's modules_to_save trains a copy of the embedding, which merging puts in its place.
    model = LigerLlama(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.embed_tokens = copy.deepcopy(model.embed_tokens)
    with pytest.raises(SaveError, match=r"'head' is tied to an embedding .* no longer .*head.tie"):
        model.save_hf(tmp_path)
    model.head.tie(model.embed_tokens)
    model.save_hf(tmp_path)


def test_a_save_writes_the_tokenizer_files_that_were_there_at_the_load(tmp_path: Path) -> None:
    source, templates = tmp_path / "a", "additional_chat_templates/rag.jinja"
    saved(source)
    (source / templates).parent.mkdir()
    files = {"tokenizer.json": b"1\r\n", "vocab.json": b"\0", templates: b"{{ x }}"}
    for name, content in files.items():
        (source / name).write_bytes(content)
    model = copy.deepcopy(LigerLlama.from_hf(source))
    shutil.rmtree(source)
    model.save_hf(tmp_path / "b")
    assert {name: (tmp_path / "b" / name).read_bytes() for name in files} == files
    model.source.files = {}
    model.save_hf(tmp_path / "c")
    written = {path.name for path in (tmp_path / "c").iterdir()}
    assert written == {"config.json", "model.safetensors"}


class OwnConfig(LlamaConfig):
    model_type = "own"


class Own(DecoderModel):
    """An architecture without a weight map, whose constructor computes a buffer."""

    config_class = OwnConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)

        def block(i: int) -> DecoderBlock:
            attention = Attention(48, 3, 1, layer_index=i)
            return DecoderBlock(attention, GatedMLP(48, 56), RMSNorm(48), RMSNorm(48))

        self.embed_tokens = torch.nn.Embedding(97, 48)
        self.rotary_emb = RotaryEmbedding(16, config.rope_theta)
        self.layers = torch.nn.ModuleList(map(block, range(2)))
        self.norm = RMSNorm(48)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LossHead(48, 97, tied_to=tied_to)
        self.initialize_weights()
        self.scale = torch.nn.Parameter(torch.ones(2, 3, 4))
        slopes = torch.nn.init.constant_(torch.empty(3, device="cpu"), 0.3)
        self.norm.register_buffer("slopes", slopes, persistent=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("registry")
def test_an_own_architecture_is_saved_and_loaded_with_its_config(
    tmp_path: Path, tied: bool
) -> None:
    torch.manual_seed(0)
    config = OwnConfig(**SIZES, tie_word_embeddings=tied, rope_theta=77.0)
    model = Own(config)
    weights = dict(model.named_parameters())
    for weight in weights.values():
        weight.data = weight.data.bfloat16()
    model.save_hf(tmp_path, max_shard_size=20000)
    assert tensors(tmp_path).keys() == weights.keys()
    register(Own)
    loaded = AutoLiger.from_hf(tmp_path)
    on_meta = Own.from_hf(tmp_path, device="meta").to_empty(device="cpu")
    read_slices(on_meta)
    for again in (loaded, on_meta):
        assert type(again) is Own and again.config.rope_theta == 77.0
        assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())
        assert torch.equal(again.norm.slopes, torch.full((3,), 0.3))
    half = Own.from_hf(tmp_path, dtype=torch.float16)
    assert half.norm.slopes.dtype == torch.float32 and half.scale.dtype == torch.float16
    assert len(load_pretrained(Own(config), tmp_path).loaded) == len(weights)


def test_a_config_that_was_copied_from_another_family_is_saved_as_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "llama", rope_theta=77.0)
    llama = LlamaConfig.from_hf(tmp_path / "llama")
    fields = {field.name: getattr(llama, field.name) for field in dataclasses.fields(llama)}
    Own(OwnConfig(**fields)).save_hf(tmp_path / "own")
    again = Own.from_hf(tmp_path / "own").config
    assert (again.rope_theta, again.extra["model_type"]) == (77.0, "own")
    assert again.extra["architectures"] == ["OwnForCausalLM"]


def share(model: Any) -> None:
    model.layers[1].self_attn.o_proj.weight = model.layers[0].self_attn.o_proj.weight


def overlapping(config: LlamaConfig) -> Any:
    """Return Llama's weight map with two spans of one parameter at the same row."""
    found = LigerLlama.weight_map(config)
    entries = {entry.name: entry for entry in found.entries}
    packed = entries["layers.0.self_attn.qkv_proj.weight"]
    q, k, v = packed.spans
    packed = dataclasses.replace(packed, spans=(q, dataclasses.replace(k, row=k.row - 1), v))
    return dataclasses.replace(found, entries=tuple((entries | {packed.name: packed}).values()))


@pytest.mark.parametrize(
    ("base", "fields", "change", "complaint"),
    [
        (Own, {"config_class": LlamaConfig}, None, "model_type 'llama' belongs to LigerLlama"),
        (Own, {}, share, r"'layers.0.* and 'layers.1.*o_proj.* are one parameter"),
        (
            Own,
            {},
            lambda model: setattr(model, "scale", torch.nn.Parameter(torch.ones(()))),
            r"'scale' has no dimension; give it the shape \(1,\)",
        ),
        (
            Own,
            {},
            lambda model: model.register_buffer("mean", torch.zeros(3)),
            "'mean' is a buffer; register it with persistent=False",
        ),
        (
            LigerLlama,
            {},
            lambda model: model.norm.register_buffer("seen", torch.zeros(3)),
            r"Changed: .*'norm\.seen' .*persistent=False",
        ),
        (
            LigerLlama,
            {},
            lambda model: setattr(model.norm, "others", torch.ones(3)),
            r"'norm\.others' is a tensor, but no buffer.*register_buffer\('others'",
        ),
        (
            LigerLlama,
            {"weight_map": staticmethod(overlapping)},
            None,
            r"Changed: weight map: entry 'layers.0.*used twice",
        ),
        (
            DecoderModel,
            {"make_block": LigerLlama.make_block},
            lambda model: model.build(norm=RMSNorm(48)),
            r"Changed does not declare LlamaConfig.*state_dict",
        ),
    ],
)
def test_a_class_whose_models_no_checkpoint_can_hold_is_refused(
    tmp_path: Path, base: Any, fields: dict[str, Any], change: Any, complaint: str
) -> None:
    def construct(model: Any, config: LlamaConfig) -> None:
        base.__init__(model, config)
        if change is not None:
            change(model)

    cls: Any = type("Changed", (base,), {**fields, "__init__": construct})
    config = getattr(cls, "config_class", LlamaConfig)(**SIZES)
    with pytest.raises((ConfigError, SaveError), match=complaint):
        if base is not DecoderModel:  # which declares no config_class
            cls.on_meta(config)  # as a load makes it
        cls(config).save_hf(tmp_path / "out")
    assert not (tmp_path / "out").exists()


class WithConstants(LigerLlama):
    @staticmethod
    def weight_map(config: LlamaConfig) -> Any:
        found = LigerLlama.weight_map(config)
        given = {"layers.1.beta": torch.tensor(0.501), "new": torch.eye(2) > 0}
        return dataclasses.replace(found, ignored=(*found.ignored, ".mask"), constants=given)


def test_constants_that_the_weight_map_ignores_are_saved_as_they_were(tmp_path: Path) -> None:
    """In one file and in shards, also those of dtypes that no parameter has."""
    source, out = tmp_path / "a", tmp_path / "b"
    WithConstants(LlamaConfig(**SIZES)).save_hf(source)
    held = tensors(source)
    assert held["layers.1.beta"] == torch.tensor(0.501) and held.pop("new").equal(torch.eye(2) > 0)
    constants = {
        "layers.0.rotary_emb.inv_freq": torch.rand(8),
        "layers.0.mask": torch.ones(3, 1).tril().bool(),
        "layers.1.beta": torch.tensor(0.5, dtype=torch.float64),
        "layers.1.mask": torch.full((2, 2), float("-inf"), dtype=torch.bfloat16),
    }
    expected = held | constants
    save_file(expected, source / "model.safetensors", {"format": "pt"})
    assert verify(source, WithConstants).ok
    model = WithConstants.from_hf(source, dtype=torch.float16)
    for shard in (8000, 5 * 10**9):
        model.save_hf(out, max_shard_size=shard)
        found = tensors(out)
        assert found.keys() == expected.keys() | {"new"}
        for name, constant in constants.items():
            assert found[name].dtype == constant.dtype and torch.equal(found[name], constant), name
        assert compare(source, out, WithConstants, dtype=torch.float16).ok
    del expected["layers.1.beta"]
    save_file(expected, out / "model.safetensors", {"format": "pt"})
    assert compare(source, out, WithConstants).differences[0] == "layers.1.beta: differs"
    for wrong in (torch.tensor(0.6), torch.tensor([0.501]), torch.tensor(1).to(torch.float8_e5m2)):
        save_file(expected | {"layers.1.beta": wrong}, out / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"'layers.1.beta' does not .* map, 0\.50"):
            WithConstants.from_hf(out)
