import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ligermodels.converters.checkpoint import Checkpoint, bitwise_equal
from ligermodels.converters.weight_map import (
    TABLES,
    Entry,
    Span,
    Table,
    Towers,
    llama_table,
    packed,
    table_for,
)
from ligermodels.errors import ConfigError
from ligermodels.models.auto import FAMILIES

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
BIASES = {"llama": {"attention_bias": True, "mlp_bias": True}}
BIASES |= {f: {"attention_bias": True} for f in ("gemma", "gemma2", "gemma3_text", "qwen3")}
variants = pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(family, {"tie_word_embeddings": tied, **biases}, id=f"{family}-{tied}-{n}")
        for family in TABLES
        for tied in (True, False)
        for n, biases in enumerate([{}, BIASES[family]] if family in BIASES else [{}])
    ],
)


@variants
def test_table_names_exactly_the_models_state_dict(family, changes):
    cls = FAMILIES[family]
    config = cls.config_class(**SIZES, **changes)
    with torch.device("meta"):
        model = cls(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {entry.name: entry.shape for entry in table_for(config)} == expected


@variants
def test_table_is_made_of_exactly_transformers_state_dict(family, changes, tmp_path):
    """Every tensor is found, and put together again it has the bits it had."""
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **changes))
    tensors = {name: torch.randn_like(tensor) for name, tensor in hf.state_dict().items()}
    if changes["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    config = FAMILIES[family].config_class(**SIZES, **changes)
    table = table_for(config)
    assert table.source_shapes() == {name: tuple(t.shape) for name, t in tensors.items()}

    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.plan(table)
    native = {entry.name: torch.empty(entry.shape) for entry in table}
    for entry in table:
        checkpoint.read(entry, native[entry.name])
    for source, parts in table.parts().items():
        rows = [native[entry.name][span.row : span.row + span.rows] for entry, span in parts]
        assert bitwise_equal(torch.cat(rows), tensors[source])


@pytest.mark.parametrize("family", TABLES)
def test_spans_cover_every_native_row_once_and_in_order(family):
    biases = BIASES.get(family, {})
    for entry in table_for(FAMILIES[family].config_class(**SIZES, **biases)):
        row = 0
        for span in entry.spans:
            assert span.row == row
            row += span.rows
        assert row == entry.shape[0]


def test_packed_order_is_q_k_v_and_gate_up():
    entries = {entry.name: entry for entry in llama_table(llama_config())}
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
    table = Table((high, low))
    assert table.source_shapes() == {"whole": (6, 3)}
    assert [entry.name for entry, _ in table.parts()["whole"]] == ["low", "high"]


def test_only_gemma_3_may_hold_other_towers():
    tables = {f: table_for(FAMILIES[f].config_class(**SIZES)) for f in TABLES}
    assert [family for family, table in tables.items() if table.towers] == ["gemma3_text"]


def test_the_first_spelling_that_fits_is_replaced():
    towers = Towers(spellings=(("a.b.", "c."), ("a.", "")), left_out=())
    assert [towers.text_name(name) for name in ("a.b.x", "a.x", "b.a.x")] == ["c.x", "x", "b.a.x"]


def test_packed_stacks_rows():
    assert packed("n", (5,), ("a", 2), ("b", 3)).shape == (5, 5)


def test_a_family_without_a_table_is_refused():
    config = llama_config()
    config.model_type = "mamba"
    with pytest.raises(ConfigError, match="'mamba' has no conversion table"):
        table_for(config)
