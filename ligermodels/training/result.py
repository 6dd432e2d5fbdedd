"""What a run returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ligermodels.models.base import DecoderModel


@dataclass(kw_only=True)
class FinetuneResult:
    """The result of a run. Losses are per token, in nats; perplexity is their exponential.

    `model_dir` is the folder of the export, and `model` is the trained model in the export's dtype.
    `eval_before` and `eval_after` hold the metrics of the first and the last evaluation; they are
    empty if no data was held out. `shown` is the key of the metric that matters most, and its name.
    A loss is None if a resumed run found a metrics.jsonl without it, or nothing was held out.
    """

    output_dir: Path
    model_dir: Path
    steps: int
    loss: float | None
    eval_before: dict[str, float]
    eval_after: dict[str, float]
    shown: tuple[str, str]
    metrics: list[dict[str, Any]] = field(repr=False)
    model: DecoderModel = field(repr=False)
    notes: list[str] = field(default_factory=list, repr=False)

    @property
    def eval_loss_before(self) -> float | None:
        """Held-out loss of the original checkpoint."""
        return self.eval_before.get("eval_loss")

    @property
    def eval_loss_after(self) -> float | None:
        """Held-out loss of the trained weights."""
        return self.eval_after.get("eval_loss")

    @property
    def perplexity_before(self) -> float | None:
        """Held-out perplexity of the original checkpoint; None if the loss is another one."""
        return self.eval_before.get("eval_perplexity")

    @property
    def perplexity_after(self) -> float | None:
        """Held-out perplexity of the trained weights; None if the loss is another one."""
        return self.eval_after.get("eval_perplexity")
