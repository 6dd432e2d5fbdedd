"""The memory plan of a fine-tuning run."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from ligermodels.layers.fusion import is_sharded
from ligermodels.memory.byte_sizes import GIB
from ligermodels.memory.fit import Planner
from ligermodels.memory.plan import MemoryPlan, keeping
from ligermodels.memory.rates import data_sheet, gpu_bytes
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig


def weight_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the trained weights at a precision of FinetuneConfig."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def frozen_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights that no optimizer updates: the one in which they are used."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def planner(
    model: DecoderModel,
    budget: int | str,
    *,
    precision: str,
    accumulates: bool = False,
    **options: Any,
) -> Planner:
    """Return a planner for the training steps of a run with packed rows.

    A head that skips the rows without a target needs less than it plans for.

    Args:
        model: its weights have the dtype of `precision`.
        budget: bytes, as an int or a text, or "auto".
        precision: that of FinetuneConfig.
        accumulates: whether gradients exist before forward, because a step has several batches.
        options: those of `Planner`, such as the optimizer; by default it is AdamW.
    """
    # Sharded weights are gathered in bfloat16 instead.
    casts = precision == "bf16-mixed" and not any(map(is_sharded, model.parameters()))
    return Planner(
        model,
        budget,
        autocast=torch.bfloat16 if casts else None,
        packed=True,
        gradients="kept" if accumulates else "new",
        **options,
    )


def summary(plan: MemoryPlan) -> str:
    """Describe a plan that has a prediction in one line."""
    said = plan.prediction
    assert said is not None
    counts = Counter(map(str, plan.layers))
    policies = ", ".join(
        f"{count} {keeping(count)} {policy}" for policy, count in counts.most_common()
    )
    return (
        f"{policies}; predicted peak {said.peak_bytes / GIB:.2f} GiB of "
        f"{said.budget / GIB:.2f} GiB for {said.batch} x {said.seq} tokens"
    )


@dataclass(frozen=True)
class Outlook:
    """What fits into a budget.

    Attributes:
        plan: the fastest plan that fits, or None if none fits.
        budget, least_bytes: the budget, and the smallest one with which the batch fits, in bytes.
        largest_batch: with rows of the same length, within 2%.
        largest_seq: with as many rows, within 2%.
        rates: where the rates of the device come from.
    """

    plan: MemoryPlan | None
    budget: int
    least_bytes: int
    largest_batch: int
    largest_seq: int
    rates: str


def outlook(
    family: type[DecoderModel],
    config: ModelConfig,
    batch: int,
    seq: int,
    *,
    budget: str | None = None,
    gpu: str | None = None,
    precision: str = "bf16-mixed",
) -> Outlook:
    """Plan the fine-tuning of a model that need not exist, with all weights trained.

    Args:
        batch, seq: rows, and tokens of each row.
        budget: bytes of GPU memory as a text. By default, and for "auto", all of the GPU: of `gpu`,
            or the bytes that are free on the GPU of this machine.
        gpu: a GPU with a data sheet, such as "H200". By default that of this machine, or an H100.
        precision: that of FinetuneConfig.
    Raises:
        ConfigError: the GPU is not known, or the budget cannot be read.
    """
    with torch.device("meta"):
        model = family(config).to(weight_dtype(precision))
    rates = None
    if gpu is not None or not torch.cuda.is_available():
        gpu = gpu or "H100"
        if budget in (None, "auto"):
            budget = str(gpu_bytes(gpu))
        rates = data_sheet(gpu, torch.float32 if precision == "float32" else torch.bfloat16)
    found = planner(model, budget or "auto", precision=precision, rates=rates)
    least = found.least_bytes(batch, seq)
    return Outlook(
        plan=found.plan(batch, seq) if least <= found.budget else None,
        budget=found.budget,
        least_bytes=least,
        largest_batch=found.largest_batch(seq),
        largest_seq=found.largest_seq(batch),
        rates=found.rates.source,
    )
