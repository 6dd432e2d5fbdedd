"""The comparison that every op's tests use: outputs and gradients against a float64 formula."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.tolerances import assert_close

NAN = float("nan")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return a random float64 tensor on the CPU; a shape and a seed always give the same values."""
    generator = torch.Generator().manual_seed(seed * 1000003 + sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def strided(x: Tensor, number: int = 0) -> Tensor:
    """Return the values as every second element of longer rows; the other elements are NaN."""
    longer = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), NAN)
    view = longer[..., ::2]
    view.copy_(x)
    return view


def transposed(x: Tensor, number: int = 0) -> Tensor:
    """Return the values stored with the last two dimensions replaced."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.ndim > 1 else x


def sliced(x: Tensor, number: int = 0) -> Tensor:
    """Return the values as an unaligned slice of longer rows; the other elements are NaN.

    The numbers of two tensors make all their strides differ, even if their shapes are the same.
    """
    longer = x.new_full([size + number for size in x.shape[:-1]] + [x.shape[-1] + 3 + number], NAN)
    view = longer[(*(slice(size) for size in x.shape[:-1]), slice(1, x.shape[-1] + 1))]
    view.copy_(x)
    return view


def expanded(x: Tensor, number: int = 0) -> Tensor:
    """Return the first batch row expanded to the whole batch; parameters stay as they are."""
    return x[:1].expand_as(x) if x.ndim > 2 else x


def heads_first(x: Tensor, number: int = 0) -> Tensor:
    """Return the values stored with heads before tokens, as attention stores them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 3 else x


LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": lambda x, number: x.contiguous(),
    "strided": strided,
    "transposed": transposed,
    "sliced": sliced,
    "heads first": heads_first,
    "expanded": expanded,
}


def as_tuple(outputs: Tensor | tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Return the op's outputs as a tuple, without those that are None."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(x for x in outputs if x is not None)


def placed(
    inputs: dict[str, Any], place: Any, frozen: Collection[str] = (), constant: Collection[str] = ()
) -> dict[str, Any]:
    """Copy the inputs to a place: floating ones require a gradient, or are constant and wide."""
    device, dtype = place
    made = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            kept = torch.promote_types(dtype, torch.float32) if name in constant else dtype
            made[name] = x.detach().to(device, kept, copy=True)
            made[name].requires_grad_(name not in frozen and name not in constant)
        elif isinstance(x, Tensor):
            made[name] = x.to(device, copy=True)
    return made


def compare(
    op: Callable[..., Any],
    formula: Callable[..., Any],
    inputs: dict[str, Any],
    place: Any,
    *,
    frozen: Collection[str] = (),
    constant: Collection[str] = (),
    layout: str = "contiguous",
    used: int | None = None,
    exact_place: str = "cpu",
    autocast: torch.dtype | None = None,
    backward_inside: bool = False,
) -> None:
    """Compare op(**inputs) and its gradients with formula(**inputs) in float64.

    The error of the formula in place's dtype sets the tolerance.

    Args:
        inputs: floating tensors are rounded to place's dtype; other values are passed unchanged.
        frozen: names of inputs that require no gradient and must get none.
        constant: names of inputs that have no gradient and stay in float32, such as angles.
        layout: the layout of the inputs and of the upstream gradients.
        used: the only output that is compared and has a gradient; None takes all.
        autocast: run the op, and the formula in place's dtype, under torch.autocast with this
            dtype. The tolerance is then that of this dtype.
        backward_inside: run backward under autocast as well.
    """
    device, dtype = place

    def under_autocast(kind: str, active: bool = True) -> torch.autocast:
        enabled = autocast is not None and kind != "exact" and active
        return torch.autocast(device, dtype=autocast, enabled=enabled)

    def prepare(kind: str) -> dict[str, Any]:
        made = placed(inputs, place, frozen, constant)
        if kind == "exact":
            made = placed(made, (exact_place, torch.float64), frozen, constant)
        for number, (name, x) in enumerate(made.items()):
            if isinstance(x, Tensor) and x.is_floating_point():
                values = expanded(x).contiguous() if layout == "expanded" else x
                if kind == "ours" and x.ndim:
                    values = LAYOUTS[layout](values, number)
                made[name] = values.detach().requires_grad_(x.requires_grad)
        return made

    def leaves(made: dict[str, Any]) -> dict[str, Tensor]:
        return {k: v for k, v in made.items() if isinstance(v, Tensor) and v.requires_grad}

    results: dict[str, tuple[Tensor, ...]] = {}
    grads: dict[str, dict[str, Tensor]] = {}
    upstreams: list[Tensor] = []
    for kind, function in (("ours", op), ("eager", formula), ("exact", formula)):
        made = prepare(kind)
        before = {k: v.detach().clone() for k, v in made.items() if isinstance(v, Tensor)}
        with under_autocast(kind):
            result = as_tuple(function(**made))
        result = result if used is None else result[used : used + 1]
        if kind == "ours":
            for i, x in enumerate(result):
                upstream = random(*x.shape, seed=7 + i)
                if layout == "expanded":
                    upstream = expanded(upstream)
                upstreams.append(upstream.to(device, x.dtype))
        pairs = []
        compared = zip(result, results.get("ours", result), upstreams)
        for i, (x, y, upstream) in enumerate(compared):
            if y.requires_grad and x.requires_grad:
                upstream = upstream.to(x.device, x.dtype)
                if kind == "ours" and x.ndim:
                    upstream = LAYOUTS[layout](upstream, i)
                pairs.append((x, upstream))
        results[kind] = result
        wanted = leaves(made)
        grads[kind] = {}
        if pairs and wanted:
            with under_autocast(kind, backward_inside):
                torch.autograd.backward([x for x, _ in pairs], [y for _, y in pairs])
            # Where an output does not depend on an input, ours may be zero.
            zero = torch.zeros_like if used is not None else lambda leaf: None
            grads[kind] = {
                name: zero(leaf) if leaf.grad is None else leaf.grad
                for name, leaf in wanted.items()
            }
        if kind == "ours":
            for name, value in before.items():
                assert torch.equal(made[name], value), f"{name} was overwritten"
                assert name in wanted or made[name].grad is None, f"frozen {name} has a gradient"
    assert len(results["ours"]) == len(results["exact"])
    low = autocast or dtype
    for i, (ours, eager, exact) in enumerate(zip(*results.values())):
        assert ours.dtype == eager.dtype, f"output {i} is {ours.dtype}, not {eager.dtype}"
        assert_close(f"output {i}", ours, eager.to(low), exact)
    for name, ours in grads["ours"].items():
        assert ours is not None, f"{name} has no gradient"
        assert ours.dtype == grads["eager"][name].dtype, name
        eager, exact = grads["eager"][name], grads["exact"][name]
        assert_close(f"gradient of {name}", ours, eager.to(low), exact)


def check_repeatable(op: Callable[..., Any], made: dict[str, Any], dtype: torch.dtype) -> None:
    """Check that a second run gives the same bits, a second backward the same gradients.

    A second derivative raises.
    """
    wanted = [x for x in made.values() if isinstance(x, Tensor) and x.requires_grad]
    outputs = [x for x in as_tuple(op(**made)) if x.requires_grad]
    upstreams = [random(*x.shape, seed=3).to(x) for x in outputs]

    def gradients(factor: int, **options: bool) -> tuple[Tensor | None, ...]:
        given = [factor * upstream for upstream in upstreams]
        return torch.autograd.grad(outputs, wanted, given, allow_unused=True, **options)

    first = gradients(1, retain_graph=True)
    again = [x for x in as_tuple(op(**made)) if x.requires_grad]
    repeated = torch.autograd.grad(again, wanted, upstreams, allow_unused=True)
    for once, twice in zip((*outputs, *first), (*again, *repeated)):
        assert (once is None) == (twice is None)
        assert once is None or torch.equal(once, twice), "a second run gives other bits"
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for once, twice in zip(first, gradients(2, retain_graph=True)):
        if once is not None:
            torch.testing.assert_close(2 * once, twice, rtol=rtol, atol=1e-6)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradients(1, create_graph=True)
