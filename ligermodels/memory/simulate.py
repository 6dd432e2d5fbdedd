"""The memory and the work of a training step, found by running the step on meta tensors.

The model's own forward and backward run, under the memory plan that it has. Meta tensors have no
data, so nothing is allocated and nothing is computed. `Tracker` counts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ligermodels.errors import ConfigError, first_line
from ligermodels.kernels.dispatch import choose, simulating
from ligermodels.layers import attention_backend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.memory.plan import check_choice, checked_integer
from ligermodels.memory.rates import BACKWARD, AttentionKind, Work, attention_kind, attention_pairs
from ligermodels.memory.torch_private import (
    Flex,
    Gradients,
    Sharding,
    cublas_workspaces,
    expandable_segments,
    run_backward,
    sdpa_backend,
)
from ligermodels.memory.tracker import Phase, Tracker

_aten = torch.ops.aten
# The kernels of scaled_dot_product_attention, and their arguments after q, k and v.
_KERNELS: dict[SDPBackend, tuple[Any, tuple[Any, ...]]] = {
    SDPBackend.CUDNN_ATTENTION: (_aten._scaled_dot_product_cudnn_attention, (None, True)),
    SDPBackend.FLASH_ATTENTION: (_aten._scaled_dot_product_flash_attention, ()),
    SDPBackend.EFFICIENT_ATTENTION: (_aten._scaled_dot_product_efficient_attention, (None, True)),
}
_CAST = torch.float32, torch.float16, torch.bfloat16  # what autocast casts
_PRODUCTS = {F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm}
_PRODUCTS |= {Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
_H100_SMS = 132  # multiprocessors of an H100 and an H200


class SimulatedDevice(TorchFunctionMode):
    """The device that meta tensors stand for, and the counters of a simulated step.

    As a mode, it casts the operands of plain PyTorch's products as autocast does there. The ops ask
    it (`kernels.dispatch.simulator_of`) for:

    Attributes:
        device: what meta tensors stand for.
        autocast: the dtype to which autocast casts; None while it is disabled.
        num_sms: the multiprocessors of the GPU.
    """

    def __init__(
        self, device: torch.device, autocast: torch.dtype | None, tracker: Tracker
    ) -> None:
        super().__init__()
        self.device, self.autocast, self.tracker = device, autocast, tracker
        here = device.type == "cuda" and torch.cuda.is_available()
        properties = torch.cuda.get_device_properties(device) if here else None
        self.num_sms = _H100_SMS if properties is None else properties.multi_processor_count
        self.casts: dict[int, Tensor] = {}  # of leaves, as long as forward lasts
        self.keeps = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.autocast is not None and func in _PRODUCTS:
            args = tuple(map(self._cast, args))
            kwargs = {key: self._cast(x) for key, x in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _cast(self, x: Any) -> Any:
        if self.autocast is None or not isinstance(x, Tensor) or x.dtype not in _CAST:
            return x
        if not (self.keeps and x.is_leaf and x.requires_grad and x.dtype == torch.float32):
            return x.to(self.autocast)
        if id(x) not in self.casts:
            self.casts[id(x)] = x.to(self.autocast)
        return self.casts[id(x)]

    def end_forward(self) -> None:
        self.keeps = False
        self.casts.clear()

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Disable autocast within the context."""
        before, self.autocast = self.autocast, None
        try:
            yield
        finally:
            self.autocast = before

    def copied(self, to_host: bool, size: int) -> None:
        """Count `size` bytes that go to the host or come back from it."""
        if to_host:
            self.tracker.work.to_host_bytes += size
        else:
            self.tracker.work.from_host_bytes += size

    def count_attention(
        self,
        backend: str,
        q: Tensor,
        k: Tensor,
        mask: AttentionMask,
        window: int | None,
        softcap: float | None,
        causal: bool,
    ) -> Tensor:
        """Count the work of attention with these options of `attend`, and return q."""
        batch, heads, queries, head_dim = q.shape
        length = mask.max_seqlen if backend == "varlen" and mask.max_seqlen else queries
        pairs = batch * heads * (queries / length) * attention_pairs(length, window, causal)
        if mask.is_part and causal:
            pairs = batch * heads * queries * min(window or mask.keys, mask.past + queries / 2)
        elif k.shape[2] != queries:  # keys of another sequence, which all queries see
            pairs = batch * heads * queries * k.shape[2]
        kind = attention_kind(backend, q, k, length, window, softcap, causal)
        return _Count.apply(q, self.tracker, kind, int(4 * pairs * head_dim))

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None = None,
        *,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return what scaled_dot_product_attention does, by the kernel that the device takes."""
        if self.device.type == "cpu":
            if visible is not None:
                # As PyTorch turns a bool mask into numbers to add.
                hidden = torch.scalar_tensor(-torch.inf, dtype=q.dtype, device=q.device)
                shown = torch.scalar_tensor(0.0, dtype=q.dtype, device=q.device)
                visible = torch.where(visible, shown, hidden)
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, is_causal, attn_mask=visible, scale=options["scale"]
            )[0]
        if visible is None:
            backend = sdpa_backend(q.shape[1], k.shape[1], q.shape[-1], q.dtype)
            if backend in _KERNELS:
                kernel, given = _KERNELS[backend]
                return kernel(q, k, v, *given, 0.0, is_causal, scale=options["scale"])[0]
        return F.scaled_dot_product_attention(q, k, v, visible, is_causal=is_causal, **options)

    def flex(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: AttentionMask,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        """Return a tensor of the output's shape after the allocations of FlexAttention."""
        if not mask.hides_nothing(window, causal=causal):
            self.block_mask(mask, window, len(q), causal)
        out = Flex.apply(q, k, v)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        return out if sinks is None else attention_backend.sunk(out, lse, sinks)

    def block_mask(self, mask: AttentionMask, window: int | None, batch: int, causal: bool) -> None:
        """Hold the index tensors of FlexAttention's block mask as long as the mask lives.

        FlexAttention keeps, for partial and for full blocks, from queries to keys and back, the
        number of blocks of each row and their order, in int32. To sort them takes int64 numbers.
        """
        if (window, causal) in mask._block_masks:
            return
        given = (mask.document_ids, mask.padding_mask, mask.prefix_lengths)
        rows = 1 if all(x is None for x in given) else batch
        shape = rows, 1, -(-mask.queries // 128), -(-mask.keys // 128)
        index = [torch.empty(shape, dtype=torch.int32, device="meta") for _ in range(4)]
        counts = [torch.empty(shape[:3], dtype=torch.int32, device="meta") for _ in range(4)]
        dense = torch.empty(shape, dtype=torch.int32, device="meta")
        torch.empty((2, *shape), dtype=torch.int64, device="meta")
        del dense
        mask._block_masks[window, causal] = None, (index, counts)  # type: ignore[assignment]


class _Count(torch.autograd.Function):
    """Return q, and count attention's work in each pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, tracker: Tracker, kind: AttentionKind, flops: int) -> Tensor:
        tracker.work.attention[kind, "forward"] += flops
        ctx.tracker, ctx.kind, ctx.flops = tracker, kind, int(BACKWARD * flops)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tracker.work.attention[ctx.kind, "backward"] += ctx.flops
        return grad, None, None, None


@contextmanager
def no_launches(tracker: Tracker) -> Iterator[None]:
    """Count a launch of a Triton kernel with meta tensors instead of launching it."""
    from ligermodels.kernels.triton import glu

    kernel_class: Any = type(glu.glu_forward_kernel)  # another one in Triton's interpreter
    run = kernel_class.run

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(x, Tensor) and x.is_meta for x in args):
            return tracker.launched(args)
        return run(kernel, *args, **options)

    kernel_class.run = counted
    try:
        yield
    finally:
        kernel_class.run = run


OPTIMIZER_STEP = "optimizer step"  # a phase
LONGEST = 2**31 - 1  # rows, and tokens of a row


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a training step consists of, besides the model and the shape of its batch.

    Attributes:
        autocast: the dtype of torch.autocast around forward, bfloat16 or float16; None for none.
        packed: whether the rows contain several documents (position_ids).
        max_seqlen: if cu_seqlens tells the documents, the longest one. Each row counts as divided
            into documents of this length.
        head_options: keyword arguments of the loss head.
        gradients: "new" if no gradient exists before the step (zero_grad(set_to_none=True)), "kept"
            if all do (accumulation), and "freed" if an optimizer step in backward frees each as
            soon as it is complete.
        step_module: a module that contains the model, and that a step calls with the same arguments
            in its place, such as one with a teacher or an encoder. It returns the loss, or a tuple
            that begins with the loss. What else it holds and runs counts, too.
        step_bytes: what an optimizer step after backward allocates for itself.
    Raises:
        ConfigError: a value or a type that is not named above.
    """

    autocast: torch.dtype | None = None
    packed: bool = False
    max_seqlen: int | None = None
    head_options: dict[str, Any] = field(default_factory=dict)
    gradients: Gradients = "new"
    step_module: nn.Module | None = None
    step_bytes: int = 0

    def __post_init__(self) -> None:
        check_choice("autocast", self.autocast, None, torch.bfloat16, torch.float16)
        check_choice("gradients", self.gradients, "new", "kept", "freed")
        if self.max_seqlen is not None:
            checked_integer("max_seqlen", self.max_seqlen, 1, LONGEST)

    def called(self, model: Any) -> nn.Module:
        """Return the module that a step of the model calls."""
        return model if self.step_module is None else self.step_module

    def inputs(self, model: Any, batch: int, seq: int) -> dict[str, Any]:
        """Return the arguments of forward as meta tensors."""

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        found = {"input_ids": integers(batch, seq), **self.head_options}
        found["labels"] = model.meta_labels(batch, seq)
        if self.max_seqlen is not None:
            documents = batch * -(-seq // self.max_seqlen)
            found["cu_seqlens"] = integers(documents + 1, dtype=torch.int32)
            found["max_seqlen"] = self.max_seqlen
        elif self.packed:
            found["position_ids"] = integers(batch, seq)
        return found


@dataclass
class Simulation:
    """The memory and the work of a training step on one device, without the optimizer."""

    peak_bytes: int  # the most allocated at any time, with weights, buffers, inputs and gradients
    weight_bytes: int  # parameters and buffers
    grad_bytes: int  # gradients of all parameters when backward ends
    # In their order: "forward of layer 3", "forward of head", "backward of layer 3", ...
    phases: dict[str, Phase]
    reserved_bytes: int = 0  # what CUDA's caching allocator reserves from the GPU for the step
    # The largest block of a layer, unless segments are expandable. The head's blocks come before
    # any memory is free, and the embedding's when most of it is.
    largest_bytes: int = 0

    def work(self, direction: str) -> Work:
        """Return the work of "forward" or "backward"."""
        works = (phase.work for name, phase in self.phases.items() if name.startswith(direction))
        return sum(works, Work())

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory when forward ends."""
        return self.work("forward").to_host_bytes


def simulate(model: Any, batch: int, seq: int, *, device: torch.device, **step: Any) -> Simulation:
    """Run forward and backward of a model on meta tensors, under its memory plan.

    Args:
        model: any decoder of this library, on any device, "meta" included.
        batch, seq: rows, and tokens of each row.
        device: the device to simulate. A GPU need not exist.
        step: the fields of `Step`.
    Returns: a `Simulation`. Its bytes are those of `torch.cuda.max_memory_allocated`.
    Raises:
        ConfigError: the model's step is not such a `Step`, it reads the values of tensors on the
            host, it returns no loss, or a GPU is simulated and triton is not installed.
    """
    options = Step(**step)
    on_gpu = device.type == "cuda"
    if on_gpu and choose(device)[0] != "triton":
        raise ConfigError(
            "memory plan: a step on a GPU is simulated with the Triton kernels, but "
            f"{choose(device)[1]}"
        )
    called = options.called(model)
    tracker = Tracker(device.type)
    simulator = SimulatedDevice(device, options.autocast, tracker)
    sharding = Sharding(model, called)
    with ExitStack() as stack:
        if on_gpu:
            for size in cublas_workspaces():
                tracker.allocator.allocate(size)
            stack.enter_context(no_launches(tracker))
        stack.enter_context(sharding.without_fsdp())
        stack.enter_context(simulating(simulator))
        if options.autocast is not None:
            stack.enter_context(simulator)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # nothing compiled
        stack.enter_context(_without_values(called))
        stack.enter_context(_without_data(called, sharding))
        inputs = options.inputs(model, batch, seq)
        return run_step(model, tracker, inputs, options, sharding, simulator.end_forward)


def run_step(
    model: nn.Module,
    tracker: Tracker,
    inputs: dict[str, Any],
    options: Step,
    sharding: Sharding,
    on_forward_end: Callable[[], object] = lambda: None,
) -> Simulation:
    """Run forward and backward with the tensors that the model has now, and count.

    Without gradients (`torch.no_grad`), only forward runs.
    """
    called = options.called(model)
    whole = {id(p.whole): p.whole.untyped_storage() for p in sharding.parameters.values()}
    held = [x for x in (*called.parameters(), *called.buffers()) if id(x) not in whole]
    leaves = [x for x in held if x.requires_grad]
    weight_bytes = tracker.hold(held)
    tracker.uncounted = {storage._cdata for storage in whole.values()}
    weight_bytes += tracker.hold(sharding.begin(tracker.on_stream, options.gradients))
    tracker.hold(sharding.gradients())
    if options.gradients == "kept":
        for x in leaves:
            x.grad = torch.empty_like(x)
        tracker.hold(x.grad for x in leaves if x.grad is not None)
    elif options.gradients == "freed":
        for x in leaves:
            x.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    tracker.hold(inputs.values())

    tracker.enter("forward")
    with tracker:
        with _phases(model, tracker), sharding.hooked(model):
            out = called(**inputs)
        on_forward_end()
        loss = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"memory plan: {type(called).__name__} returned a {type(out).__name__}; expected "
                "the loss, or a tuple that begins with it"
            )
        if loss.requires_grad:
            tracker.enter("backward")
            run_backward(loss)
            sharding.end()
        del out, loss
    if options.step_bytes:
        tracker.enter(OPTIMIZER_STEP)
        tracker.reach(options.step_bytes)
    tracker.leave()
    phases = tracker.phases
    grads = [x.grad for x in leaves if x.grad is not None]
    largest = max((p.largest for name, p in phases.items() if "layer" in name), default=0)
    return Simulation(
        peak_bytes=max(phase.peak for phase in phases.values()),
        weight_bytes=weight_bytes,
        grad_bytes=sum(map(tracker.block_bytes, grads + sharding.gradients())),
        phases=phases,
        reserved_bytes=tracker.reserved,
        largest_bytes=largest if tracker.on_gpu and not expandable_segments() else 0,
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


@contextmanager
def _without_data(called: nn.Module, sharding: Sharding) -> Iterator[None]:
    """Put meta tensors in the places of a module's parameters and buffers.

    A tied weight has the same tensor in all its places.
    """
    tables: list[Any] = [x for m in called.modules() for x in (m._parameters, m._buffers)]
    before = [dict(table) for table in tables]
    made = {key: p.whole for key, p in sharding.parameters.items()}
    try:
        for table, tensors in zip(tables, before):
            for name, x in tensors.items():
                if x is not None:
                    if id(x) not in made:
                        made[id(x)] = _stand_in(x)
                    table[name] = made[id(x)]
        yield
    finally:
        for table, tensors in zip(tables, before):
            table.update(tensors)


def _stand_in(x: Tensor) -> Tensor:
    """Return a meta tensor like x."""
    if is_traceable_wrapper_subclass(x):  # such as a quantized weight, made of several tensors
        return x.detach().to("meta").requires_grad_(x.requires_grad)
    return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)


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
