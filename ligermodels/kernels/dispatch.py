"""How an op runs: on which device, in which dtype, and by which implementation.

Triton runs for GPU tensors, plain PyTorch for all others. While `ligermodels.memory` runs a step,
meta tensors stand for the tensors of a device: the step makes the same allocations as on the
device, launches nothing and has no values.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

ENVIRONMENT_VARIABLE = "LIGERMODELS_BACKEND"
TRUE = ("1", "true", "yes", "on", "y")  # the values that Triton reads as true
# os.environ takes four calls to look up a name.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_NAME: Any = os.environ.encodekey(ENVIRONMENT_VARIABLE)
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
    # torch.compile can trace an import statement, but not importlib.import_module.
    is_plain = x.is_cpu and _NAME not in _ENVIRONMENT  # faster than `choose`
    if is_plain or choose(x.device, dtype)[0] == "torch":
        import ligermodels.kernels.reference as reference

        return getattr(reference, op)  # type: ignore[no-any-return]
    if x.is_cpu and os.environ.get("TRITON_INTERPRET", "").lower() not in TRUE:
        raise RuntimeError(
            f"{ENVIRONMENT_VARIABLE}=triton, but the tensors are on a CPU: set TRITON_INTERPRET=1 "
            f"before Python starts to use Triton's interpreter, or unset {ENVIRONMENT_VARIABLE}"
        )
    import ligermodels.kernels.triton as triton

    if x.is_cuda and not torch.compiler.is_compiling():  # Inductor sets the device itself
        if x.get_device() != torch.cuda.current_device():
            return _OnDevice(getattr(triton, op), x.device)
    return getattr(triton, op)


class _NoBackward:
    """The context of a Function's forward that has no backward."""

    needs_input_grad = (False,) * 16

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Do nothing."""


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return function.apply(*args), or without gradients its forward alone, which is faster."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*args)
    return function.forward(_NoBackward(), *args)


def outputs_are_stored() -> bool:
    """Return whether torch's selective checkpointing stores what operators return.

    Its second forward gets the same tensors again, so nothing may overwrite a new one.
    """
    if torch.compiler.is_compiling():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)


def nobody_reads_again() -> bool:
    """Return whether backward may overwrite what only it has saved.

    It may not if it retains the graph, because the next backward needs the same tensors.
    torch.compile would copy what is overwritten.
    """
    compiling = torch.compiler.is_compiling()
    return not compiling and not torch._C._autograd._get_current_graph_task_keep_graph()


def refuse_double_backward(op: str) -> None:
    """Raise RuntimeError if a second derivative is asked for, which these ops compute wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: second derivatives are not implemented; call backward without create_graph"
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which an op computes: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype), or x itself if it already has this dtype.

    Under torch.compile, torch 2.11 loses the gradient of a `to` that changes nothing.
    """
    return x if x.dtype == dtype else x.to(dtype)


def autocast_is_on(x: Tensor) -> bool:
    """Return whether autocast is enabled for x's device."""
    kind = x.device.type
    if kind == "meta":
        simulator = simulator_of(x.device)
        return simulator is not None and simulator.autocast is not None
    return torch.is_autocast_enabled(kind)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts operands of matmuls with x.

    Return None if autocast is disabled or x is float64.
    """
    if not autocast_is_on(x) or x.dtype == torch.float64:
        return None
    simulator = simulator_of(x.device)
    return torch.get_autocast_dtype(x.device.type) if simulator is None else simulator.autocast


def cast_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cast weight and bias of a linear of x as autocast does. The casts are differentiable."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return weight, bias
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast is disabled for x's device.

    torch.compile traces a backward inside of its forward's contexts, but runs it under the autocast
    that is on around the compiled function: so there, autocast is disabled even if it is off.
    """
    if not autocast_is_on(x) and not torch.compiler.is_compiling():
        return nullcontext()
    simulator = simulator_of(x.device)
    if simulator is not None:
        return simulator.without_autocast()
    return torch.autocast(x.device.type, enabled=False)


class Product(torch.autograd.Function):
    """a @ b, where autocast is off, with a backward that autocast does not cast when compiled."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        with without_autocast(grad):
            return (grad @ b.mT).sum_to_size(a.shape), (a.mT @ grad).sum_to_size(b.shape)


# The device that meta tensors stand for: `memory.simulate.SimulatedDevice`, in a later room.
Simulator = Any


class _Running(threading.local):
    simulator: Simulator = None


_running = _Running()


def simulator_of(device: torch.device) -> Simulator:
    """Return the simulator that runs in this thread if `device` is the meta device, else None."""
    return _running.simulator if device.type == "meta" else None


def real_device(device: torch.device) -> torch.device:
    """Return the device that a simulated tensor on the meta device stands for, else `device`."""
    simulator = simulator_of(device)
    return device if simulator is None else simulator.device


@contextmanager
def simulating(simulator: Simulator) -> Iterator[None]:
    """Let meta tensors stand for the simulator's device in this thread."""
    before, _running.simulator = _running.simulator, simulator
    try:
        yield
    finally:
        _running.simulator = before
