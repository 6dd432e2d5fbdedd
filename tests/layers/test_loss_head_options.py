"""Options of the loss head: defaults, overrides, and refused values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ligermodels.kernels import cross_entropy, linear_cross_entropy, linear_log_probs
from ligermodels.kernels.loss_options import LOG_PROB_OPTIONS, LOGIT_OPTIONS
from ligermodels.layers import LossHead
from ligermodels.layers.sequence_shard import SequenceShard
from tests.layers.heads import HIDDEN, SEQ, VOCAB, build, data

WRONG: dict[str, tuple[Any, str]] = {
    "reduction": ("average", "reduction='average'; expected one of"),
    "normalizer": (-4, "normalizer=-4; expected a finite number of at least 0"),
    "ignore_index": (2.5, "ignore_index=2.5; expected an integer"),
    "label_smoothing": (1.5, "label_smoothing=1.5; expected at most 1"),
    "z_loss": (-1.0, "z_loss=-1.0; expected a finite number of at least 0"),
    "softcap": (0.0, "softcap=0.0; expected a finite number of more than 0"),
    "logit_scale": (torch.tensor(0.5), r"logit_scale \(\) .*; expected a finite number"),
    "class_weights": (torch.ones(VOCAB + 1), rf"class_weights \({VOCAB + 1},\) .* expected"),
    "chunk_size": (0, "chunk_size=0; expected an integer of 1 or more"),
    "max_scratch_bytes": ("1GB", "max_scratch_bytes='1GB'; expected an integer"),
    "max_valid": (3, "max_valid=3; expected max_valid only with skip_ignored"),
    "temperature": (0.0, "temperature=0.0; expected a finite number of more than 0"),
    "top_k": (-1, "top_k=-1; expected an integer of 0 or more"),
    "return_token_stats": (2, "return_token_stats=2; expected True, False or"),
}


@pytest.mark.parametrize("option", sorted(WRONG))
def test_every_call_refuses_what_the_constructor_refuses(option: str) -> None:
    """Heads of both kinds and the ops that take the option raise the same error."""
    own, replaced = build("own")[0], build("replaced")[0]
    hidden, targets = data()
    logits = torch.randn(*targets.shape, VOCAB)
    value, complaint = WRONG[option]
    given = {option: value}
    calls: list[Callable[[], Any]] = [
        lambda: LossHead(HIDDEN, VOCAB, **given),
        lambda: own(hidden, targets, **given),
        lambda: replaced(hidden, targets, **given),
        lambda: linear_cross_entropy(hidden, own.weight, targets, **given),
    ]
    if option in LOG_PROB_OPTIONS:
        calls.append(lambda: linear_log_probs(hidden, own.weight, targets, **given))
        calls.append(lambda: replaced.log_probs(hidden, targets, **given))
    if option in LOGIT_OPTIONS:
        calls.append(lambda: cross_entropy(logits, targets, **given))
    messages = set()
    for call in calls:
        with pytest.raises(ValueError, match=rf"^(cross entropy|loss head): {complaint}") as error:
            call()
        messages.add(str(error.value))
    assert len(messages) == 1, messages


@pytest.mark.parametrize("kind", ["own", "tied", "replaced"])
def test_bad_calls_are_refused(kind: str) -> None:
    head, _, _ = build(kind)
    hidden, targets = data()
    elsewhere = torch.rand(VOCAB, device="meta")
    for given, options, complaint in (
        (targets[:, :-1], {}, "targets"),
        # The targets fill whole chunks, but the last chunk's targets are missing.
        (targets[:2], {"chunk_size": SEQ}, "targets"),
        (targets.flatten(), {}, "targets"),  # as many targets as rows
        (targets.to("meta"), {}, "targets .* on meta; expected .* on cpu"),
        (targets, {"class_weights": elsewhere}, "class_weights .* on meta; expected .* on cpu"),
        (targets, {"reduction": "sum", "normalizer": 3}, "normalizer"),
        (targets, {"normalizer": torch.ones(1)}, r"normalizer \(1,\)"),
        (targets, {"chunk_size": 1.5}, "^loss head: chunk_size=1.5"),
        (targets, {"max_scratch_bytes": 10}, "^loss head: max_scratch_bytes"),
        (
            targets,
            {"skip_ignored": True, "max_valid": 1},
            "^loss head: max_valid=1; expected",
        ),
    ):
        with pytest.raises(ValueError, match=complaint):
            head(hidden, given, **options)
    with pytest.raises(IndexError):
        head(hidden, targets.masked_fill(targets == -100, VOCAB))
    with pytest.raises(TypeError, match=r"unknown options \['z_loss'\]"):
        head.log_probs(hidden, targets, z_loss=0.1)
    with pytest.raises(TypeError, match=r"\['foo'\]; known: .*label_smoothing"):
        LossHead(8, 5, foo=1)
    if kind == "replaced":
        head.vocab_shard = object()
        with pytest.raises(ValueError, match="vocabulary is split over ranks"):
            head(hidden, targets)


@pytest.mark.parametrize("kind", ["own", "replaced"])
def test_class_weights_move_with_the_head(kind: str) -> None:
    weights = torch.rand(VOCAB)
    head, _, _ = build(kind, class_weights=weights)
    assert "class_weights" not in head.state_dict()
    hidden, targets = data()
    plain = build(kind)[0]
    for given in (weights, None):  # a call's value replaces the default
        wanted = plain(hidden, targets, class_weights=given).loss
        options = {} if given is weights else {"class_weights": None}
        assert torch.equal(head(hidden, targets, **options).loss, wanted)
    head.to("meta")
    loss = head(hidden.to("meta"), targets.to("meta")).loss
    assert loss.device.type == head.class_weights.device.type == "meta"


@pytest.mark.parametrize("kind", ["own", "replaced"])
@pytest.mark.parametrize("count", [40, torch.tensor(40)], ids=str)
def test_num_items_in_batch_is_another_name_of_normalizer(kind: str, count: Any) -> None:
    """HF's Trainer passes it. None means: not given. A call's value overrides the constructor's."""
    head, _, _ = build(kind, normalizer=7)
    hidden, targets = data()
    expected = head(hidden, targets, normalizer=count).loss
    for options in ({}, {"normalizer": None}):
        loss = head(hidden, targets, num_items_in_batch=count, **options).loss
        assert torch.equal(loss, expected)
    loss = head(hidden, targets, num_items_in_batch=None).loss
    assert torch.equal(loss, head(hidden, targets).loss)
    with pytest.raises(ValueError, match="normalizer and num_items_in_batch are two names"):
        head(hidden, targets, normalizer=3, num_items_in_batch=count)
    with pytest.raises(ValueError, match=r"normalizer=-1; expected a finite number of at least 0"):
        head(hidden, targets, num_items_in_batch=-1)


def test_a_loss_function_takes_few_options() -> None:
    hidden, targets = data()
    head, *_ = build("own")

    def total(tokens, rows):
        return tokens.log_probs.sum()

    for option in (
        {"reduction": "sum"},
        {"token_weights": targets.float()},
        {"return_token_loss": True},
        {"num_items_in_batch": 3},
    ):
        name = "normalizer" if "num_items_in_batch" in option else next(iter(option))
        with pytest.raises(ValueError, match=f"{name} cannot be combined with a loss_function"):
            head(hidden, targets, loss_function=total, **option)
    with pytest.raises(ValueError, match="group_size"):
        head(hidden, targets, loss_function=total, group_size=0)
    with pytest.raises(ValueError, match="group_size=2 is only for a loss_function"):
        head(hidden, targets, group_size=2)
    for kind in ("own", "replaced"):
        head, *_ = build(kind, return_token_stats=True)  # a default, which reaches the function
        entropies = head(hidden, targets, loss_function=lambda tokens, _: tokens.entropy.sum())
        assert entropies.loss > 0
        with pytest.raises(ValueError, match=f"whole groups of group_size={len(hidden) + 1}"):
            head(hidden, targets, loss_function=total, group_size=len(hidden) + 1)
        with pytest.raises(ValueError, match="expected a scalar tensor"):
            head(hidden, targets, loss_function=lambda tokens, _: tokens.log_probs)
    with pytest.raises(ValueError, match="loss_function: it needs whole rows"):
        SequenceShard(None, 2, 0).loss(head, hidden, targets, {"loss_function": total})
