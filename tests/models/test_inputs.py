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


def test_inputs_that_no_model_can_honour_are_refused(subtests: pytest.Subtests) -> None:
    model, (ids, labels) = tiny_model(num_hidden_layers=1), tokens(2, 8)
    hidden, ends = model.config.hidden_size, torch.tensor([0, 8])
    for inputs, complaint in (
        ({"cu_seqlens": ends}, "rise from 0 to 16"),
        ({"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 5])}, "rise from 0 to 8"),
        ({"cu_seqlens": ends, "position_ids": torch.arange(8)}, "position_ids"),
        ({"max_seqlen": 8}, "cu_seqlens, which is missing"),
        ({"labels": labels.tolist()}, "labels is a list"),
        ({"normalizer": 3}, "need labels"),
        ({"attention_masks": None}, r"attention_masks: .*; did you mean 'attention_mask'\?"),
        ({"labels": labels, "reduction": "average"}, "reduction"),
        ({"input_ids": None}, "input_ids and inputs_embeds: neither is given"),
        ({"inputs_embeds": torch.zeros(2, 8, hidden)}, "inputs_embeds: both are given"),
    ):
        with subtests.test(complaint), pytest.raises(ValueError, match=complaint):
            model(**{"input_ids": ids, **inputs})


def test_tensors_of_a_wrong_shape_or_dtype_are_named() -> None:
    model, (ids, labels) = tiny_model(num_hidden_layers=1), tokens(2, 8)
    embeds, floats = model.embed_tokens(ids).detach(), torch.zeros(2, 8)
    for name, wrong in {
        "input_ids": (ids[0], ids[:, :0], ids[None], floats),
        "inputs_embeds": (embeds[0], embeds[..., 1:], embeds[:, :0], embeds.long()),
        "labels": (labels[:, :7], labels.int(), labels.bool(), floats),
        "position_ids": (torch.arange(7)[None], ids.bool(), ids.byte(), floats),
        "attention_mask": (ids[:, :7], floats, floats.to(torch.complex64)),
        "prefix_lengths": (torch.tensor([3, 2, 1]),),
    }.items():
        for given in wrong:
            inputs = {} if name == "inputs_embeds" else {"input_ids": ids}
            with pytest.raises(ValueError, match=rf"{name} .*expected") as caught:
                model(**{**inputs, name: given})
            assert str(tuple(given.shape)) in str(caught.value) or str(given.dtype) in str(
                caught.value
            )


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


@pytest.mark.parametrize(
    ("rows", "at_ends"),
    [
        ([[0, 0, 1, 1], [1, 1, 1, 0]], True),
        ([[0, 0, 0, 0], [0, 1, 1, 0]], True),
        ([[1, 1, 1, 1], [1, 0, 1, 1]], False),
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


def test_tokens_outside_the_vocabulary_are_named() -> None:
    model, (ids, labels) = tiny_model(num_hidden_layers=1), tokens(1, 8)
    labels[0, 4] = 131
    with pytest.raises(IndexError):
        model(ids, labels=labels)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(ids).isfinite().all()
    for outside in (-1, 131, 2**40):
        ids[0, 4] = outside
        with pytest.raises(IndexError, match=f"input_ids: token {outside} is outside"):
            model(ids)
    ids[0, 4] = -1  # Inductor may count it from the end, so it becomes one beyond the end.
    with pytest.raises((IndexError, RuntimeError)):
        compiled(ids)
    model.embed_tokens = torch.nn.Embedding(200, model.config.hidden_size)
    ids[0, 4] = 199
    assert model(ids).isfinite().all()
    ids[0, 4] = 200
    with pytest.raises(IndexError, match="vocabulary of 200"):
        model(ids)


def test_positions_of_any_value_are_numbers() -> None:
    model, (ids, _) = tiny_model(), tokens(1, 8)
    for first in (-(2**63), -1, 2**31, 2**63 - 8):
        positions = torch.arange(8).unsqueeze(0) + first
        assert model(ids, position_ids=positions).isfinite().all()
