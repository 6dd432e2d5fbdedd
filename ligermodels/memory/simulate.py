"""The memory and the work of a training step, found by running the step on meta tensors.

The model's own forward and backward run, under the memory plan that it has. Meta tensors have no
data, so nothing is allocated and nothing is computed. `Tracker` counts.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ligermodels.errors import ConfigError, first_line
from ligermodels.kernels.dispatch import choose, simulating
from ligermodels.layers.cross_attention import CrossAttention
from ligermodels.memory.simulated_device import Autocast, SimulatedDevice, no_launches
from ligermodels.memory.torch_private import (
    Buckets,
    Gradients,
    Sharding,
    buckets,
    cublas_workspaces,
    expandable_segments,
)
from ligermodels.memory.tracker import Phase, Tracker, Work

OPTIMIZER_STEP = "optimizer step"  # a phase
DEFAULT_SMS = 132  # multiprocessors of an H100 and an H200


@dataclass
class Simulation:
    """The memory and the work of a training step on one device, without the optimizer."""

    peak_bytes: int  # the most allocated at any time, with weights, buffers, inputs and gradients
    weight_bytes: int  # parameters and buffers
    grad_bytes: int  # gradients of all parameters when backward ends, and DDP's buckets
    kept_bytes: int  # what forward leaves for backward, without weights and inputs
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    # In their order: "forward of layer 3", "forward of head", "backward of layer 3", ...
    phases: dict[str, Phase] = field(default_factory=dict)
    reserved_bytes: int = 0  # what CUDA's caching allocator reserves from the GPU for the step
    # The largest block of a layer, unless segments are expandable. The head's blocks come before
    # any memory is free, and the embedding's when most of it is.
    largest_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory when forward ends."""
        return self.forward.to_host_bytes


def _stand_in(x: Tensor) -> Tensor:
    """Return a meta tensor like x."""
    if is_traceable_wrapper_subclass(x):  # such as a quantized weight, made of several tensors
        return x.detach().to("meta").requires_grad_(x.requires_grad)
    if type(x) not in (nn.Parameter, Tensor):
        return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)
    return torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad
    )


@contextmanager
def _phases(model: nn.Module, tracker: Tracker) -> Iterator[None]:
    """Tell the tracker when a layer or the head begins its forward or its backward.

    The modules have hooks only in forward. A recomputation that stops early raises an exception,
    and through a module with hooks it would keep its tensors alive until the garbage
    collector runs. In a step with gradients, a forward without them, such as one that samples, is
    not counted as a forward of its layers.
    """
    learns = torch.is_grad_enabled()
    parts = [(f"layer {i}", x) for i, x in enumerate(getattr(model, "layers", ()))]
    if isinstance(head := getattr(model, "head", None), nn.Module):
        parts.append(("head", head))

    def began(part: str) -> None:
        if torch.is_grad_enabled() == learns:
            tracker.enter(f"forward of {part}")

    def ended(part: str, out: Any) -> None:
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: tracker.enter(f"backward of {part}"))

    with ExitStack() as stack:
        for part, module in parts:
            before = module.register_forward_pre_hook(lambda *_, part=part: began(part))
            after = module.register_forward_hook(lambda *given, part=part: ended(part, given[-1]))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


class _Step(nn.Module):
    """A model with a step as its forward.

    `functional_call` replaces parameters only during a call, and recomputation needs them, too.
    """

    def __init__(self, model: nn.Module, step: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self) -> None:
        self.step(self.model)


def _of_each_module(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `state` by the name of each place where a module holds one.

    `functional_call` would find a tied weight in its places itself. But a module that the model
    runs several times has one place with several names, and it would not get its weight back.
    """
    names = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}
    return {
        f"{path}.{key}" if path else key: state[names[id(x)]]
        for path, module in model.named_modules()
        for key, x in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
    }


def run_step(
    model: nn.Module,
    tracker: Tracker,
    state: dict[str, Tensor],
    input_ids: Tensor,
    *,
    gradients: Gradients = "new",
    ddp_buckets: Buckets | None = None,
    step_bytes: int = 0,
    on_forward_end: Callable[[], None] = lambda: None,
    sharding: Sharding | None = None,
    step_module: nn.Module | None = None,
    **inputs: Any,
) -> Simulation:
    """Run forward and backward with the parameters and buffers of `state`, and count.

    Without gradients (`torch.no_grad`), only forward runs. For a parameter of `sharding`, `state`
    has the whole one, which does not count. Names are those in `step_module`, if it is given.
    """
    called = model if step_module is None else step_module
    sharded = sharding.parameters if sharding is not None else {}
    held = [x for name, x in state.items() if name not in sharded]
    leaves = [x for x in held if x.requires_grad]
    weight_bytes = tracker.hold(held)
    tracker.uncounted = {state[name].untyped_storage()._cdata for name in sharded}
    if sharding is not None:
        weight_bytes += tracker.hold(sharding.begin(tracker.on_stream, gradients))
        tracker.hold(sharding.gradients())
    in_buckets: list[Tensor] = []
    if ddp_buckets == "copies" or (ddp_buckets == "views" and gradients != "kept"):
        in_buckets = buckets(leaves)
    bucket_bytes = tracker.hold(in_buckets)
    if ddp_buckets == "views" and gradients == "new":
        gradients = "freed"  # because it is copied into its bucket
    if gradients == "kept":
        for x in leaves:
            x.grad = torch.empty_like(x)
        tracker.hold(x.grad for x in leaves if x.grad is not None)
    elif gradients == "freed":
        for x in leaves:
            x.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    tracker.hold(x for x in (input_ids, *inputs.values()) if isinstance(x, Tensor))
    before, kept_bytes = tracker.bytes, 0

    def step(called: nn.Module) -> None:
        nonlocal kept_bytes
        with ExitStack() as stack:
            stack.enter_context(_phases(model, tracker))
            if sharding is not None:
                stack.enter_context(sharding.hooked(model))
            out = called(input_ids, **inputs)
        on_forward_end()
        loss = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"memory plan: {type(called).__name__} returned a {type(out).__name__}; expected "
                "the loss, or a tuple that begins with it"
            )
        kept_bytes = tracker.bytes - before
        if loss.requires_grad:
            tracker.enter("backward")
            gradient = torch.ones_like(loss)
            # torch.autograd.backward would suspend the mode that stands for autocast.
            torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
                (loss,), (gradient,), False, False, (), True, True
            )
            if sharding is not None:
                sharding.end()

    tracker.enter("forward")
    with tracker:
        whole = {f"model.{name}": x for name, x in _of_each_module(called, state).items()}
        torch.func.functional_call(_Step(called, step), whole, (), tie_weights=False)
    if step_bytes:
        tracker.enter(OPTIMIZER_STEP)
        tracker.reach(step_bytes)
    tracker.leave()
    phases = tracker.phases
    grads = [x.grad for x in leaves if x.grad is not None]
    grads += [] if sharding is None else sharding.gradients()

    def work(direction: str) -> Work:
        return sum((p.work for name, p in phases.items() if name.startswith(direction)), Work())

    return Simulation(
        peak_bytes=max(phase.peak for phase in phases.values()),
        weight_bytes=weight_bytes,
        grad_bytes=bucket_bytes + sum(map(tracker.block_bytes, grads)),
        kept_bytes=kept_bytes,
        forward=work("forward"),
        backward=work("backward"),
        phases=phases,
        reserved_bytes=tracker.reserved,
        largest_bytes=0
        if expandable_segments() or not tracker.on_gpu
        else max((p.largest for name, p in phases.items() if "layer" in name), default=0),
    )


def simulate(
    model: Any,
    batch: int,
    seq: int,
    *,
    device: torch.device,
    autocast: torch.dtype | None = None,
    labels: bool = True,
    packed: bool = False,
    max_seqlen: int | None = None,
    memory_seq: int | None = None,
    head_options: dict[str, Any] | None = None,
    gradients: Gradients = "new",
    ddp_buckets: Buckets | None = None,
    step_bytes: int = 0,
    num_sms: int | None = None,
    step_module: nn.Module | None = None,
) -> Simulation:
    """Run forward and backward of a model on meta tensors, under its memory plan.

    Args:
        model: any decoder of this library, on any device, "meta" included.
        batch, seq: rows, and tokens of each row.
        device: the device to simulate. A GPU need not exist.
        autocast: the dtype of autocast around forward; None for no autocast.
        labels: whether forward gets labels and returns a loss. Without them, backward begins at the
            hidden states.
        packed: whether rows hold several documents, inferred from position_ids. If max_seqlen is
            given, cu_seqlens gives documents of this length in the only row.
        memory_seq: keys of each row of the memory, for layers with `CrossAttention`. The memory and
            its gradient count.
        head_options: keyword arguments of the head.
        gradients: "new" if no gradient exists before the step, "kept" if all do (accumulation), and
            "freed" if an optimizer step in backward frees each as soon as it is complete.
        ddp_buckets: for a forward through `DistributedDataParallel`: "copies" if gradients are
            separate tensors, and "views" if they are views of its buckets.
        step_bytes: what an optimizer step after backward allocates for itself.
        num_sms: multiprocessors of the GPU, by default those of the GPU that is here, or 132.
        step_module: a module that contains the model, and that a step calls with the same arguments
            in its place, such as one with a teacher. It returns the loss, or a tuple that begins
            with the loss. What else it holds and runs counts, too.
    Returns: a `Simulation`. Its bytes are those of `torch.cuda.max_memory_allocated`.
    Raises:
        ConfigError: `step_module` cannot be called as the model is, the step reads the values of
            tensors on the host, the module returns no loss, or max_seqlen is given for several
            rows.
        RuntimeError: a GPU is simulated and triton is not installed.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    if on_gpu and choose(device)[0] != "triton":
        raise RuntimeError("to simulate a GPU, install triton: its launchers make the allocations")
    if num_sms is None:
        here = on_gpu and torch.cuda.is_available()
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if here else None
    tracker = Tracker(device.type)
    simulator = SimulatedDevice(device, num_sms or DEFAULT_SMS, autocast, tracker)
    casts = Autocast(simulator)

    called = model if step_module is None else step_module
    named = (*called.named_parameters(), *called.named_buffers())
    sharding = Sharding(model, called)
    state = {
        name: sharding.parameters[name].stand_in() if name in sharding.parameters else _stand_in(x)
        for name, x in named
    }

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs: dict[str, Any] = dict(head_options or {})
    if labels:
        inputs["labels"] = model.meta_labels(batch, seq)
    if packed and max_seqlen is not None:
        if batch != 1:
            raise ConfigError(
                f"memory plan: max_seqlen={max_seqlen} with {batch} rows; it belongs to "
                "cu_seqlens, which describes a single row: use batch=1, or leave it out"
            )
        documents = -(-seq // max_seqlen)
        inputs |= {"cu_seqlens": integers(documents + 1, dtype=torch.int32)}
        inputs |= {"max_seqlen": max_seqlen}
    elif packed:
        inputs["position_ids"] = integers(batch, seq)

    if memory_seq is not None:
        size = next(x.memory_size for x in model.modules() if isinstance(x, CrossAttention))
        dtype = next(x.dtype for x in state.values() if x.is_floating_point())
        memory = torch.empty(batch, memory_seq, size, dtype=dtype, device="meta")
        inputs["memory"] = memory.requires_grad_()
    if step_module is not None:
        _check_call(step_module, inputs)

    def end_forward() -> None:
        casts.keeps = False
        casts.casts.clear()

    with ExitStack() as stack:
        if on_gpu:
            for size in cublas_workspaces():
                tracker.allocator.allocate(size)
            stack.enter_context(no_launches(tracker))
        stack.enter_context(sharding.without_fsdp())
        stack.enter_context(simulating(simulator))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # nothing compiled
        if autocast is not None:
            stack.enter_context(casts)
        stack.enter_context(_without_values(called))
        return run_step(
            model,
            tracker,
            state,
            integers(batch, seq),
            gradients=gradients,
            ddp_buckets=ddp_buckets,
            step_bytes=step_bytes,
            on_forward_end=end_forward,
            sharding=sharding,
            step_module=step_module,
            **inputs,
        )


def _check_call(step_module: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise ConfigError if a module does not take the arguments of the model."""
    try:
        inspect.signature(step_module.forward).bind(None, **inputs)
    except TypeError as fault:
        names = "".join(f", {name}=..." for name in inputs)
        raise ConfigError(
            f"memory plan: step_module is a {type(step_module).__name__}, which cannot be called "
            f"in place of the model, as step_module(input_ids{names}): {fault}; pass a module "
            "whose forward takes these arguments and returns the loss"
        ) from None


@contextmanager
def _without_values(called: nn.Module) -> Iterator[None]:
    """Raise ConfigError where a module asks for the values of tensors without data."""
    try:
        yield
    except RuntimeError as fault:
        if "meta tensor" not in str(fault):
            raise
        raise ConfigError(
            f"memory plan: {type(called).__name__} reads the values of tensors in its forward or "
            f"backward, which a simulation does not have ({first_line(fault)}); write a plan by "
            "hand (MemoryPlan.of) and measure its peak"
        ) from fault
