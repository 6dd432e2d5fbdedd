"""Learning rates by the step: a linear warm-up, then a schedule by name."""

from __future__ import annotations

import math

STABLE = 0.8  # the part of the steps after the warm-up in which `wsd` keeps the peak


def learning_rate(
    step: int,
    total: int,
    peak: float,
    warmup: int,
    min_lr_rate: float,
    schedule: str = "cosine",
) -> float:
    """Return the learning rate of a step, counted from 0.

    The rate is `peak` at the end of the warm-up. In the last step it is `min_lr_rate * peak` with
    "cosine" (half a cosine, as transformers' `cosine_with_min_lr`), "linear" and "wsd" (the peak
    for 80% of the steps, then linear). "constant" keeps the peak. With "inverse_sqrt" the rate
    falls with the root of the step, but not below `min_lr_rate * peak`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "inverse_sqrt":
        start = max(1, warmup)
        return peak * max(min_lr_rate, math.sqrt(start / (start + step - warmup + 1)))
    done = min(1.0, (step - warmup + 1) / max(1, total - warmup))
    return peak * (min_lr_rate + (1 - min_lr_rate) * _SHARES[schedule](done))


# By name: the share of the way from the last rate to the peak, after a part `done` of the steps.
_SHARES = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "wsd": lambda done: min(1.0, (1 - done) / (1 - STABLE)),
}
