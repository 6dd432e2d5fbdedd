"""Loading models and saving them: dtypes, round trips, and models that cannot be saved."""

import copy
import dataclasses
import enum
import json
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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
from ligermodels.converters.weight_map import WeightMap
from ligermodels.layers import Attention, DecoderBlock, GatedMLP, LossHead, RMSNorm, RotaryEmbedding
from ligermodels.models import auto, hf_io
from ligermodels.models.base import DecoderModel

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes) -> LigerLlama:
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


@pytest.mark.parametrize(("tied", "shard"), [(False, 8000), (True, 5 * 10**9)])
def test_round_trip_is_bitwise(tmp_path: Path, tied: bool, shard: int) -> None:
    model = saved(tmp_path / "a", tie_word_embeddings=tied)
    again = AutoLiger.from_hf(tmp_path / "a")
    again.save_hf(tmp_path / "b", max_shard_size=shard)
    assert (tmp_path / "b" / "model.safetensors.index.json").exists() == (shard < 10**9)
    first, second = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert first.keys() == second.keys()
    assert ("lm_head.weight" in first) != tied
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), second[name].view(torch.int16)), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


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
                model.to_empty(device="cpu").read_parts()


def test_dtype_is_the_checkpoints_unless_asked(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    assert LigerLlama.from_hf(tmp_path / "a").norm.weight.dtype == torch.bfloat16
    wide = LigerLlama.from_hf(tmp_path / "a", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    wide.save_hf(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "float32"


def test_a_dtype_that_no_parameter_has_is_refused(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    saved(tmp_path / "a")
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, "int8", "float"):
        with subtests.test(str(dtype)):
            with pytest.raises(ValueError, match=r"dtype is .*; expected one of \[torch.float64"):
                LigerLlama.from_hf(tmp_path / "a", dtype=dtype)


def test_a_model_converted_after_loading_says_so_in_its_export(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    LigerLlama.from_hf(tmp_path / "a").half().save_hf(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "float16"


def test_saving_onto_the_source_folder(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    model = LigerLlama.from_hf(tmp_path / "a")
    with torch.no_grad():
        model.norm.weight.add_(1)
    model.save_hf(tmp_path / "a")
    assert torch.equal(LigerLlama.from_hf(tmp_path / "a").norm.weight, model.norm.weight)


def test_a_wrapped_projection_is_not_saved(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    layer = model.layers[0].mlp
    layer.down_proj = torch.nn.Sequential(layer.down_proj)
    with pytest.raises(SaveError, match=r"down_proj.*merge_and_unload"):
        model.save_hf(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_class_without_the_configs_family_is_not_saved(tmp_path: Path) -> None:
    class Mine(DecoderModel):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            model = LigerLlama(config)
            for name, part in model.named_children():
                setattr(self, name, part)
            self.layers[0].self_attn.sliding_window = 4

    model = Mine(LlamaConfig(**SIZES))
    with pytest.raises(SaveError, match=r"Mine does not declare LlamaConfig.*state_dict"):
        model.save_hf(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_shape_that_the_config_contradicts_is_not_saved(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    model.embed_tokens = torch.nn.Embedding(98, 48)
    with pytest.raises(SaveError, match=r"embed_tokens.weight.*\(98, 48\).*\(97, 48\)"):
        model.save_hf(tmp_path / "b")


def test_a_meta_model_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = LigerLlama(LlamaConfig(**SIZES))
    with pytest.raises(SaveError, match="meta device"):
        model.save_hf(tmp_path / "b")


def test_another_family_is_refused_by_both_loads(tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    for load in (AutoLiger.from_hf, LigerLlama.from_hf):
        with pytest.raises(ConfigError, match=r"config\.json.*mamba"):
            load(tmp_path)


def test_a_config_that_contradicts_the_model_is_not_saved(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    model.config.rms_norm_eps = 1e-3
    with pytest.raises(SaveError, match=r"config.rms_norm_eps is 0.001.*built with 1e-06"):
        model.save_hf(tmp_path / "b")
    model.config.rms_norm_eps = 1e-6
    model.config.eos_token_id = [1, 2]
    model.save_hf(tmp_path / "b")
    assert LigerLlama.from_hf(tmp_path / "b").config.eos_token_id == [1, 2]


@pytest.mark.parametrize("rope", ["dynamic", "yarn"])
def test_a_save_refuses_a_changed_length_that_rope_uses(tmp_path: Path, rope: str) -> None:
    model = saved(tmp_path / "a")
    model.config.max_position_embeddings = 77  # plain rope does not use it
    model.save_hf(tmp_path / "b")
    assert LlamaConfig.from_hf(tmp_path / "b").max_position_embeddings == 77
    scaling = {"rope_type": rope, "factor": 2.0}
    model = LigerLlama(dataclasses.replace(model.config, rope_scaling=scaling, extra={}))
    model.config.max_position_embeddings = 99
    with pytest.raises(SaveError, match=r"max_position_embeddings is 99.*built with 77"):
        model.save_hf(tmp_path / "c")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_projections_of_two_dtypes_need_a_choice(tmp_path: Path, name: str) -> None:
    saved(tmp_path, torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    # A norm may have another dtype.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, file, metadata={"format": "pt"})
    assert LigerLlama.from_hf(tmp_path).norm.weight.dtype == torch.float64
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"{name}.weight' is stored in bfloat16, but .*dtype="
    ):
        LigerLlama.from_hf(tmp_path)
    model = LigerLlama.from_hf(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_tied_by_hand_are_saved_under_both_names(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    model.head.proj.weight = model.embed_tokens.weight
    model.save_hf(tmp_path / "b")
    again = LigerLlama.from_hf(tmp_path / "b")
    assert torch.equal(again.head.proj.weight, again.embed_tokens.weight)


def test_a_load_draws_no_weights(tmp_path, monkeypatch):
    saved(tmp_path)
    state = torch.get_rng_state()
    drawn = []
    original = torch.nn.init._no_grad_normal_
    monkeypatch.setattr(
        torch.nn.init, "_no_grad_normal_", lambda *args: drawn.append(args) or original(*args)
    )
    LigerLlama.from_hf(tmp_path)
    assert drawn == [] and torch.equal(torch.get_rng_state(), state)
    LigerLlama(LlamaConfig(**SIZES))
    assert drawn


def test_a_tensor_with_memory_is_initialised_also_during_a_load():
    """A family may compute a buffer in its constructor."""
    with torch.device("meta"), hf_io._WithoutInitialValues():
        filled = torch.nn.init.ones_(torch.zeros(3, device="cpu"))
        drawn = torch.nn.init.constant_(torch.zeros(3, device="cpu"), 1.0)
        skipped = torch.nn.init.normal_(torch.empty(3))
    assert torch.equal(filled, torch.ones(3)) and torch.equal(drawn, filled)
    assert skipped.is_meta


def test_a_save_writes_the_tokenizer_files_that_were_there_at_the_load(tmp_path: Path) -> None:
    source, templates = tmp_path / "a", "additional_chat_templates/rag.jinja"
    saved(source)
    (source / templates).parent.mkdir()
    files = {"tokenizer.json": b"1\r\n", "vocab.json": b"\0", templates: b"{{ x }}"}
    for name, content in files.items():
        (source / name).write_bytes(content)
    model = LigerLlama.from_hf(source)
    assert model.source_files == files
    (source / "tokenizer.json").write_bytes(b"2")
    (source / "vocab.json").unlink()
    copy.deepcopy(model).save_hf(tmp_path / "b")
    shutil.rmtree(source)
    model.save_hf(tmp_path / "c")
    for folder in (tmp_path / "b", tmp_path / "c"):
        assert {name: (folder / name).read_bytes() for name in files} == files
    model.source_files = {}
    model.save_hf(tmp_path / "d")
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        *("config.json", "model.safetensors"),
    ]


def test_a_value_that_is_not_finite_is_saved_only_if_asked(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    with pytest.raises(SaveError, match=r"'layers.1.mlp.down_proj.weight' .*allow_nonfinite=True"):
        model.save_hf(tmp_path / "a")
    LigerLlama.from_hf(tmp_path / "a")
    model.save_hf(tmp_path / "a", allow_nonfinite=True)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        LigerLlama.from_hf(tmp_path / "a")


def test_a_sparse_parameter_is_not_saved(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    weight = model.embed_tokens.weight.detach().float().to_sparse()
    model.embed_tokens.weight = torch.nn.Parameter(weight)
    with pytest.raises(SaveError, match=r"'embed_tokens.weight' is sparse .*to_dense"):
        model.save_hf(tmp_path / "b")


def test_without_overwrite_a_checkpoint_stays(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    with pytest.raises(SaveError, match=r"config.json is in the folder, and overwrite=False"):
        model.save_hf(tmp_path / "a", overwrite=False)
    model.save_hf(tmp_path / "b", overwrite=False)


def test_loads_during_saves_get_one_version(tmp_path: Path) -> None:
    """A load during a save is neither of two models nor refused."""
    folder, errors = tmp_path / "out", []
    models = []
    for number in range(2):
        model = LigerLlama(LlamaConfig(**SIZES, rms_norm_eps=1e-6 * (1 + number)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        models.append(model)
    models[0].save_hf(folder)

    def save(model: LigerLlama) -> None:
        try:
            for _ in range(15):
                model.save_hf(folder, max_shard_size=20_000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        model = AutoLiger.from_hf(folder)
        number = round(model.config.rms_norm_eps * 1e6) - 1
        assert all((p == number).all() for p in model.parameters())
        seen.add(number)
    assert errors == [] and seen and [path.name for path in tmp_path.iterdir()] == ["out"]


class OwnConfig(LlamaConfig):
    model_type = "own"


class Own(DecoderModel):
    """An architecture without a weight map."""

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


@pytest.mark.parametrize("tied", [False, True])
def test_an_own_architecture_is_saved_and_loaded_with_its_config(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Own(OwnConfig(**SIZES, tie_word_embeddings=tied, rope_theta=77.0)).bfloat16()
    model.save_hf(tmp_path, max_shard_size=20000)
    assert tensors(tmp_path).keys() == dict(model.named_parameters()).keys()
    again = Own.from_hf(tmp_path)
    assert type(again) is Own and again.config.rope_theta == 77.0
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in model.state_dict().items())
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids), again(ids))
    monkeypatch.setattr(auto, "_registered", dict(auto._registered))
    register(Own)
    assert type(AutoLiger.from_hf(tmp_path)) is Own
    other = Own(OwnConfig(**SIZES, tie_word_embeddings=tied))
    assert len(load_pretrained(other, tmp_path).loaded) == len([*model.parameters()])


def test_a_config_that_was_copied_from_another_family_is_saved_as_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "llama", rope_theta=77.0)
    llama = LlamaConfig.from_hf(tmp_path / "llama")
    fields = {field.name: getattr(llama, field.name) for field in dataclasses.fields(llama)}
    Own(OwnConfig(**fields)).save_hf(tmp_path / "own")
    again = Own.from_hf(tmp_path / "own").config
    assert (again.rope_theta, again.extra["model_type"]) == (77.0, "own")
    assert again.extra["architectures"] == ["OwnForCausalLM"]


def test_an_architecture_that_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    class Disguised(Own):
        config_class = LlamaConfig

    class Shared(Own):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.layers[1].mlp = self.layers[0].mlp  # counts once
            self.layers[1].self_attn.o_proj.weight = self.layers[0].self_attn.o_proj.weight

    class Scalar(Own):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.ones(()))

    class Buffer(Own):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.register_buffer("mean", torch.zeros(3))

    for made, complaint in (
        (Disguised(LlamaConfig(**SIZES)), "model_type 'llama' belongs to LigerLlama"),
        (Shared(OwnConfig(**SIZES)), r"'layers.0.* and 'layers.1.*o_proj.* are one parameter"),
        (Scalar(OwnConfig(**SIZES)), r"'scale' has no dimension; give it the shape \(1,\)"),
        (Buffer(OwnConfig(**SIZES)), "'mean' is a buffer; register it with persistent=False"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            made.save_hf(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _with_buffers(register: bool = True, persistent: bool = False) -> Any:
    class Slopes(Own):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            slopes = 2.0 ** -torch.arange(1, 4)
            norm = self.layers[1].input_layernorm
            if register:
                norm.register_buffer("slopes", slopes, persistent=persistent)
            else:
                norm.slopes = slopes

    return Slopes


def test_a_subclass_of_a_family_does_not_save_without_its_buffers(tmp_path: Path) -> None:
    class Counting(LigerLlama):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.norm.register_buffer("seen", torch.zeros(3))

    class Stateful(LigerLlama):
        def get_extra_state(self) -> int:
            return 1

    for cls, name in ((Counting, r"norm\.seen"), (Stateful, "_extra_state")):
        with pytest.raises(SaveError, match=f"{cls.__name__}: .*'{name}' .*persistent=False"):
            cls(LlamaConfig(**SIZES)).save_hf(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_map_that_does_not_tile_is_not_saved(tmp_path: Path) -> None:
    """A class that is not registered can have one."""

    def overlapping(config: LlamaConfig) -> WeightMap:
        found = LigerLlama.weight_map(config)
        entries = list(found.entries)
        (index,) = (
            i for i, e in enumerate(entries) if e.name == "layers.0.self_attn.qkv_proj.weight"
        )
        q, k, v = entries[index].spans
        spans = (q, replace(k, row=k.row - 1), v)
        entries[index] = replace(entries[index], spans=spans)
        return replace(found, entries=tuple(entries))

    own = type("Own", (LigerLlama,), {"weight_map": staticmethod(overlapping)})
    with pytest.raises(ConfigError, match=r"Own: weight map: entry 'layers.0.*used twice"):
        own(LlamaConfig.small()).save_hf(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_constants_that_the_weight_map_ignores_are_saved_as_they_were(tmp_path: Path) -> None:
    """In one file and in shards, also those of dtypes that no parameter has."""

    class Constant(LigerLlama):
        @staticmethod
        def weight_map(config: LlamaConfig) -> Any:
            found = LigerLlama.weight_map(config)
            given = {"layers.1.beta": torch.tensor(0.501), "layers.1.steps": torch.arange(5)}
            return dataclasses.replace(
                found,
                ignored=(*found.ignored, ".mask"),
                constants={**given, "new": torch.eye(2) > 0},
            )

    Constant(LlamaConfig(**SIZES)).save_hf(tmp_path / "new")
    found = tensors(tmp_path / "new")
    assert found["layers.1.beta"] == torch.tensor(0.501) and found["new"].tolist() == [
        [1, 0],
        [0, 1],
    ]
    saved(tmp_path / "a")
    constants = {
        "layers.0.rotary_emb.inv_freq": torch.rand(8),
        "layers.0.mask": torch.ones(3, 1).tril().bool(),
        "layers.1.steps": torch.arange(5),
        "layers.1.beta": torch.tensor(0.5, dtype=torch.float64),
        "layers.1.mask": torch.full((2, 2), float("-inf"), dtype=torch.bfloat16),
    }
    expected = tensors(tmp_path / "a") | constants
    save_file(expected, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    model = Constant.from_hf(tmp_path / "a", dtype=torch.float16)
    for shard in (8000, 5 * 10**9):
        model.save_hf(tmp_path / "b", max_shard_size=shard)
        found = tensors(tmp_path / "b")
        assert found.keys() == expected.keys() | {"new"}
        for name, constant in constants.items():
            assert found[name].dtype == constant.dtype and torch.equal(found[name], constant), name
        assert compare(tmp_path / "a", tmp_path / "b", Constant, dtype=torch.float16).ok
    assert verify(tmp_path / "a", Constant).ok
    del expected["layers.1.beta"]
    save_file(expected, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    report = compare(tmp_path / "a", tmp_path / "b", Constant)
    assert report.differences[0] == "layers.1.beta: differs"
    for wrong in (
        torch.tensor(0.6),
        torch.tensor([0.501]),
        torch.tensor(0.5).to(torch.float8_e5m2),
    ):
        save_file(expected | {"layers.1.beta": wrong}, tmp_path / "b" / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"'layers.1.beta' does not .* map, 0\.50"):
            Constant.from_hf(tmp_path / "b")


def test_a_load_computes_the_buffers_of_the_constructor(tmp_path: Path) -> None:
    cls = _with_buffers()
    model = cls(OwnConfig(**SIZES))
    model.save_hf(tmp_path)
    loaded = cls.from_hf(tmp_path, dtype=torch.bfloat16)
    slopes = loaded.layers[1].input_layernorm.slopes
    assert torch.equal(slopes, 2.0 ** -torch.arange(1, 4)) and slopes.dtype == torch.float32
    assert not any(x.is_meta for x in loaded.buffers())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, model.get_parameter(name).bfloat16()), name

    on_meta = cls.from_hf(tmp_path, device="meta").to_empty(device="cpu")
    on_meta.read_parts()
    assert torch.equal(on_meta.layers[1].input_layernorm.slopes, slopes)


def test_a_tensor_that_a_load_could_not_fill_is_refused(tmp_path: Path) -> None:
    """Also of a family with a weight map of its own."""
    for cls, complaint in (
        (_with_buffers(persistent=True), r"'layers\.1\.input_layernorm\.slopes' is a buffer"),
        (_with_buffers(register=False), r"slopes' is a tensor, but no buffer.*register_buffer\('s"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            cls.on_meta(OwnConfig(**SIZES))
        mapped = type("MappedConfig", (OwnConfig,), {"model_type": "mapped"})
        members = {"config_class": mapped, "weight_map": staticmethod(LigerLlama.weight_map)}
        with pytest.raises(ConfigError, match=complaint):
            type("Mapped", (cls,), members).on_meta(mapped(**SIZES))


def test_a_dtype_may_be_named(tmp_path: Path) -> None:
    saved(tmp_path)
    for name, dtype in (
        ("float32", torch.float32),
        ("torch.float16", torch.float16),
        ("auto", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp32", torch.float32),
    ):
        assert AutoLiger.from_hf(tmp_path, dtype=name).norm.weight.dtype == dtype, name


def test_a_device_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    saved(tmp_path)
    for device in ("auto", "gpu", "cuda:999", None):
        said = rf"device is {device!r}, which cannot be used .* expected one of 'cpu', 'meta'"
        for cls in (AutoLiger, LigerLlama):
            with pytest.raises(ValueError, match=said):
                cls.from_hf(tmp_path, device=device)


def test_an_argument_of_transformers_is_told_by_its_name_here(tmp_path: Path) -> None:
    saved(tmp_path)
    for given, meant in (("torch_dtype", "dtype"), ("device_map", "device")):
        with pytest.raises(TypeError, match=f"argument '{given}'; did you mean '{meant}'"):
            AutoLiger.from_hf(tmp_path, **{given: "auto"})


def test_the_size_of_shards_may_have_a_unit(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    for size, shards in (("20kB", 5), ("5GB", 1)):
        model.save_hf(tmp_path / "b", max_shard_size=size)
        assert len([*(tmp_path / "b").glob("*.safetensors")]) == shards, size
    with pytest.raises(ConfigError, match="max_shard_size='5 apples': expected a number of bytes"):
        model.save_hf(tmp_path / "c", max_shard_size="5 apples")


def test_a_head_that_is_tied_to_a_replaced_embedding_is_not_saved(tmp_path: Path) -> None:
    """peft's modules_to_save trains a copy of the embedding, which merging puts in its place."""
    model = saved(tmp_path / "a", tie_word_embeddings=True)
    model.embed_tokens = copy.deepcopy(model.embed_tokens)
    with pytest.raises(SaveError, match=r"'head' is tied to an embedding .* no longer .*head.tie"):
        model.save_hf(tmp_path / "b")
    assert not (tmp_path / "b").exists()
    model.head.tie(model.embed_tokens)
    model.save_hf(tmp_path / "b")


def test_a_tensor_subclass_is_not_saved(tmp_path: Path) -> None:
    class Quantised(torch.Tensor):
        pass

    model = saved(tmp_path / "a")
    linear = model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Quantised))
    with pytest.raises(SaveError, match=r"'layers.0.mlp.down_proj.weight' is a Quantised, not a"):
        model.save_hf(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_parameters_that_zero3_divides_are_not_saved(tmp_path: Path) -> None:
    """DeepSpeed leaves an empty tensor, with the attributes ds_id and ds_status."""
    status = enum.Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])
    model = saved(tmp_path / "a")
    weight = model.norm.weight
    whole, weight.ds_id = weight.data, 7
    weight.data, weight.ds_status = torch.empty(0, dtype=whole.dtype), status.NOT_AVAILABLE
    with pytest.raises(SaveError, match=r"'norm.weight' is divided .* ZeRO-3; .*GatheredParam"):
        model.save_hf(tmp_path / "b")
    weight.data, weight.ds_status = whole, status.AVAILABLE
    model.save_hf(tmp_path / "b")
