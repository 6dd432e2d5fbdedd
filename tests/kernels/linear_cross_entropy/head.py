"""Inputs, budgets and plans of a loss head, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels import kernels
from ligermodels.kernels.linear_cross_entropy.chunk_plan import ChunkPlan
from ligermodels.kernels.loss_options import CrossEntropyOutput
from tests.kernels import ops_table
from tests.kernels.checks import placed

ROWS, WIDTH, VOCAB = 23, 14, 51
LEAVES = ("hidden", "weight", "bias")
CONSTANT = ("class_weights", "token_weights", "normalizer")
"""Inputs that have no gradient."""

CUTS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"chunk_size": 9},
    # With fewer rows than columns, a single chunk keeps the gradient of its logits for backward.
    "few rows": {"width": 40},
    # Budgets that hold neither all logits nor a sum of the weight gradient. The least has no room
    # for the gradient of hidden between the passes; its pieces are small, and so is this head.
    "columns": {"shape": (WIDTH + 2,), "spare_rows": 4},
    "least": {"shape": (7,), "width": 5, "vocab": 17, "spare_rows": 0},
}
"""How a head runs: its sizes, its chunk size, or the rows of logits in its budget."""

BLOCKS = ("columns", "least")
"""The cuts that compute the weight gradient in blocks of the vocabulary."""


def inputs(
    shape: tuple[int, ...] = (ROWS,), width: int = WIDTH, vocab: int = VOCAB, **options: Any
) -> dict[str, Any]:
    """Return the inputs of the ops' table, by default of one chunk."""
    return ops_table.linear_cross_entropy(
        shape, vocab, **{"width": width, "chunk_size": None} | options
    )


def cut_inputs(
    cut: str, place: Any, op: Callable[..., Any], frozen: Collection[str] = (), **options: Any
) -> dict[str, Any]:
    """Return inputs that run as one of CUTS."""
    cut_options = dict(CUTS[cut])
    spare_rows = cut_options.pop("spare_rows", None)
    made = inputs(**cut_options, **options)
    if spare_rows is not None:
        budget = least_budget(on(place, made, frozen), op)
        made["max_scratch_bytes"] = budget + spare_rows * VOCAB * place.dtype.itemsize
    return made


def on(place: Any, made: dict[str, Any], frozen: Collection[str] = ()) -> dict[str, Any]:
    """Return the inputs on a place's device, the floating point ones as leaves of its dtype."""
    return placed(made, place, frozen, CONSTANT)


def least_budget(made: dict[str, Any], op: Callable[..., Any], **options: Any) -> int:
    """Return the least max_scratch_bytes that the op accepts, as its error message states it."""
    with pytest.raises(ValueError, match="at least") as error:
        op(**made, **options, max_scratch_bytes=1)
    return int(str(error.value).split()[-1])


def spy_on_the_plan(monkeypatch: pytest.MonkeyPatch) -> list[ChunkPlan]:
    """Return a list to which every later call of the op appends its plan."""
    module = import_module("ligermodels.kernels.linear_cross_entropy.functions")
    plans: list[ChunkPlan] = []
    inner = module.make_head

    def spy(*args: Any, **kwargs: Any) -> Any:
        head = inner(*args, **kwargs)
        plans.append(head.args.plan)
        return head

    monkeypatch.setattr(module, "make_head", spy)
    return plans


def head_loss(**options: Any) -> CrossEntropyOutput:
    """Return the outputs of `linear_cross_entropy` that its formula has."""
    made = kernels.linear_cross_entropy(**options)
    # torch 2.11 cannot compile a function that returns what _replace makes.
    known = {name: x for name, x in zip(made._fields, made) if name not in ("correct", "top_ids")}
    return CrossEntropyOutput(**known)


def both(**options: Any) -> tuple[Tensor, ...]:
    return kernels.linear_log_probs(**options, entropy=True)


# The counter sees a registered op and not the product within it. These formulas are not in the
# package because the counter imports triton.
@register_flop_formula(torch.ops.ligermodels.wide_product)
def _wide_product_flop(a, b, **_) -> int:
    return 2 * a[0] * a[1] * b[1]


@register_flop_formula(torch.ops.ligermodels.accumulate_product)
def _accumulate_product_flop(_, a, b, **__) -> int:
    return 2 * a[0] * a[1] * b[1]
