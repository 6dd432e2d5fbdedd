"""Both spellings of rope and their precedence; test_hf_config_families has Gemma 3's."""

import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import LlamaConfig as HFConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ligermodels.converters import hf_rope
from ligermodels.converters.hf_config import to_hf
from ligermodels.errors import ConfigError
from ligermodels.layers import RotaryEmbedding
from ligermodels.models.gemma3 import Gemma3Config, LigerGemma3
from ligermodels.models.llama import LigerLlama, LlamaConfig
from ligermodels.models.mistral import MistralConfig

from .conftest import BASE, LLAMA3, YARN, parse

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 16,
}


SPELLINGS = [
    {},
    {"rope_theta": 5e5},
    {"rope_scaling": None, "rope_parameters": None},
    {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    {"rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    {"rope_theta": 5.0, "rope_parameters": {**LLAMA3, "rope_theta": 7.0}},
    {"rope_theta": 5.0, "rope_parameters": LLAMA3},
    # A non-empty rope_scaling replaces all of rope_parameters, also its theta.
    {"rope_scaling": YARN, "rope_parameters": {**LLAMA3, "rope_theta": 7.0}},
    {"rope_theta": 5.0, "rope_scaling": YARN, "rope_parameters": {"rope_theta": 7.0}},
    {"rope_scaling": {}, "rope_parameters": {**LLAMA3, "rope_theta": 7.0}},
    {"rope_scaling": {**YARN, "rope_theta": 9.0}, "rope_theta": 5.0},
    # A length at config level overrides the nested one, if the rope type has a length.
    *(
        {spelling: scaling, "original_max_position_embeddings": 32}
        for scaling in (LLAMA3, YARN, LONGROPE, {"type": "linear", "factor": 2.0})
        for spelling in ("rope_scaling", "rope_parameters")
    ),
]


def test_each_spelling_means_what_it_means_to_transformers(subtests):
    for keys in SPELLINGS:
        with subtests.test(str(keys)):
            raw = {**BASE, **keys}
            config = parse(raw)
            assert_transformers_agrees(raw, raw)
            exported = to_hf(config)
            assert exported["rope_parameters"] is not None
            assert_transformers_agrees(exported, raw)
            assert dataclasses.replace(parse(exported), extra={}) == dataclasses.replace(
                config, extra={}
            )


# Each rope with values of its fields, and other values of them.
NEAR, FAR = ([1.0 + step * i for i in range(16)] for step in (0.05, 0.5))
ROPES = {
    "default": ({}, {}),
    "linear": ({"factor": 2.0}, {"factor": 3.0}),
    "proportional": ({"factor": 2.0}, {"factor": 3.0}),
    "dynamic": ({"factor": 2.0}, {"factor": 3.0}),
    "llama3": (
        {**LLAMA3, "original_max_position_embeddings": 32},
        {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0}
        | {"original_max_position_embeddings": 48},
    ),
    "yarn": (
        {**YARN, "original_max_position_embeddings": 40, "beta_fast": 8.0, "beta_slow": 2.0}
        | {"mscale": 1.3, "mscale_all_dim": 0.8, "truncate": False},
        {"factor": 5.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}
        | {"mscale": 1.1, "mscale_all_dim": 0.7, "truncate": True, "attention_factor": 0.7},
    ),
    "longrope": (
        {"short_factor": NEAR, "long_factor": FAR, "factor": 4.0}
        | {"original_max_position_embeddings": 16},
        {"short_factor": FAR, "long_factor": NEAR, "factor": 8.0, "attention_factor": 1.25}
        | {"original_max_position_embeddings": 32},
    ),
}


def all_angles(model_class, keys):
    """Return cosines and sines of all ropes of a model, at a few lengths."""
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    config_class = model_class.config_class
    raw = {"model_type": config_class.model_type, "max_position_embeddings": 64, **sizes, **keys}
    model = model_class(parse(raw, config_class))
    ropes = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    positions = [torch.arange(length)[None] for length in (10, 24, 200)]
    return torch.cat([torch.cat(rope(each), 1) for rope in ropes for each in positions], 1)


def changes(rope_type, rope, model_class):
    """Return keys at config.json's top, and keys of the rope, that change its angles."""
    top = {"rope_theta": 5e5}
    if rope_type == "dynamic":
        top["max_position_embeddings"] = 32
    if model_class is LigerGemma3:
        top["rope_local_base_freq"] = 5e5
    elif "original_max_position_embeddings" in rope:
        top["original_max_position_embeddings"] = 48
    inside = {"rope_theta": 5e5, **ROPES[rope_type][1]}
    return top, inside if rope_type == "default" else inside | {"rope_type": "default"}


@pytest.mark.parametrize(
    ("model_class", "place"),
    [
        (LigerLlama, ("rope_scaling",)),
        (LigerLlama, ("rope_parameters",)),
        (LigerGemma3, ("rope_scaling",)),
        (LigerGemma3, ("rope_parameters", "full_attention")),
    ],
)
@pytest.mark.parametrize("rope_type", ROPES)
def test_every_field_in_every_place_changes_the_angles(rope_type, model_class, place):
    def angles(rope, **top):
        for key in reversed(place):
            rope = {key: rope}
        return all_angles(model_class, rope | top)

    rope = {**ROPES[rope_type][0], "rope_type": rope_type}
    expected = angles(rope)
    if (model_class, place) != (LigerGemma3, ("rope_scaling",)):  # where transformers ignores it
        old = {("type" if name == "rope_type" else name): value for name, value in rope.items()}
        assert torch.equal(angles(old), expected)
    top, inside = changes(rope_type, rope, model_class)
    for name, value in top.items():
        assert not torch.equal(angles(rope, **{name: value}), expected), f"{name} at the top"
    for name, value in inside.items():
        assert not torch.equal(angles({**rope, name: value}), expected), f"{name} in the rope"


def assert_transformers_agrees(raw, original):
    """Assert that transformers reads from `raw` the frequencies that we read from `original`."""
    hf = LlamaRotaryEmbedding(HFConfig.from_dict(json.loads(json.dumps(raw))))
    with torch.device("cpu"):
        ours = LigerLlama(parse(original)).rotary_emb
    torch.testing.assert_close(hf.inv_freq, ours.inv_freq, rtol=1e-6, atol=0)
    assert hf.attention_scaling == pytest.approx(ours.attention_factor)


def test_a_rope_that_is_changed_is_written_in_every_spelling():
    raw = {"rope_parameters": {"full_attention": LLAMA3}, "rope_theta": 5.0}
    config = Gemma3Config(rope_theta=7.0, rope_local_base_freq=3.0, rope_scaling=dict(YARN))
    hf_rope.fields_to_hf(raw, config, changed=True)
    assert raw == {
        "rope_theta": 7.0,
        "rope_local_base_freq": 3.0,
        "rope_scaling": YARN,
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 7.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3.0},
        },
    }


def test_longrope_writes_its_length_where_transformers_4_reads_it():
    raw = {"rope_scaling": dict(LONGROPE)}
    hf_rope.fields_to_hf(raw, LlamaConfig(rope_scaling=LONGROPE, head_dim=4), changed=False)
    assert raw["original_max_position_embeddings"] == 16
    assert hf_rope.fields_from_hf(raw, LlamaConfig)["rope_scaling"] == LONGROPE


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("scaling", "change", "message"),
    [
        ({"rope_type": "warp"}, {}, "rope_type' is 'warp'"),
        ({"rope_type": "linear"}, {}, r"'rope_scaling\.factor' is missing"),
        *((LINEAR | {"factor": x}, {}, rf"factor' is {x}, expected") for x in (0.0, 1e-7, 1e13)),
        ({**YARN, "rope_theta": 1e6}, {}, r"rope_theta' is 1000000\.0, but the model would have 1"),
        ({**YARN, "type": "linear"}, {}, "type' is 'linear', but the model would have 'yarn'"),
        ({**YARN, "partial_rotary_factor": 0.5}, {}, "factor' is 0.5, but the model would have 1"),
    ],
)
def test_a_scaling_that_no_model_can_have_is_refused(scaling, change, message):
    sizes = {"head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 64}
    hf_rope.check_scaling(YARN, sizes)
    with pytest.raises(ConfigError, match=message):
        hf_rope.check_scaling(scaling, sizes | change)


@dataclass(kw_only=True)
class PartConfig(LlamaConfig):
    model_type: ClassVar[str] = "llama"

    partial_rotary_factor: float = 0.5


def part(raw):
    return parse({**BASE, "head_dim": 16, **raw}, PartConfig)


def test_the_rotated_part_in_both_spellings(subtests):
    for keys, factor in (
        ({}, 0.5),
        ({"partial_rotary_factor": 0.75}, 0.75),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, 0.25),
        # The nested one wins, and rope_scaling replaces rope_parameters as for theta.
        ({"partial_rotary_factor": 0.75, "rope_parameters": {"partial_rotary_factor": 1}}, 1.0),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.25}}, 0.25),
        ({"rope_scaling": YARN, "rope_parameters": {"partial_rotary_factor": 0.25}}, 0.5),
    ):
        with subtests.test(str(keys)):
            config = part(keys)
            assert config.partial_rotary_factor == factor
            assert config.rotary_dim == int(16 * factor)
            assert "partial_rotary_factor" not in (config.rope_scaling or {})
            exported = to_hf(config)
            assert part(exported) == dataclasses.replace(config, extra=exported)
    new = to_hf(PartConfig(partial_rotary_factor=0.25, rope_scaling=YARN))
    assert new["partial_rotary_factor"] == new["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert "partial_rotary_factor" not in to_hf(LlamaConfig())["rope_parameters"]


def test_a_part_that_cannot_be_rotated_is_refused(subtests):
    for value in (0, 1.5, "half", float("nan")):
        with subtests.test(str(value)):
            with pytest.raises(ConfigError, match=r"'partial_rotary_factor' is .* above 0"):
                part({"partial_rotary_factor": value})
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.3 of head_dim 10 is 3"):
        PartConfig(head_dim=10, partial_rotary_factor=0.3)


def test_longrope_has_a_factor_for_each_pair_of_the_rotated_part():
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert part({"rope_scaling": factors}).rotary_dim == 8
    with pytest.raises(ConfigError, match=r"has 4 numbers, expected half of the .* a head, 6"):
        part({"rope_scaling": factors, "partial_rotary_factor": 0.75})
    with pytest.raises(ConfigError, match="has 4 numbers"):
        PartConfig(head_dim=16, rope_scaling=factors, partial_rotary_factor=1.0)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope_type", ["default", "dynamic", "yarn"])
@pytest.mark.parametrize("config_class", [LlamaConfig, Gemma3Config])
def test_a_key_that_no_rope_reads_is_refused(config_class, rope_type, spelling):
    """Hunyuan multiplies theta by a power of alpha."""
    rope = {"rope_type": rope_type, "factor": 2.0, "alpha": 1000.0}
    nested = config_class is Gemma3Config and spelling == "rope_parameters"
    raw = {"model_type": config_class.model_type}
    raw[spelling] = {"sliding_attention": rope} if nested else rope
    with pytest.raises(ConfigError, match=r"alpha' is 1000\.0, which no rope here reads"):
        parse(raw, config_class)
    if rope_type != "default":
        for alpha in (1000.0, {"full_attention": 1000.0}):
            with pytest.raises(ConfigError, match=r"config: 'rope_scaling\.alpha' is"):
                config_class(rope_scaling={**rope, "alpha": alpha})


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_remark_of_published_yarn_checkpoints_may_stay(spelling):
    """NousResearch/Yarn-Llama-2-7b-128k has this object; transformers does not read the remark."""
    rope = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    for config_class in (LlamaConfig, MistralConfig):
        raw = {"model_type": config_class.model_type, spelling: rope | {"finetuned": True}}
        found = parse(raw, config_class).rope_scaling
        assert found["rope_type"] == "yarn" and found["finetuned"] is True
