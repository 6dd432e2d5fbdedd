"""Tests of every family's contract; test_parity compares the numbers with transformers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from tests.families import FAMILIES, OWN, sampled
from tests.models.pairs import gradients, randomize, relative, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
}
each_family = pytest.mark.parametrize("family", OWN)
most_families = pytest.mark.parametrize("family", sampled(OWN))


def make(family: str, **changes: Any) -> DecoderModel:
    cls = families()[family]
    model = cls(cls.config_class(**{**SIZES, **OWN[family], **changes}))
    randomize(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += FAMILIES[family].norm_weight - 1.0
    return model


def batch() -> tuple[Tensor, Tensor]:
    return tokens(2, 14, vocab=SIZES["vocab_size"], pad=SIZES["pad_token_id"])


@each_family
def test_packed_and_padded(family: str) -> None:
    """In a row with documents and padding, each document gives the same result as alone."""
    model = make(family).double()
    ids, _ = (x[:1] for x in batch())
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]])
    together = model(ids, position_ids=positions, attention_mask=mask)
    for start, end in ((2, 9), (9, 12)):
        assert relative(together[:, start:end], model(ids[:, start:end])) <= 1e-13


@most_families
def test_autocast_stays_near_float32(family: str) -> None:
    model = make(family, **FAMILIES[family].rounded)
    ids, labels = batch()
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=labels)
        hidden = model(ids)
    out.loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    assert relative(hidden.float(), exact) < 0.05


@most_families
def test_copies_are_independent(family: str) -> None:
    model = make(family)
    ids, _ = batch()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(ids), model(ids))
        if copied.head._tied:
            assert copied.head.weight is copied.embed_tokens.weight
        with torch.no_grad():
            copied.norm.weight.add_(1.0)
        assert not torch.equal(copied(ids), model(ids))


@most_families
def test_meta_device_allocates_nothing(family: str) -> None:
    cls = families()[family]
    for tied in (False, True):
        with torch.device("meta"):
            model = cls(cls.config_class(**SIZES | OWN[family], tie_word_embeddings=tied))
        assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
        assert ("head.proj.weight" in model.state_dict()) == (not tied)


@most_families
def test_packed_documents_equal_separate_runs(family: str) -> None:
    model = make(family).double()
    ids, labels = (x[:1] for x in batch())
    lengths = [8, 1, 5]
    pieces = list(zip(ids.split(lengths, 1), labels.split(lengths, 1)))
    outputs = [model(part, labels=own, reduction="sum") for part, own in pieces]
    loss = sum(out.loss for out in outputs) / sum(out.num_valid for out in outputs)
    loss.backward()
    expected = gradients(model)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 8, 9, 14])
    inputs: list[dict[str, Any]] = [
        {"position_ids": positions},
        {"cu_seqlens": ends},
        {"cu_seqlens": ends, "max_seqlen": 8},
    ]
    for options in inputs:
        model.zero_grad()
        packed = model(ids, labels=labels, **options).loss
        packed.backward()
        assert relative(packed, loss) <= 1e-6, options
        for name, grad in gradients(model).items():
            assert relative(grad, expected[name]) <= 1e-5, (name, options)


def test_compiled_with_checkpointing_at_lengths_that_change() -> None:
    """Dynamo makes the shapes dynamic at the second length; test_parity compiles whole steps.

    tests/kernels/linear_cross_entropy/test_values.py compiles the head at several lengths.
    """
    torch._dynamo.reset()
    model = make("llama", num_hidden_layers=1, tie_word_embeddings=True)
    ids, _ = batch()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model.activation_checkpointing_enable()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (ids.shape[1], ids.shape[1] - 3):
        part, padding = ids[:, :length].contiguous(), mask[:, :length].contiguous()
        model.zero_grad()
        hidden = model(part, attention_mask=padding)
        hidden.square().sum().backward()
        expected = gradients(model)
        model.zero_grad()
        again = compiled(part, attention_mask=padding)
        again.square().sum().backward()
        torch.testing.assert_close(again, hidden)
        for name, grad in gradients(model).items():
            assert relative(grad, expected[name]) <= 1e-6, name
