"""Inputs that a model cannot honour are refused, and those of any other kind are taken."""

from __future__ import annotations

import pytest
import torch

from ligermodels.models.inputs import next_token_targets, rows_mask
from tests.models.pairs import tiny_model, tokens


def test_the_last_token_of_a_row_and_of_a_document_has_no_target() -> None:
    labels = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    expected = [[11, 12, 13, 14, -1], [21, 22, 23, 24, -1]]
    assert next_token_targets(labels, ignore_index=-1).tolist() == expected
    documents = torch.tensor([[0, 0, 1, 2, 2], [0, 0, 0, 0, 1]])
    expected = [[11, -1, -1, 14, -1], [21, 22, 23, -1, -1]]
    assert next_token_targets(labels, documents, ignore_index=-1).tolist() == expected


def test_contradictory_inputs_are_refused(subtests: pytest.Subtests) -> None:
    for inputs, complaint in (
        ({"cu_seqlens": torch.tensor([0, 8])}, "batch must be 1"),
        ({"cu_seqlens": torch.tensor([0, 8]), "position_ids": torch.arange(8)}, "position_ids"),
        ({"max_seqlen": 8}, "cu_seqlens, which is missing"),
        ({"inputs_embeds": torch.zeros(2, 8, 32)}, "inputs_embeds: both are given"),
        ({"attention_mask": torch.ones(2, 8)}, "attention_mask is torch.float32; expected bool"),
        ({"attention_mask": torch.ones(2, 7).long()}, r"attention_mask has shape \(2, 7\); exp"),
        ({"prefix_lengths": torch.tensor([3, 2, 1])}, r"prefix_lengths has shape \(3,\)"),
        ({"position_ids": torch.arange(7)[None]}, "position_ids"),
        ({"labels": torch.zeros(2, 7, dtype=torch.int64)}, "differ in shape"),
        ({"normalizer": 3}, "need labels"),
        ({"labels": torch.zeros(2, 8, dtype=torch.int64), "reduction": "average"}, "reduction"),
    ):
        with subtests.test(complaint):
            ids, _ = tokens(2, 8)
            with pytest.raises(ValueError, match=complaint):
                tiny_model()(ids, **inputs)


def test_cu_seqlens_that_do_not_fit_the_row_are_refused() -> None:
    ids, _ = tokens(1, 8)
    with pytest.raises(ValueError, match="rise from 0 to 8"):
        tiny_model()(ids, cu_seqlens=torch.tensor([0, 5]))


def test_input_ids_of_another_shape_are_refused(subtests: pytest.Subtests) -> None:
    for shape in ((8,), (0, 8), (2, 0), (1, 2, 3)):
        with subtests.test(str(shape)):
            with pytest.raises(ValueError, match="input_ids"):
                tiny_model()(torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"input_ids is torch\.float32; expected"):
        tiny_model()(torch.zeros(2, 8))


def test_embeddings_of_another_shape_or_dtype_are_refused(subtests: pytest.Subtests) -> None:
    model = tiny_model()
    hidden = model.config.hidden_size
    for inputs, complaint in (
        ({}, "input_ids and inputs_embeds: neither is given"),
        ({"inputs_embeds": torch.zeros(8, hidden)}, rf"has shape \(8, {hidden}\); expected"),
        ({"inputs_embeds": torch.zeros(2, 8, 7)}, rf"expected \(batch, seq, {hidden}\)"),
        ({"inputs_embeds": torch.zeros(2, 0, hidden)}, "at least one token per row"),
        (
            {"inputs_embeds": torch.zeros(2, 8, hidden, dtype=torch.int64)},
            r"torch.int64 .* floating point",
        ),
    ):
        with subtests.test(complaint):
            with pytest.raises(ValueError, match=complaint):
                model(**inputs)


def test_embeddings_of_another_dtype_than_the_weights_are_refused() -> None:
    model = tiny_model(num_hidden_layers=1)
    embeds = model.embed_tokens(tokens(2, 8)[0]).detach()
    for dtype in (torch.float64, torch.bfloat16):
        message = f"inputs_embeds is {dtype}, but the model's weights are torch.float32; pass"
        with pytest.raises(ValueError, match=message):
            model(inputs_embeds=embeds.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(inputs_embeds=embeds.bfloat16()).isfinite().all()
        with pytest.raises(ValueError, match=r"inputs_embeds is torch\.float64, but"):
            model(inputs_embeds=embeds.double())
    model.layers.bfloat16()  # such as a frozen body below a float32 embedding
    assert model(inputs_embeds=embeds.bfloat16()).isfinite().all()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(inputs_embeds=embeds.bfloat16()).isfinite().all()


@pytest.mark.parametrize(
    ("rows", "at_ends"),
    [
        ([[0, 0, 1, 1], [1, 1, 1, 0]], True),
        ([[0, 0, 0, 0], [0, 1, 1, 0]], True),
        ([[1, 1, 1, 1], [1, 0, 1, 1]], False),
        ([[0, 1, 0, 1], [1, 1, 1, 1]], False),
    ],
)
def test_padding_between_tokens_is_seen_on_the_cpu(rows: list[list[int]], at_ends: bool) -> None:
    """On a GPU the kernel for padding at the ends would compute something else: see `fault`."""
    options = dict.fromkeys(("position_ids", "cu_seqlens", "max_seqlen", "prefix_lengths"))
    for dtype in (torch.bool, torch.int64):
        given = torch.tensor(rows, dtype=dtype)
        made, *_ = rows_mask(given, attention_mask=given, cache=None, shard=None, **options)
        assert made.padding_at_ends == at_ends
        assert made.padding_mask is not None and torch.equal(made.padding_mask, given.bool())


def test_label_outside_the_vocabulary_is_refused() -> None:
    ids, labels = tokens(1, 8)
    labels[0, 4] = 131
    with pytest.raises(IndexError):
        tiny_model()(ids, labels=labels)


def test_ids_outside_the_vocabulary_are_named() -> None:
    ids, labels = tokens(1, 8)
    for outside in (-1, 131, 2**40):
        ids[0, 4] = outside
        for given in ({}, {"labels": labels}):
            with pytest.raises(IndexError, match=f"input_ids: token {outside} is outside"):
                tiny_model()(ids, **given)


def test_compiled_code_takes_no_negative_id() -> None:
    """Inductor may count it from the end, so it becomes one beyond the end."""
    compiled = torch.compile(tiny_model(num_hidden_layers=1), backend="eager", fullgraph=True)
    ids, _ = tokens(1, 8)
    assert compiled(ids).isfinite().all()
    ids[0, 4] = -1
    with pytest.raises((IndexError, RuntimeError)):
        compiled(ids)


def test_positions_of_any_value_are_numbers() -> None:
    ids, _ = tokens(1, 8)
    for first in (-(2**63), -1, 2**31, 2**40, 2**63 - 8):
        positions = torch.arange(8).unsqueeze(0) + first
        assert tiny_model()(ids, position_ids=positions).isfinite().all()


def test_ids_of_an_embedding_that_has_grown_are_fine() -> None:
    model = tiny_model()
    model.embed_tokens = torch.nn.Embedding(200, model.config.hidden_size)
    ids, _ = tokens(1, 8)
    ids[0, 4] = 199
    assert model(ids).isfinite().all()
    ids[0, 4] = 200
    with pytest.raises(IndexError, match="vocabulary of 200"):
        model(ids)


def test_inputs_of_other_dtypes_are_refused(subtests: pytest.Subtests) -> None:
    ids, labels = tokens(1, 8)
    for name, dtype in (
        *(("labels", dtype) for dtype in (torch.uint8, torch.int32, torch.bool, torch.float32)),
        *(("position_ids", dtype) for dtype in (torch.bool, torch.uint8, torch.float32)),
        *(("attention_mask", dtype) for dtype in (torch.float32, torch.complex64)),
    ):
        with subtests.test(f"{name} {dtype}"):
            with pytest.raises(ValueError, match=f"{name} .*{dtype}"):
                tiny_model()(ids, **{name: labels.to(dtype)})
    with pytest.raises(ValueError, match="labels is a list"):
        tiny_model()(ids, labels=labels.tolist())
