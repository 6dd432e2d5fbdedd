"""The benchmarks compare equal results, and the docs have the figures of the committed runs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import memory_plot, plots
from benchmarks.cases import OPS, Absent, Case, Random
from benchmarks.common import RESULTS
from benchmarks.ops import as_tuple, differentiable, training_call
from ligermodels import kernels
from tests import markdown
from tests.kernels.ops_table import NOT_FUSED

DOCS = markdown.ROOT / "docs"
MODULES = sorted((markdown.ROOT / "benchmarks").glob("*.py"))
# The small size of every op, and one more case for the option that no size sets.
SMALL = [(op, entry.small) for op, entry in OPS.items()]
SMALL += [("linear_log_probs", OPS["linear_log_probs"].small | {"entropy": True})]


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_each_module_is_imported(file: Path) -> None:
    try:
        importlib.import_module(f"benchmarks.{file.stem}")
    except ModuleNotFoundError as error:
        assert error.name not in ("benchmarks", "ligermodels", "tests"), error
        pytest.skip(str(error))


def outcome(case: Case, name: str, inputs: list[Tensor]) -> list[Tensor]:
    """Return outputs and gradients; every implementation gets the same upstream gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = as_tuple(case.implementation(name).function(*leaves))
    kept = [output.detach().clone() for output in outputs]  # some peers overwrite outputs
    torch.manual_seed(1)
    roots = differentiable(outputs)
    upstream = [torch.randn_like(root) if root.dim() else None for root in roots]
    return [*kept, *torch.autograd.grad(roots, leaves, upstream)]


def assert_agree(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for result, wanted in zip(actual, expected, strict=True):
        assert result.shape == wanted.shape
        difference = (result.double() - wanted.double()).norm()
        assert difference <= tolerance * wanted.double().norm()


def test_every_op_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one case calls each of our ops; cases call glu by its two other names."""
    called = set()

    def spy(name: str) -> Any:
        function = getattr(kernels, name)

        def call(*args: Any, **options: Any) -> Any:
            called.add(name)
            return function(*args, **options)

        return call

    for name in kernels.__all__:
        monkeypatch.setattr(kernels, name, spy(name))
    for op, sizes in SMALL:
        case = OPS[op].build(Random("cpu", torch.float32), **sizes)
        implementation = case.implementation("ligermodels")
        implementation.function(*implementation.inputs())
    missing = set(kernels.__all__) - NOT_FUSED - {"glu"} - called
    assert not missing, f"benchmarks/cases has no case for {missing}"


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op, entry in OPS.items() if entry.table])
def test_every_peer_computes_the_same(op: str) -> None:
    """Peers with inputs of other shapes only run, because their results cannot be compared."""
    case = OPS[op].build(Random("cuda"), **OPS[op].small)
    inputs = case.inputs()
    expected = outcome(case, "eager", inputs)
    for name in case.implementations:
        try:
            theirs = case.implementation(name).inputs()
            if [x.shape for x in theirs] != [x.shape for x in inputs]:
                results = training_call(case.implementation(name), Random("cuda"))[0]()
                assert all(result.isfinite().all() for result in results)
            elif name != "cce (filtered)":  # It skips small gradients.
                assert_agree(outcome(case, name, inputs), expected, 3e-2)
        except (Absent, ImportError):
            continue


def test_the_pages_are_those_of_the_results() -> None:
    for name, page in (("ops", plots.markdown), ("memory", memory_plot.page)):
        assert page(result(name)) == (RESULTS / f"{name}.md").read_text(), name
