"""skip_ignored: rows that are gathered and scattered, and bounds that are too small.

`test_values.py` compares its results, and `test_memory.py` counts its products.
"""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import linear_cross_entropy, linear_log_probs
from ligermodels.kernels.linear_cross_entropy.chunk_plan import gather, scatter, valid_rows
from ligermodels.kernels.loss_options import LossOptions
from tests.kernels.checks import random
from tests.kernels.conftest import INTERPRETING
from tests.kernels.linear_cross_entropy.head import inputs

TOO_SMALL = {"skip_ignored": True, "max_valid": 15}  # 16 targets of the inputs count


def test_a_bound_too_small_is_an_error_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="max_valid=15, but 16 targets"):
        linear_cross_entropy(**inputs(), **TOO_SMALL)


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_bound_too_small_is_nan_under_compile(reduction) -> None:
    torch._dynamo.reset()
    op = torch.compile(linear_cross_entropy, fullgraph=True, backend="eager")
    made = inputs(reduction=reduction)
    out = op(**made, **TOO_SMALL)
    assert out.loss.isnan().sum() == 1 and out.token_loss.isnan().sum() == 1
    assert op(**made, skip_ignored=True, max_valid=16).loss.isfinite().all()


@pytest.mark.gpu
def test_a_bound_too_small_is_nan_on_a_gpu() -> None:
    made = {k: v.cuda() if torch.is_tensor(v) else v for k, v in inputs().items()}
    for reduction in ("none", "sum", "mean"):
        out = linear_cross_entropy(**made, **TOO_SMALL, reduction=reduction)
        assert out.loss.isnan().any() and out.token_loss.isnan().sum() == 1, reduction
    log_probs, _ = linear_log_probs(**made, **TOO_SMALL)
    assert log_probs.isnan().sum() == 1


def test_rows_out_and_back() -> None:
    targets = torch.tensor([-100, 3, -100, 1, 2])
    taken, theirs = valid_rows(targets, LossOptions.of(skip_ignored=True, max_valid=4))
    assert taken.tolist() == [1, 3, 4, 5] and theirs.tolist() == [3, 1, 2, -100]
    x = random(5, 2).requires_grad_()
    out = gather(x, taken)
    assert torch.equal(out[:3], x[[1, 3, 4]]) and (out[3] == 0).all()
    values = random(4, seed=3).requires_grad_()
    back = scatter(values, taken, targets, -100)
    assert torch.equal(back[[1, 3, 4]], values[:3]) and (back[[0, 2]] == 0).all()
    (grad,) = torch.autograd.grad(back, values, torch.arange(5.0).double())
    assert grad.tolist() == [1, 3, 4, 0]
    both = scatter(torch.stack((values, -values), -1), taken, targets, -100)
    assert torch.equal(both[:, 0], back) and torch.equal(both[:, 1], -back)
    # On a GPU, a row beyond a bound that is too small gets NaN.
    assert scatter(values[:3], taken[[0, 1, 3]], targets, -100)[4].isnan()


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
def test_counting_is_refused_under_compile(monkeypatch) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="pass max_valid"):
        compiled(**inputs(), skip_ignored=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"counts the targets on the host.*pass max_valid"):
        linear_cross_entropy(**inputs(), skip_ignored=True)
