"""The tolerances of all kernel tests: how far a result may be from float64, for each dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Bounds on |ours - exact|, as root mean square and as maximum over all elements.

    Each bound is a sum of three terms: `times_eager` times the error of the same formula in eager
    PyTorch at that dtype, `floor` times the same measure of the exact result, and `absolute`. The
    floor is needed because eager's error can be zero by luck. It shrinks as more elements
    contribute to the measure. For the maximum it is at least two roundings of the largest element.
    """

    times_eager: float
    floor: float
    # For results that are zero except for rounding, such as the gradient of a norm over one column.
    # In float32 it is a rounding of each of two terms of size one, which cancel each other.
    absolute: float


TOLERANCES = {
    torch.float64: Tolerance(2.0, 1e-13, 1e-15),
    torch.float32: Tolerance(2.0, 2e-6, 2.0**-22),
    # times_eager is 1.5 because the loss head rounds a gradient before and after it multiplies by
    # the upstream gradient, which gives sqrt(2) times the error of one rounding. The floor is the
    # largest relative error of one rounding.
    torch.bfloat16: Tolerance(1.5, 2.0**-8, 1e-6),
    torch.float16: Tolerance(1.5, 2.0**-11, 1e-6),
}


def assert_close(name: str, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that `ours` is within the bounds of eager's dtype; `exact` is in float64."""
    assert ours.shape == exact.shape, f"{name}: {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    tolerance = TOLERANCES[eager.dtype]
    exact = exact.detach().double()
    ours_error, eager_error = ((x.detach().to(exact) - exact).abs() for x in (ours, eager))
    if exact.numel() == 0:
        return
    squares = exact.square()
    weighing = float(squares.sum().square() / squares.square().sum().clamp_min(1e-300))
    luck = 1 / 8 + 4 * max(weighing, 1.0) ** -0.5

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean().sqrt()

    for kind, measure, share in (("rms", rms, luck), ("max", torch.max, max(luck, 2.0))):
        error, eagers, size = (float(measure(x)) for x in (ours_error, eager_error, exact.abs()))
        bound = tolerance.times_eager * eagers + tolerance.floor * share * size + tolerance.absolute
        assert error <= bound, (
            f"{name}: the {kind} error {error:.3e} is over the bound {bound:.3e} "
            f"(eager {eagers:.3e}, {eager.dtype})"
        )
