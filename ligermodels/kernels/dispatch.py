"""Which implementation an op takes: Triton for GPU tensors, plain PyTorch for the rest."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels import reference

ENVIRONMENT_VARIABLE = "LIGERMODELS_BACKEND"
TRUE = ("1", "true", "yes", "on", "y")  # as Triton reads its environment
HAS_TRITON = find_spec("triton") is not None  # looks for it; imports nothing


def choose(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """Return ("triton" or "torch", the reason) for tensors of `dtype` on `device`.

    LIGERMODELS_BACKEND=torch|triton forces one. Triton on CPU tensors works only in its
    interpreter (TRITON_INTERPRET=1), which is how the kernels are tested without a GPU.

    Raises:
        ValueError: LIGERMODELS_BACKEND names something else.
    """
    if ENVIRONMENT_VARIABLE in os.environ:  # a get of what is not there takes twice as long
        forced = os.environ[ENVIRONMENT_VARIABLE]
        if forced not in ("torch", "triton"):
            raise ValueError(f"{ENVIRONMENT_VARIABLE}={forced!r}: expected 'torch' or 'triton'")
        if forced == "torch" or dtype != torch.float64:
            return forced, f"{ENVIRONMENT_VARIABLE}={forced}"
    if dtype == torch.float64:
        return "torch", "the kernels calculate in float32"
    if device.type != "cuda":
        return "torch", f"{device.type} tensors take plain PyTorch"
    if not HAS_TRITON:
        return "torch", "triton is not installed"
    return "triton", "GPU tensors take Triton"


class _OnDevice:
    """Triton launchers for tensors of another GPU than the current one, where Triton launches."""

    def __init__(self, launchers: ModuleType, device: torch.device) -> None:
        self.launchers, self.device = launchers, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        launcher: Callable[..., Any] = getattr(self.launchers, name)

        def launch(*args: Any, **kwargs: Any) -> Any:
            with torch.cuda.device(self.device):
                return launcher(*args, **kwargs)

        return launch


# An op's module of `kernels.reference` or of `kernels.triton`: functions of one signature in both.
Implementation = ModuleType | _OnDevice


def select(op: str, x: Tensor, residual: Tensor | None = None) -> Implementation:
    """Return the module of `op` that handles `x`, by name.

    A float64 residual makes the sum of both float64.

    Raises:
        RuntimeError: Triton is forced onto tensors of a CPU outside its interpreter.
    """
    dtype = x.dtype
    if residual is not None and residual.dtype == torch.float64:
        dtype = torch.float64
    if choose(x.device, dtype)[0] == "torch":
        return getattr(reference, op)
    if x.is_cpu and os.environ.get("TRITON_INTERPRET", "").lower() not in TRUE:
        raise RuntimeError(
            f"{ENVIRONMENT_VARIABLE}=triton, but the tensors are on a CPU: set TRITON_INTERPRET=1 "
            f"before Python starts, for Triton's interpreter, or unset {ENVIRONMENT_VARIABLE}"
        )
    # A statement: torch.compile traces it, importlib.import_module it refuses.
    import ligermodels.kernels.triton as triton

    if x.is_cuda and not torch.compiler.is_compiling():  # compiled, Inductor sees to it
        if x.get_device() != torch.cuda.current_device():
            return _OnDevice(getattr(triton, op), x.device)
    return getattr(triton, op)


def refuse_double_backward(op: str) -> None:
    """Raise where a gradient of a gradient is asked for, which these ops would get wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: second derivatives are not implemented; call backward without create_graph"
        )
