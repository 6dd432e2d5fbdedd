import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ligermodels.converters.checkpoint import Checkpoint, bitwise_equal
from ligermodels.converters.weight_map import (
    Entry,
    Span,
    Towers,
    WeightMap,
    linear,
    norm,
    packed,
)
from ligermodels.models.auto import families
from ligermodels.models.llama import LigerLlama
from tests.families import DECODERS

from .conftest import llama_config

# No two sizes alike, so that no two shapes can be mistaken for one another.
SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
variants = pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(family, {"tie_word_embeddings": tied, **biases}, id=f"{family}-{tied}-{n}")
        for family, of in DECODERS.items()
        for tied in (True, False)
        for n, biases in enumerate([{}, of.biases] if of.biases else [{}])
    ],
)


@variants
def test_weight_map_names_exactly_the_models_state_dict(family, changes):
    cls = families()[family]
    config = cls.config_class(**SIZES, **changes)
    with torch.device("meta"):
        model = cls(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {entry.name: entry.shape for entry in cls.weight_map(config)} == expected


@variants
def test_weight_map_is_made_of_exactly_transformers_state_dict(family, changes, tmp_path):
    """Every tensor is found, and put together again it has the bits it had."""
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **changes))
    tensors = {name: torch.randn_like(tensor) for name, tensor in hf.state_dict().items()}
    if changes["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    cls = families()[family]
    weight_map = cls.weight_map(cls.config_class(**SIZES, **changes))
    assert weight_map.source_shapes() == {name: tuple(t.shape) for name, t in tensors.items()}

    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.plan(weight_map)
    native = {entry.name: torch.empty(entry.shape) for entry in weight_map}
    for entry in weight_map:
        checkpoint.read(entry, native[entry.name])
    for source, parts in weight_map.parts().items():
        rows = [native[entry.name][span.row : span.row + span.rows] for entry, span in parts]
        assert bitwise_equal(torch.cat(rows), tensors[source])


@pytest.mark.parametrize("family", DECODERS)
def test_spans_cover_every_native_row_once_and_in_order(family):
    cls = families()[family]
    for entry in cls.weight_map(cls.config_class(**SIZES, **DECODERS[family].biases)):
        row = 0
        for span in entry.spans:
            assert span.row == row
            row += span.rows
        assert row == entry.shape[0]


def test_packed_order_is_q_k_v_and_gate_up():
    entries = {entry.name: entry for entry in LigerLlama.weight_map(llama_config())}
    attention = "model.layers.1.self_attn"
    assert entries["layers.1.self_attn.qkv_proj.weight"].spans == (
        Span(f"{attention}.q_proj.weight", 0, 0, 16),
        Span(f"{attention}.k_proj.weight", 0, 16, 8),
        Span(f"{attention}.v_proj.weight", 0, 24, 8),
    )
    sources = [span.source for span in entries["layers.0.mlp.gate_up_proj.weight"].spans]
    assert sources == [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]


def test_a_source_that_is_split_among_entries_has_the_size_of_all_its_parts():
    low = Entry("low", (2, 3), (Span("whole", 0, 0, 2),))
    high = Entry("high", (4, 3), (Span("whole", 2, 0, 4),))
    weight_map = WeightMap((high, low))
    assert weight_map.source_shapes() == {"whole": (6, 3)}
    assert [entry.name for entry, _ in weight_map.parts()["whole"]] == ["low", "high"]


def test_only_gemma_3_may_hold_other_towers():
    models = {family: families()[family] for family in DECODERS}
    maps = {f: cls.weight_map(cls.config_class(**SIZES)) for f, cls in models.items()}
    assert [family for family, weight_map in maps.items() if weight_map.towers] == ["gemma3_text"]


def test_the_first_spelling_that_fits_is_replaced():
    towers = Towers(spellings=(("a.b.", "c."), ("a.", "")), left_out=())
    assert [towers.text_name(name) for name in ("a.b.x", "a.x", "b.a.x")] == ["c.x", "x", "b.a.x"]


def test_packed_stacks_rows():
    assert packed("n", (5,), ("a", 2), ("b", 3)).shape == (5, 5)


def test_a_linear_has_a_bias_where_it_is_asked_for():
    (weight,) = linear("n", 5, ("a", 2), ("b", 3))
    assert weight == packed("n.weight", (5,), ("a.weight", 2), ("b.weight", 3))
    assert linear("n", 5, ("a", 2), ("b", 3), bias=True) == (
        weight,
        packed("n.bias", (), ("a.bias", 2), ("b.bias", 3)),
    )


def test_a_norm_has_a_weight():
    assert norm("n", "hf.n", 4) == packed("n.weight", (), ("hf.n.weight", 4))
