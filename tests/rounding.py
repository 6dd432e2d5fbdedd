"""AdamW whose weights may be compared between computations that sum in different orders.

With its usual epsilon of 1e-8, AdamW divides a gradient that is all rounding by itself. It then
moves that weight by the whole learning rate, in a direction that the order of a sum decides.

With a larger epsilon e, an error d of the gradients moves a weight by little. A step is
lr * m / (sqrt(v) + e), where m and v are weighted means of the gradients and of their squares. If
each gradient changes by at most d, so do m and sqrt(v), which is a norm. The inequality of Cauchy
and Schwarz gives |m| <= 1.05 * sqrt(v) in the first ten steps with the usual betas. The step
therefore changes by at most lr * d / e * 2.05. With e = 1e-3, a learning rate of 1e-3 and d = 1e-7,
which is the rounding of gradients of about 1, that is 2e-7. With e = 1e-8 it can be the whole step.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

ADAM_EPSILON = 1e-3


class SteadyAdamW(torch.optim.AdamW):
    """AdamW with that epsilon, whatever it is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"eps": ADAM_EPSILON})


def steady_adamw() -> Any:
    """Replace torch's AdamW in a function or a `with` block, for code that names no epsilon."""
    return patch("torch.optim.AdamW", SteadyAdamW)
