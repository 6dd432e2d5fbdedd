import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from ligermodels.converters.hf_config import read_config, to_hf, unknown_keys
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.models.gemma3 import Gemma3Config
from ligermodels.models.llama import LlamaConfig

from .conftest import BASE, CONFIG, LLAMA3, YARN, llama_config, parse


def test_dtype_spellings(subtests):
    for keys, dtype in (
        ({}, None),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "auto"}, None),
    ):
        with subtests.test(str(keys)):
            assert parse({**BASE, **keys}).dtype == dtype


def test_both_spellings_are_written_and_no_other_key():
    for keys in ({}, {"rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}):
        exported = to_hf(parse({**BASE, **keys}))
        ropes = {"rope_theta", "rope_scaling", "rope_parameters"}
        dtypes = {"dtype", "torch_dtype"} if keys else set()
        assert exported.keys() == BASE.keys() | ropes | dtypes
        assert exported.get("dtype") == exported.get("torch_dtype") == keys.get("torch_dtype")


def test_changed_fields_are_written_in_every_spelling():
    config = parse({**CONFIG, "rope_scaling": LLAMA3, "original_max_position_embeddings": 32})
    config.rope_theta, config.rope_scaling = 7.0, dict(YARN)
    config.dtype, config.max_position_embeddings = "float32", 4096
    exported = to_hf(config)
    assert exported["rope_theta"] == 7.0 and exported["rope_scaling"] == YARN
    assert exported["rope_parameters"] == {**YARN, "rope_theta": 7.0}
    assert "original_max_position_embeddings" not in exported
    assert exported["dtype"] == exported["torch_dtype"] == "float32"
    assert exported["max_position_embeddings"] == 4096
    assert exported["is_llama_config"] is True


def test_bad_values_are_refused_with_file_and_key(tmp_path, subtests):
    for key, value, message in (
        ("model_type", "mistral", "'model_type' is 'mistral'; this class reads 'llama'"),
        ("quantization_config", {"quant_method": "gptq"}, r"quantised checkpoints \('gptq'\)"),
        ("partial_rotary_factor", 0.5, "'partial_rotary_factor' is 0.5"),
        ("attention_bias", "no", "'attention_bias' is 'no', expected true or false"),
        ("hidden_size", "16", "'hidden_size' is '16', expected an integer"),
        ("eos_token_id", [2, "x"], "'eos_token_id' is .*, expected an integer or a list"),
        ("rms_norm_eps", float("nan"), "'rms_norm_eps' is nan, expected a finite number"),
        ("hidden_act", 3, "'hidden_act' is 3, expected a string"),
        ("torch_dtype", "int8", "'torch_dtype' is 'int8', expected one of float64"),
        ("rope_theta", 0, "'rope_theta' is 0, expected a positive number"),
        ("rope_scaling", 4, "'rope_scaling' is 4, expected an object"),
        ("rope_scaling", {"type": "spiral"}, "'rope_scaling.rope_type' is 'spiral'"),
        ("rope_scaling", {**LLAMA3, "low_freq_factor": 4.0}, "must be greater than low_freq"),
        ("rope_scaling", {"rope_type": "longrope", "short_factor": [1]}, "long_factor' is not a"),
        (
            "rope_parameters",
            {**YARN, "partial_rotary_factor": 0.5},
            "partial_rotary_factor' is 0.5",
        ),
        ("rope_parameters", {"full_attention": {}}, "rope per layer type"),
        # The config class checks these; the message still names the file.
        ("hidden_act", "relu", "hidden_act 'relu' is not implemented"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_key_value_heads", 3, "num_attention_heads 4 is not a multiple of .* 3"),
        ("hidden_size", 18, "hidden_size 18 is not a multiple"),
        ("head_dim", 5, "head_dim 5 is 5, .* expected an even number"),
    ):
        with subtests.test(f"{key}: {value!r:.60}"):
            (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: value}))
            with pytest.raises(ConfigError, match=message) as caught:
                LlamaConfig.from_hf(tmp_path)
            assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
            assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        *((key, None, None) for key in ("quantization_config", "bos_token_id")),
        ("head_dim", None, 4),
        ("num_key_value_heads", None, 4),
        ("rope_theta", None, 1e4),
        ("attention_dropout", None, 0),
        ("attention_dropout", 0.0, 0),
        ("partial_rotary_factor", 1.0, None),
        ("is_causal", True, None),
        ("use_bidirectional_attention", False, None),
    ],
)
def test_null_and_harmless_values_are_taken_where_transformers_takes_them(key, value, read):
    assert getattr(llama_config(**{key: value}), key, None) == read


def test_absent_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: the file is missing; choose"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_config(tmp_path / "absent")
    (tmp_path / "run.json").touch()
    with pytest.raises(CheckpointError, match="this is the folder of a run, whose model is in mod"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the folder holds an adapter, and no model"):
        read_config(tmp_path)


@dataclass(kw_only=True)
class ExpertsConfig(LlamaConfig):
    model_type: ClassVar[str] = "llama_of_experts"
    key_aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts", "n": "num_experts"}
    refused: ClassVar[dict[str, Any]] = {"sparse_step": (1,), "dense_layers": ([],)}

    num_experts: int = 8


def test_other_keys_of_a_field(subtests):
    raw = {**CONFIG, "model_type": "llama_of_experts", "num_local_experts": 4}
    config = parse(raw, ExpertsConfig)
    assert config.num_experts == 4 and config.extra == raw
    assert {key: to_hf(config)[key] for key in raw} == raw and "num_experts" not in to_hf(config)
    assert "num_local_experts" not in unknown_keys(raw, ExpertsConfig)
    config.num_experts = 6
    written = to_hf(config)
    assert [written[key] for key in ("num_experts", "num_local_experts", "n")] == [6, 6, 6]
    with pytest.raises(ConfigError, match=r"'n' is 5, but 'num_experts', .* is 4; remove one"):
        parse({**raw, "n": 5}, ExpertsConfig)
    assert to_hf(ExpertsConfig())["num_local_experts"] == 8
    # A family without this field refuses the key under every name.
    with pytest.raises(ConfigError, match="'num_local_experts' is 4"):
        llama_config(num_local_experts=4)


def test_keys_that_a_family_refuses():
    raw = {**CONFIG, "model_type": "llama_of_experts"}
    parse({**raw, "sparse_step": 1, "dense_layers": []}, ExpertsConfig)
    for key, value in (("sparse_step", 2), ("dense_layers", [0])):
        with pytest.raises(ConfigError, match=f"'{key}' is .* not implemented"):
            parse({**raw, key: value}, ExpertsConfig)


def test_the_name_of_the_architecture_in_a_new_export():
    assert to_hf(ExpertsConfig())["architectures"] == ["LlamaOfExpertsForCausalLM"]
    assert to_hf(Gemma3Config())["architectures"] == ["Gemma3ForCausalLM"]


WRAPPER = "modeling_ligermodels.LigerLlamaForCausalLM"


@pytest.mark.parametrize("name", [WRAPPER, f"someone/llama--{WRAPPER}", "modeling.Model"])
def test_an_export_names_no_wrapper_of_ours(name):
    """transformers writes the hub id of a checkpoint before the module's name."""
    other = {"AutoConfig": "configuration.Config"}
    architectures = ["LigerLlamaForCausalLM"]
    auto_map = {"AutoModelForCausalLM": name, **other}
    exported = to_hf(llama_config(architectures=architectures, auto_map=auto_map))
    assert exported["auto_map"] == (other if WRAPPER in name else auto_map)
    if WRAPPER in name:
        assert exported["architectures"] == ["LlamaForCausalLM"]
        config = llama_config(auto_map={"AutoModelForCausalLM": name})
        assert "auto_map" not in to_hf(config)
