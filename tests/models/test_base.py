"""Tests of every model's contract, on LigerLlama: losses, inputs, meta device, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ligermodels import LigerLlama, LlamaConfig
from ligermodels.layers import HeadOutput
from tests.models.pairs import PAD, gradients, relative, step, tiny_model, tokens


def test_loss_is_the_forward_loss() -> None:
    model = tiny_model()
    ids, labels = tokens()
    out = step(model, ids, labels=labels)
    assert isinstance(out, HeadOutput)
    assert out.num_valid.item() == (labels[:, 1:] != -100).sum().item()
    assert model.embed_tokens.weight.grad[PAD].abs().sum() == 0
    assert torch.equal(model.loss(ids, labels), out.loss)
    smooth = model.loss(ids, labels, label_smoothing=0.1, z_loss=1e-3)
    logits = model.head.logits(model(ids))[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    z = 1e-3 * logits.logsumexp(-1).square()[targets != -100].mean()
    assert smooth.item() == pytest.approx((expected + z).item(), rel=1e-5)


def test_loss_of_num_items_in_batch() -> None:
    """transformers' Trainer passes this argument when steps accumulate gradients."""
    model = tiny_model()
    ids, labels = tokens()
    expected = model(ids, labels=labels, normalizer=50).loss
    for count in (50, torch.tensor(50)):
        assert torch.equal(model(ids, labels=labels, num_items_in_batch=count)[0], expected)
    with pytest.raises(ValueError, match="normalizer and num_items_in_batch"):
        model(ids, labels=labels, num_items_in_batch=50, normalizer=50)


def test_contradictory_inputs_are_refused(subtests: pytest.Subtests) -> None:
    for inputs, complaint in (
        ({"cu_seqlens": torch.tensor([0, 8])}, "batch must be 1"),
        ({"cu_seqlens": torch.tensor([0, 8]), "position_ids": torch.arange(8)}, "position_ids"),
        ({"max_seqlen": 8}, "cu_seqlens, which is missing"),
        ({"attention_mask": torch.ones(2, 7)}, "attention_mask"),
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


def test_meta_device_allocates_nothing() -> None:
    with torch.device("meta"):
        model = LigerLlama(LlamaConfig.preset("llama-3.1-405b"))
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert not any(tensor.untyped_storage().data_ptr() for tensor in tensors)


def test_meta_model_materialises_with_exact_frequencies() -> None:
    model = tiny_model()
    with torch.device("meta"):
        empty = LigerLlama(model.config)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    ids, _ = tokens()
    assert torch.equal(empty(ids), model(ids))


# test_parity compiles plain inputs, documents and the tied head without checkpointing.
@pytest.mark.parametrize(
    ("inputs", "checkpointing"), [("options", False), ("packed", True), ("tied", True)]
)
def test_compiled_equals_eager(inputs: str, checkpointing: bool) -> None:
    model = tiny_model(num_hidden_layers=2, tie_word_embeddings=inputs == "tied")
    ids, labels = tokens()
    assert (labels == -100).any()
    options: dict[str, Any] = {}
    if inputs == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(13)])
        options = {"position_ids": positions.expand(2, -1)}
    elif inputs == "options":
        options = {"label_smoothing": 0.1, "z_loss": 1e-3, "normalizer": 17, "chunk_size": 16}
    expected = step(model, ids, labels=labels, **options)
    reference = gradients(model)
    if checkpointing:
        model.activation_checkpointing_enable()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    out = compiled(ids, labels=labels, **options)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert out.num_valid == expected.num_valid
    for name, grad in gradients(model).items():
        assert relative(grad, reference[name]) <= 1e-5, name
