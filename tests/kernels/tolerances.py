"""How far a result may be from float64, for each dtype: the one table of the kernels' tests."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Bounds on |ours - exact|, as root mean square and as maximum, both over all elements.

    Each is `times_eager` times the error of the same formula in eager PyTorch at that dtype, plus
    `floor` times the root mean square (the largest magnitude) of the exact result: eager's error
    can be zero by luck, where a result has few elements.
    """

    times_eager: float
    floor: float


TOLERANCES = {
    torch.float64: Tolerance(2.0, 1e-13),
    torch.float32: Tolerance(2.0, 2e-6),
    torch.bfloat16: Tolerance(1.25, 2e-3),  # half a unit in the last place is 2^-9
}


def assert_close(name: str, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Hold `ours` to the table for its dtype, with `exact` in float64 and `eager` in its dtype."""
    assert ours.shape == exact.shape, f"{name}: {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    tolerance = TOLERANCES[eager.dtype]
    exact = exact.detach().double().cpu()
    errors = [(x.detach().double().cpu() - exact).abs() for x in (ours, eager)]
    if exact.numel() == 0:
        return
    for kind, measure in (("rms", lambda x: x.square().mean().sqrt()), ("max", torch.max)):
        error, eager_error = (float(measure(e)) for e in errors)
        bound = tolerance.times_eager * eager_error + tolerance.floor * float(measure(exact.abs()))
        assert error <= bound, (
            f"{name}: {kind} error {error:.3e} over the bound {bound:.3e} "
            f"(eager {eager_error:.3e}, {eager.dtype})"
        )
