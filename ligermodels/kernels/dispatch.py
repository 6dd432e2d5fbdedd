"""The choice of an op's implementation: Triton for GPU tensors, plain PyTorch for all others."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ligermodels.kernels import reference
from ligermodels.kernels.simulation import real_device

ENVIRONMENT_VARIABLE = "LIGERMODELS_BACKEND"
TRUE = ("1", "true", "yes", "on", "y")  # the values that Triton reads as true
HAS_TRITON = find_spec("triton") is not None  # does not import it


def choose(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """Return ("triton" or "torch", the reason) for tensors of `dtype` on `device`.

    LIGERMODELS_BACKEND=torch|triton overrides the choice. Triton runs on CPU tensors only in its
    interpreter (TRITON_INTERPRET=1). The tests use it to check the kernels without a GPU.

    Raises:
        ValueError: LIGERMODELS_BACKEND has another value.
    """
    if ENVIRONMENT_VARIABLE in os.environ:  # .get of a missing key is slower
        forced = os.environ[ENVIRONMENT_VARIABLE]
        if forced not in ("torch", "triton"):
            raise ValueError(f"{ENVIRONMENT_VARIABLE}={forced!r}: expected 'torch' or 'triton'")
        if forced == "torch" or dtype != torch.float64:
            return forced, f"{ENVIRONMENT_VARIABLE}={forced}"
    if dtype == torch.float64:
        return "torch", "the Triton kernels compute in float32"
    if device.type != "cuda" and (device := real_device(device)).type != "cuda":
        return "torch", f"{device.type} tensors use plain PyTorch"
    if not HAS_TRITON:
        return "torch", "triton is not installed"
    return "triton", "GPU tensors use Triton"


class _OnDevice:
    """Triton launchers that first make `device` current: Triton launches on the current GPU."""

    def __init__(self, launchers: ModuleType, device: torch.device) -> None:
        self.launchers, self.device = launchers, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        launcher: Callable[..., Any] = getattr(self.launchers, name)

        def launch(*args: Any, **kwargs: Any) -> Any:
            with torch.cuda.device(self.device):
                return launcher(*args, **kwargs)

        return launch


# A module of `kernels.reference` or `kernels.triton`. Both have functions of the same signatures.
Implementation = ModuleType | _OnDevice


def select(op: str, x: Tensor, residual: Tensor | None = None) -> Implementation:
    """Return the module that implements the op named `op` for `x`.

    If residual is float64, so is its sum with `x`, and float64 always uses plain PyTorch.

    Raises:
        RuntimeError: LIGERMODELS_BACKEND=triton, but the tensors are on a CPU and Triton's
            interpreter is off.
    """
    dtype = x.dtype
    if residual is not None and residual.dtype == torch.float64:
        dtype = torch.float64
    if choose(x.device, dtype)[0] == "torch":
        return getattr(reference, op)
    if x.is_cpu and os.environ.get("TRITON_INTERPRET", "").lower() not in TRUE:
        raise RuntimeError(
            f"{ENVIRONMENT_VARIABLE}=triton, but the tensors are on a CPU: set TRITON_INTERPRET=1 "
            f"before Python starts to use Triton's interpreter, or unset {ENVIRONMENT_VARIABLE}"
        )
    # torch.compile can trace an import statement, but not importlib.import_module.
    import ligermodels.kernels.triton as triton

    if x.is_cuda and not torch.compiler.is_compiling():  # Inductor sets the device itself
        if x.get_device() != torch.cuda.current_device():
            return _OnDevice(getattr(triton, op), x.device)
    return getattr(triton, op)


def outputs_are_stored() -> bool:
    """Return whether torch's selective checkpointing stores what operators return.

    Its second forward gets the same tensors again, so nothing may overwrite a new one.
    """
    if torch.compiler.is_compiling():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)


def refuse_double_backward(op: str) -> None:
    """Raise if a second derivative is requested, because these ops would compute it wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: second derivatives are not implemented; call backward without create_graph"
        )
