"""skip_ignored: rows that are gathered and scattered, and bounds that are too small.

`test_values.py` compares its results, and `test_memory.py` counts its products.
"""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import linear_cross_entropy, linear_log_probs
from tests.kernels.conftest import INTERPRETING
from tests.kernels.linear_cross_entropy.head import inputs

TOO_SMALL = {"skip_ignored": True, "max_valid": 15}  # 16 targets of the inputs count


def test_a_bound_too_small_is_an_error_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="max_valid=15; expected at least the 16 targets"):
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


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
def test_counting_is_refused_under_compile(monkeypatch) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="pass max_valid"):
        compiled(**inputs(), skip_ignored=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"counts the targets on the host.*pass max_valid"):
        linear_cross_entropy(**inputs(), skip_ignored=True)
