"""Learning rates by the step: a linear warm-up, then a schedule by name."""

from __future__ import annotations

import math

from ligermodels.training.config import ScheduleOptions

STABLE = 0.8  # the part of the steps after the warm-up in which `wsd` keeps the peak


def learning_rate(options: ScheduleOptions, step: int, total: int) -> float:
    """Return the learning rate of a step, counted from 0, of a run of so many steps.

    The rate has its peak at the end of the warm-up. In the last step it is `min_lr_rate` of it with
    "cosine" (half a cosine, as transformers' `cosine_with_min_lr`), "linear" and "wsd" (the peak
    for 80% of the steps, then linear). "constant" keeps the peak. With "inverse_sqrt" the rate
    falls with the root of the step, but not below `min_lr_rate` of the peak.
    """
    peak, warmup, lowest = options.learning_rate, options.warmup_steps, options.min_lr_rate
    assert peak is not None  # a run has that of its loss
    if warmup is None:
        warmup = round(0.03 * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if options.name == "inverse_sqrt":
        start = max(1, warmup)
        return peak * max(lowest, math.sqrt(start / (start + step - warmup + 1)))
    done = min(1.0, (step - warmup + 1) / max(1, total - warmup))
    return peak * (lowest + (1 - lowest) * _SHARES[options.name](done))


# By name: the share of the way from the last rate to the peak, after a part `done` of the steps.
_SHARES = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "wsd": lambda done: min(1.0, (1 - done) / (1 - STABLE)),
}
