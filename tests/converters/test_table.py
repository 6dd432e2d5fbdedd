import pytest
import torch

from ligermodels.converters.table import Entry, Span, Table, llama_table, packed, table_for
from ligermodels.errors import ConfigError
from ligermodels.models.llama import LigerLlama

from .conftest import llama_config


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_table_names_exactly_the_models_state_dict(tied, bias):
    config = llama_config(tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, head_dim=6)
    with torch.device("meta"):
        model = LigerLlama(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {entry.name: entry.shape for entry in llama_table(config)} == expected


def test_spans_cover_every_native_row_once_and_in_order():
    for entry in llama_table(llama_config(attention_bias=True)):
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


def test_packed_stacks_rows():
    assert packed("n", (5,), ("a", 2), ("b", 3)).shape == (5, 5)


def test_a_family_without_a_table_is_refused():
    config = llama_config()
    config.model_type = "mamba"
    with pytest.raises(ConfigError, match="'mamba' has no conversion table"):
        table_for(config)
