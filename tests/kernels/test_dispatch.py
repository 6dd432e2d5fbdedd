from __future__ import annotations

import inspect
from pkgutil import iter_modules

import pytest
import torch

from ligermodels.kernels import dispatch, glu, reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_cpu_tensors_take_plain_pytorch(monkeypatch) -> None:
    monkeypatch.delenv("LIGERMODELS_BACKEND", raising=False)
    assert dispatch.choose(CPU) == ("torch", "cpu tensors use plain PyTorch")
    assert dispatch.select("glu", torch.ones(1)) is reference.glu
    assert dispatch.select("glu", torch.ones(1, device="meta")) is reference.glu


def test_gpu_tensors_take_triton(monkeypatch) -> None:
    monkeypatch.delenv("LIGERMODELS_BACKEND", raising=False)
    pytest.importorskip("triton")
    assert dispatch.choose(CUDA)[0] == "triton"
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert dispatch.choose(CUDA) == ("torch", "triton is not installed")


def test_forced_where_triton_cannot_run(monkeypatch) -> None:
    """Without this check, Triton's error would be about drivers."""
    monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before Python starts"):
        glu(torch.ones(2, 4))
    monkeypatch.setenv("LIGERMODELS_BACKEND", "Triton")
    with pytest.raises(ValueError, match="LIGERMODELS_BACKEND='Triton': expected"):
        glu(torch.ones(2, 4))


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_triton_takes_cpu_tensors_in_its_interpreter(monkeypatch, value) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", value)
    x = torch.ones(1)
    assert dispatch.select("glu", x).__name__ == "ligermodels.kernels.triton.glu"
    # A float64 residual selects the reference, because the kernels calculate in float32.
    assert dispatch.select("glu", x, x.double()) is reference.glu


def public_functions(module):
    return [
        (name, value)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]


def test_both_implementations_have_the_same_functions() -> None:
    pytest.importorskip("triton")
    import ligermodels.kernels.triton as launchers

    ops = [module.name for module in iter_modules(reference.__path__)]
    assert len(ops) >= 6
    for op in ops:
        for name, function in public_functions(getattr(launchers, op)):
            twin = getattr(getattr(reference, op), name)
            assert inspect.signature(function) == inspect.signature(twin), name
