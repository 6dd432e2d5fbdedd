"""Multi-token prediction: losses and gradients against the modules one by one, and decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.multi_token import MultiTokenModel, main
from ligermodels.generation.generate import stream
from ligermodels.models.base import DecoderModel
from tests.generation.test_draft import VOCAB, drafted, each, with_heads
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


def guesses_of_a_whole_forward(modules: MultiTokenModel, ids: torch.Tensor) -> list[int]:
    """Return what the modules guess after ids, from forwards over all tokens, without caches."""
    model, hidden = modules.model, modules.model(ids[:, :-1])
    for k, module in enumerate(modules.mtp, 1):
        context = model.prepare_context(hidden).layers[-1]
        embeds = model.embed_tokens(ids[:, k:])
        hidden = module(hidden, embeds, context)
        guess = model.head.logits(hidden[:, -1:]).argmax(-1)
        ids = torch.cat((ids, guess), 1)
    return ids[0, -len(modules.mtp) :].tolist()


@each
def test_multi_token_modules(family: str) -> None:
    """The tokens are the greedy ones, and the caches change no guess."""
    prompt_length = 1 if family == "llama" else 6
    model, _ = with_heads(family)
    modules = MultiTokenModel(model, 3)
    for module in modules.mtp:
        torch.nn.init.normal_(module.proj.weight, std=0.3)
    prompt = torch.randint(0, VOCAB, (1, prompt_length), generator=torch.Generator().manual_seed(5))
    greedy = model.generate(prompt, max_new_tokens=30, eos_token_id=[])
    optimizer = torch.optim.Adam(modules.mtp.parameters(), lr=3e-3)
    for _ in range(40):  # until the modules know the greedy tokens by heart
        modules(greedy, labels=greedy).loss.backward()
        optimizer.step()
        modules.zero_grad()
    drafter, length, made = modules.drafter(64, None), 0, []
    with torch.no_grad():
        hidden = model(greedy)
        while length < 25:
            start, seq = length, 4 if length else 6  # the first pass is that of a prompt
            right = seq
            if start:
                agree = made[-1][0] == greedy[0, start + 1 : start + 4]
                right = min(int(agree.long().cumprod(0).sum()) + 1, 1 + len(made) % 4)
            states, tokens = hidden[:, start : start + seq], greedy[:, start : start + seq + 1]
            states, tokens = states.clone(), tokens.clone()
            states[:, right:], tokens[:, right + 1 :] = torch.nan, 3
            length = start + right
            made.append(drafter(states, tokens, torch.tensor([right]), torch.tensor([length]))[0])
            expected = guesses_of_a_whole_forward(modules, greedy[:, : length + 1])
            assert made[-1][0].tolist() == expected
    ids, passes = drafted(model, modules, prompt, max_new_tokens=30, eos_token_id=[])
    assert torch.equal(ids, greedy) and len(passes) <= 20
    streamed = stream(model, prompt, heads=modules, max_new_tokens=30, eos_token_id=[])
    assert [*streamed] == greedy[0, prompt_length:].tolist()
    with pytest.raises(ValueError, match="belong to another model"):
        random_model(family).generate(prompt, heads=modules)


def test_the_example(tmp_path: Path) -> None:
    found = main(tmp_path, max_steps=3, new=12)
    assert 1 <= found["tokens_per_forward"] <= 3
