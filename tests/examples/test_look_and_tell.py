"""The vision-language toy learns to read its images, and its patches see each other."""

from __future__ import annotations

import pytest
import torch

from examples import look_and_tell as toy
from ligermodels import MemoryPlan
from tests.models.pairs import gradients


@pytest.fixture
def model() -> toy.LookAndTell:
    torch.manual_seed(0)
    return toy.LookAndTell(toy.tiny_llama())


def test_it_tells_what_new_images_show(model):
    assert toy.train(model, steps=100)[-1] < 0.05
    images, texts = toy.make_examples(8, torch.Generator().manual_seed(9))
    assert model.tell(images) == [bytes(text).decode() for text in texts.tolist()]


def test_patches_see_both_directions_and_text_does_not(model):
    images, texts = toy.make_examples(1, torch.Generator().manual_seed(0))
    hidden = model.language(**model.look(images, texts))
    images[0, -4:, -4:] += 1  # the last patch
    assert (hidden != model.language(**model.look(images, texts))).any(-1).all()
    before = model.language(**model.look(images, texts))
    texts[0, -1] = ord("9")
    same = (before == model.language(**model.look(images, texts))).all(-1)[0]
    assert same.tolist() == [True] * (toy.PATCHES + 13) + [False]


def test_the_vision_layers_learn_through_a_memory_plan(model):
    images, texts = toy.make_examples(2, torch.Generator().manual_seed(0))
    model(images, texts).backward()
    expected = gradients(model)
    assert all(grad.count_nonzero() for grad in expected.values())
    for keep in ("input", "attention"):
        model.zero_grad()
        model.language.set_memory_plan(MemoryPlan.uniform(2, keep))
        model(images, texts).backward()
        assert all(torch.equal(g, expected[name]) for name, g in gradients(model).items())
