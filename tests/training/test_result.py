"""What a run returns."""

from __future__ import annotations

from pathlib import Path

from ligermodels.training.reports import FinetuneResult


def test_losses_and_perplexities_are_those_of_the_evaluations() -> None:
    given = {"output_dir": Path("o"), "model_dir": Path("o/model"), "steps": 1, "loss": 1.0}
    given |= {"shown": ("eval_perplexity", "perplexity"), "metrics": [], "model": None}
    after = {"eval_loss": 2.0, "eval_perplexity": 7.389}
    result = FinetuneResult(**given, eval_before={}, eval_after=after)
    assert result.eval_loss_before is None and result.perplexity_before is None
    assert result.eval_loss_after == 2.0 and result.perplexity_after == 7.389
    pairs = FinetuneResult(**given, eval_before={}, eval_after={"eval_loss": 0.5})
    assert pairs.perplexity_after is None
