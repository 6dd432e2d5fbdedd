"""Test that every benchmark case builds, and that its implementations compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cases import OPS, Absent, Case, Random, base
from benchmarks.ops import as_tuple, differentiable, training_call
from ligermodels import kernels
from tests.kernels.ops_table import NOT_FUSED

# The small size of every op, and one more case for the option that no size sets.
SMALL = [(op, entry.small) for op, entry in OPS.items()]
SMALL += [("linear_log_probs", OPS["linear_log_probs"].small | {"entropy": True})]


def shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


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
    assert len(actual) == len(expected)
    for result, wanted in zip(actual, expected):
        assert result.shape == wanted.shape
        difference = (result.double() - wanted.double()).norm()
        assert difference <= tolerance * wanted.double().norm()


def test_every_op_is_measured(monkeypatch) -> None:
    """At least one case calls each of our ops; cases call glu by its two other names."""
    called = set()

    def spy(name: str):
        function = getattr(kernels, name)

        def call(*args, **options):
            called.add(name)
            return function(*args, **options)

        return call

    for name in kernels.__all__:
        monkeypatch.setattr(kernels, name, spy(name))
    for op, sizes in SMALL:
        implementation = OPS[op].build(Random("cpu", torch.float32), **sizes)
        implementation = implementation.implementation("ligermodels")
        implementation.function(*implementation.inputs())
    missing = set(kernels.__all__) - NOT_FUSED - {"glu"} - called
    assert not missing, f"benchmarks/cases has no case for {missing}"


def test_every_size_of_an_op_has_the_same_names():
    for entry in OPS.values():
        for sizes in [*entry.table, *entry.sweep]:
            assert list(sizes) == list(entry.small)


def test_no_size_is_measured_twice():
    for entry in OPS.values():
        sizes = [tuple(s.values()) for s in entry.table + entry.sweep]
        assert len(sizes) == len(set(sizes))


@pytest.mark.parametrize("op, sizes", SMALL)
def test_ours_is_what_eager_pytorch_computes(op, sizes, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = OPS[op].build(Random("cpu", torch.float32), **sizes)
    if op == "linear_cross_entropy_budget":
        head = OPS["linear_cross_entropy"]
        reference = head.build(Random("cpu", torch.float32), **head.small)
    else:
        reference = case
    inputs = case.inputs()
    expected = outcome(reference, "eager", inputs)
    ours = [name for name in case.implementations if name.startswith(("ligermodels", "F."))]
    assert "ligermodels" in ours
    for name in ours:
        assert_agree(outcome(case, name, inputs), expected, 1e-5)


def test_torch_compile_measures_eager_pytorch(monkeypatch):
    compiled = []

    def note(function, dynamic):
        assert dynamic is False
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", note)
    for op, entry in OPS.items():
        compiled.clear()
        case = entry.build(Random("cpu", torch.float32), **entry.small)
        if "torch.compile" in case.implementations:
            assert compiled == [case.implementations["eager"]], op
        else:
            assert op == "linear_cross_entropy_budget"


def test_fewest_bytes():
    random = Random("cpu")  # The default dtype is bf16.
    assert OPS["swiglu"].build(random, rows=5, width=16).bytes == (3 * 5 * 16 * 2, 8 * 5 * 16 * 2)
    case = OPS["rope"].build(random, batch=2, seq=6, heads=4, kv_heads=2, head_dim=16)
    head = 2 * 6 * 16 * 2
    assert case.bytes == ((6 + 6) * head, (6 + 6 + 8 + 8) * head)
    # The implementation that works in place moves only q and k.
    assert case.implementation("liger (in place)").bytes == (12 * head, 24 * head)


def test_targets_are_ignored_by_share():
    targets = Random("cpu").targets(1000, 50, 0.8)
    assert (targets == -100).sum() == 800
    assert targets.max() < 50
    assert ((targets >= 0) | (targets == -100)).all()


def test_what_is_not_installed_is_absent():
    missing = base.peer("a_package_that_nobody_has")
    with pytest.raises(Absent, match="a_package_that_nobody_has"):
        missing.function  # noqa: B018


def test_scalars_get_an_upstream_gradient_of_one():
    case = OPS["cross_entropy"].build(Random("cpu", torch.float32), rows=3, vocab=5)
    run, (logits,), (upstream,) = training_call(case.implementation("ligermodels"), Random("cpu"))
    loss, gradient = run()
    (expected,) = torch.autograd.grad(case.implementations["eager"](logits), logits)
    assert loss.dim() == 0 and upstream == 1
    torch.testing.assert_close(gradient, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op, entry in OPS.items() if entry.table])
def test_every_peer_computes_the_same(op):
    """Peers with inputs of other shapes only run, because their results cannot be compared."""
    case = OPS[op].build(Random("cuda"), **OPS[op].small)
    inputs = case.inputs()
    expected = outcome(case, "eager", inputs)
    for name in case.implementations:
        try:
            if shapes(case.implementation(name).inputs()) != shapes(inputs):
                results = training_call(case.implementation(name), Random("cuda"))[0]()
                assert all(result.isfinite().all() for result in results)
            elif name != "cce (filtered)":  # It skips small gradients.
                assert_agree(outcome(case, name, inputs), expected, 3e-2)
        except (Absent, ImportError):
            continue
