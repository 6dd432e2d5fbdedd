"""Multi-token prediction: losses and gradients against the same modules one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels.heads.multi_token import MultiTokenModel
from ligermodels.models.base import DecoderModel
from tests.models.pairs import relative
from tests.models.test_base import tokens, with_third
from tests.tiny_models import random_model

BODIES = ("llama", "gemma3_text")


def body(family: str) -> DecoderModel:
    return random_model(family, initializer_range=0.02)


@pytest.mark.parametrize("family", BODIES)
def test_the_loss(family) -> None:
    torch.manual_seed(0)
    model = MultiTokenModel(body(family), 2, weight=0.4)
    ids = torch.randint(0, 37, (2, 9))
    labels = ids.clone()
    labels[0, :3] = -100
    out = model(ids, labels=labels)

    main, wanted = model.model, []
    context = main.prepare_context(ids).layers[-1]
    hidden, embeds = main(ids), main.embed_tokens(ids)
    wanted.append(main(ids, labels=labels).loss)
    for k, module in enumerate(model.mtp, 1):
        later = torch.cat((embeds[:, k:], embeds[:, :k] * 0), 1)
        hidden = module(hidden, later, context)
        logits = main.head.logits(hidden[:, : -(k + 1)])
        wanted.append(F.cross_entropy(logits.flatten(0, 1), labels[:, k + 1 :].flatten()))
    total = wanted[0] + 0.2 * (wanted[1] + wanted[2])
    assert relative(out.loss, total) <= 1e-5
    assert relative(out.losses, torch.stack(wanted)) <= 1e-5
    assert out.num_valid.tolist() == [(labels[:, k:] != -100).sum() for k in (1, 2, 3)]
    parameters = list(model.parameters())
    grads = torch.autograd.grad(out.loss, parameters)
    for grad, want in zip(grads, torch.autograd.grad(total, parameters)):
        assert relative(grad, want) <= 1e-4


def test_the_loss_has_what_layers_add_to_it() -> None:
    main = with_third()
    model = MultiTokenModel(main, 1)
    ids, labels = tokens()
    out = model(ids, labels=labels)
    own = main(ids, labels=labels)
    added = own.auxiliary_loss
    torch.testing.assert_close(out.loss, out.losses[0] + 0.3 * out.losses[1] + added)
    half = model(ids, labels=labels, normalizer=2 * own.num_valid)
    torch.testing.assert_close(half.loss, half.losses[0] + 0.3 * half.losses[1] + added / 2)


def test_rows_shorter_than_the_modules_look_ahead() -> None:
    torch.manual_seed(0)
    model = MultiTokenModel(body("llama"), 3)
    out = model(torch.ones(2, 2, dtype=torch.int64), labels=torch.ones(2, 2, dtype=torch.int64))
    assert out.num_valid.tolist() == [2, 0, 0, 0] and out.loss > 0
    nothing = torch.full((2, 2), -100)
    assert model(torch.ones_like(nothing), labels=nothing, normalizer=0).loss == 0
