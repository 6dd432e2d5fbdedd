"""The loss head against formulas in float64, with its own, a tied or a replaced projection."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ligermodels import LigerLlama, kernels
from ligermodels.layers import HeadOutput, LossHead, loss_head
from ligermodels.models.llama import LlamaConfig
from tests.layers.heads import HIDDEN, KINDS, VOCAB, build, data, make
from tests.models.pairs import relative

STATS = ("log_probs", "entropy", "correct", "sum_sq_probs", "mean_logits")
CLASS_WEIGHTS = torch.linspace(0.1, 2.0, VOCAB)
# The options that change the logits; `log_probs` and `from_log_probs` take them, too.
OF_LOGITS: dict[str, list[Any]] = {
    "softcap": [None, 3.0],
    "logit_scale": [1.0, 0.3],
    "temperature": [1.0, 0.7],
    "ignore_index": [-100, 0],
}
OF_LOSS: dict[str, list[Any]] = {
    "reduction": ["mean", "sum", "none"],
    "label_smoothing": [0.0, 0.2],
    "z_loss": [0.0, 0.05],
    "class_weights": [None, CLASS_WEIGHTS],
    "weight_grad_in_forward": [False, True],
}


def expected(
    rows: list[Tensor | None], targets: Tensor, given: dict[str, Any]
) -> dict[str, Tensor]:
    """Return what a head says: what the op says of it in float64."""
    hidden, weight, bias = rows
    out = kernels.linear_cross_entropy(hidden, weight, targets, bias, **given)
    named = {name: x for name, x in zip(out._fields, out) if x is not None}
    return {
        name if name.endswith("loss") else f"token_{name}": x
        for name, x in named.items()
        if name not in ("correct", "top_ids")
    }


def assert_close(
    found: Tensor, wanted: Tensor, leaves: list[Tensor], wide: list[Tensor], case: Any
) -> None:
    """Compare two results and, if they have any, their gradients for a random upstream one."""
    assert found.shape == wanted.shape, case
    assert relative(found, wanted) <= 2e-6, case
    taken = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    if not found.requires_grad or not taken:
        return
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad(found, [leaves[i] for i in taken], upstream, retain_graph=True)
    exact = torch.autograd.grad(
        wanted, [wide[i] for i in taken], upstream.double(), retain_graph=True
    )
    for grad, want in zip(grads, exact):
        assert relative(grad, want) <= 1e-5, case


@pytest.mark.parametrize(
    "seed", [pytest.param(x, marks=[pytest.mark.long] if x > 2 else []) for x in range(6)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_with_options_drawn_at_random(kind: str, seed: int) -> None:
    """Losses, statistics and gradients do not depend on chunks, skipped rows or frozen parts."""
    draw = random.Random(f"{kind} {seed}")
    of_logits = {name: draw.choice(values) for name, values in OF_LOGITS.items()}
    given = of_logits | {name: draw.choice(values) for name, values in OF_LOSS.items()}
    hidden, targets = data(seed)
    targets = targets.masked_fill(targets == -100, given["ignore_index"])
    valid = targets != given["ignore_index"]
    alternatives = torch.stack((targets.clamp(min=0), targets * 0 + 5, targets * 0 - 1), -1)
    if given["reduction"] == "mean" and draw.random() < 0.5:
        given["normalizer"] = draw.choice([40, torch.tensor(40)])
    if draw.random() < 0.5:
        weights = torch.linspace(-1, 1, targets.numel()).view_as(targets)
        given["token_weights"] = weights.masked_fill(~valid, torch.nan)  # not looked at
    how: dict[str, Any] = {"chunk_size": draw.choice([None, 1, 5, 1000])}
    if draw.random() < 0.5:
        how |= {"skip_ignored": True, "max_valid": draw.choice([None, 25])}
    asked = {"return_token_stats": STATS, "alternatives": alternatives, "top_k": 2}
    case = given, how

    # Options may be defaults of the constructor.
    defaults = {name: given[name] for name in OF_LOGITS | OF_LOSS if draw.random() < 0.5}
    of_call = {name: x for name, x in given.items() if name not in defaults}
    head, weight, bias = build(kind, **defaults)
    leaves = [hidden, weight, *([] if bias is None else [bias])]
    for frozen in draw.sample(leaves, draw.choice([0, 0, 1, len(leaves)])):
        frozen.requires_grad_(False)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    rows = [*wide, None][:3]
    wanted = expected(rows, targets, given | asked)
    out = head(hidden, targets, **asked, **how, **of_call)
    assert isinstance(out, HeadOutput)
    assert out.num_valid == valid.sum() and out.num_valid.dtype == torch.int64
    assert not out.z_loss.requires_grad
    trains = any(x.requires_grad for x in leaves)
    assert out.loss.requires_grad == trains
    assert out.token_log_probs.requires_grad == (trains and given["reduction"] == "none")
    top = head.logits(hidden).topk(2).indices
    assert torch.equal(out.token_top_ids[valid], top[valid])
    assert torch.equal(out.token_correct, (top[..., 0] == targets) & valid)
    for name, want in wanted.items():
        assert_close(getattr(out, name), want, leaves, wide, (name, case))

    of_logits = {name: x for name, x in given.items() if name in OF_LOGITS}
    log_probs, entropy = kernels.linear_log_probs(
        *rows[:2], targets, rows[2], entropy=True, **of_logits
    )
    options = {name: x for name, x in of_logits.items() if name not in defaults} | how
    found = head.log_probs(hidden, targets, entropy=True, **options)
    assert_close(found[0], log_probs, leaves, wide, case)
    assert_close(found[1], entropy, leaves, wide, case)
    whole = head.from_log_probs(
        hidden,
        targets,
        lambda tokens, _: tokens.log_probs.square().sum() + tokens.entropy.sum(),
        return_token_stats=("log_probs", "entropy"),
        **options,
    )
    assert_close(whole, log_probs.square().sum() + entropy.sum(), leaves, wide, case)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_unasked_and_nothing_valid(kind: str) -> None:
    head, weight, _ = build(kind)
    hidden, targets = data()
    out = head(hidden, targets)
    assert [x for x in out if x is not None] == [out.loss, out.z_loss, out.num_valid]
    assert head.log_probs(hidden, targets)[1] is None
    for options in ({"reduction": "none"}, {"reduction": "sum"}, {}, {"normalizer": 0}):
        out = head(hidden, torch.full_like(targets, -100), z_loss=0.1, **options)
        assert out.num_valid == 0
        for x in (out.loss, *torch.autograd.grad(out.loss.sum(), [hidden, weight])):
            assert x.abs().sum() == 0, options


def test_the_output_is_a_tuple_with_the_loss_first() -> None:
    """The trainers of DeepSpeed and HF read output[0]; wrappers find its tensors as a pytree."""
    head, _ = make()
    out = head(*data(), return_token_loss=True)
    assert isinstance(out, tuple) and out[0] is out.loss
    leaves, structure = tree_flatten(out)
    assert [x is y for x, y in zip(leaves, out)] == [True] * len(out)
    assert isinstance(tree_unflatten(leaves, structure), HeadOutput)


def test_a_planned_chunk_is_used_unless_a_chunk_or_a_budget_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Any] = []
    real = loss_head.linear_loss

    def recorded(*args: Any) -> Any:
        used.append((args[4].chunk_size, args[4].max_scratch_bytes))
        return real(*args)

    monkeypatch.setattr(loss_head, "linear_loss", recorded)
    head, _, _ = build("own")
    hidden, targets = data()
    head(hidden, targets)
    head.planned_chunk_size = 3
    for options in ({}, {"chunk_size": 4}, {"max_scratch_bytes": 2**20}):
        head(hidden, targets, **options)
    assert used == [(None, None), (3, None), (4, None), (None, 2**20)]


@pytest.mark.parametrize("kind", ["tied", "replaced"])
def test_autocast(kind: str) -> None:
    """The products are in bfloat16; values and gradients are in float32, and near the exact ones.

    `test_grid.py` compares the op with eager PyTorch under autocast.
    """
    head, weight, _ = build(kind, softcap=3.0, temperature=0.7, chunk_size=5)
    hidden, targets = data()
    asked = {"return_token_stats": STATS, "top_k": 2, "reduction": "none"}
    results = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = head(hidden, targets, **asked)
            whole = head.from_log_probs(hidden, targets, lambda t, _: t.log_probs.square().sum())
        values = [whole, *(x for x in out if x is not None and x.requires_grad)]
        total = sum(x.square().sum() for x in values)
        results.append([*values, *torch.autograd.grad(total, [hidden, weight])])
    assert not torch.equal(results[0][0], results[1][0])
    for found, exact in zip(*results, strict=True):
        assert found.dtype == torch.float32 and relative(found, exact) <= 2e-2


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str) -> None:
    """A plain projection computes them in any dtype; the weights need not have it."""
    head, weight, bias = build(kind, softcap=2.0, logit_scale=0.7)
    hidden, _ = data()
    wide = [None if x is None else x.double() for x in (hidden, weight, bias)]
    wanted = 2.0 * torch.tanh(0.7 * F.linear(*wide) / 2.0)
    logits = head.logits(hidden[:, -1], dtype=torch.float64)
    assert logits.dtype == torch.float64 and head.logits(hidden).dtype == torch.float32
    assert relative(logits, wanted[:, -1]) <= (1e-6 if "replaced" in kind else 1e-14)
    assert relative(head.logits(hidden), wanted) <= 1e-6
    if kind == "own":
        head.proj = nn.Sequential(head.proj)  # which has no weight
        assert relative(head.logits(hidden), wanted) <= 1e-6


def test_a_tie_follows_the_embedding() -> None:
    """The tie survives loading with assign, conversion, copies and pickles."""
    head, embedding = make(tied=True)
    assert not list(head.parameters()) and not head.state_dict() and not list(head.children())
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    assert list(model.state_dict()) == ["embedding.weight"]
    model.load_state_dict({"embedding.weight": torch.ones(VOCAB, HIDDEN)}, assign=True)
    assert head.weight is embedding.weight
    model.to(torch.bfloat16)
    assert head.weight.dtype == torch.bfloat16
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert twin["head"].weight is twin["embedding"].weight is not head.weight
    other = nn.Embedding(VOCAB, HIDDEN)
    head.tie(other)
    assert head.weight is other.weight
    with pytest.raises(ValueError, match="no bias"):
        LossHead(HIDDEN, VOCAB, bias=True, tied_to=embedding)
    with pytest.raises(ValueError, match=rf"weight of \({VOCAB}, .*expected \({VOCAB + 1}, "):
        LossHead(HIDDEN, VOCAB + 1, tied_to=embedding)


def test_statistics_and_a_loss_function_through_a_model() -> None:
    """The layers' own loss stays apart, as with reduction "none", and a plan's chunk is used."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LigerLlama(config)
    block = model.layers[0].forward
    model.layers[0].forward = lambda *args, **kwargs: (*block(*args, **kwargs), torch.tensor(0.5))
    model.head.planned_chunk_size = 14
    ids = torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(1))
    seen = []

    def of_rows(tokens, rows):
        seen.append(rows)
        return tokens.log_probs.sum(1).square().sum() + tokens.entropy.sum()

    stats = ("log_probs", "entropy")
    out = model(ids, labels=ids, loss_function=of_rows, group_size=2, return_token_stats=stats)
    assert seen == [slice(0, 2), slice(2, 4)]
    assert out.auxiliary_loss == 0.5 and out.num_valid == 24 and out.token_log_probs is None
    tokens = model(ids, labels=ids, reduction="none", return_token_stats=stats)
    want = tokens.token_log_probs.sum(1).square().sum() + tokens.token_entropy.sum()
    assert relative(out.loss, want) <= 1e-6
    parameters = list(model.parameters())
    for grad, exact in zip(*(torch.autograd.grad(x, parameters) for x in (out.loss, want))):
        assert relative(grad, exact) <= 1e-5
