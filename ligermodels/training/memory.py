"""The memory plan of a fine-tuning run."""

from collections import Counter
from typing import Any

import torch

from ligermodels.memory.byte_sizes import GIB
from ligermodels.memory.fit import Planner
from ligermodels.memory.plan import MemoryPlan
from ligermodels.models.base import DecoderModel


def weight_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the weights at a precision of FinetuneConfig."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def planner(
    model: DecoderModel,
    budget: int | str,
    *,
    precision: str,
    accumulates: bool = False,
    **options: Any,
) -> Planner:
    """Return a planner for the training steps of a run: packed rows, and AdamW's states.

    A head that skips the rows without a target needs less than it plans for.

    Args:
        model: its weights have the dtype of `precision`.
        budget: bytes, as an int or a text, or "auto".
        precision: that of FinetuneConfig.
        accumulates: whether gradients exist before forward, because a step has several batches.
        options: those of `Planner`, such as the rates.
    """
    return Planner(
        model,
        budget,
        autocast=torch.bfloat16 if precision == "bf16-mixed" else None,
        packed=True,
        gradients="kept" if accumulates else "new",
        **options,
    )


def summary(plan: MemoryPlan) -> str:
    """Describe a plan that has a prediction in one line."""
    said = plan.prediction
    assert said is not None
    counts = Counter(map(str, plan.layers))
    levels = ", ".join(f"{count} layers keep {level}" for level, count in counts.most_common())
    tiles = "" if plan.mlp_tile is None else f", MLPs handle {plan.mlp_tile} tokens at once"
    return (
        f"{levels}{tiles}; predicted peak {said.peak_bytes / GIB:.2f} GiB of "
        f"{said.budget / GIB:.2f} GiB for {said.batch} x {said.seq} tokens"
    )
