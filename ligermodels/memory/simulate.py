"""The memory and the work of a training step, found by running the step on meta tensors.

The model's own forward and backward run, under the memory plan that it has. Meta tensors have no
data, so nothing is allocated and nothing is computed. A dispatch mode sees every operator, counts
the bytes of the storages that are alive, as CUDA's caching allocator rounds them, and the work.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligermodels.kernels.dispatch import choose
from ligermodels.kernels.simulation import simulating
from ligermodels.layers import attention_backend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.memory.attention_buffers import (
    attention_pairs,
    cublas_workspaces,
    scratch,
    sdpa_backend,
)
from ligermodels.memory.caching_allocator import Block, CachingAllocator
from ligermodels.memory.sharding import Gradients, Sharding

DEFAULT_SMS = 132  # multiprocessors of an H100 and an H200
_aten = torch.ops.aten

# The position of the first factor of each product; the second factor follows it.
_PRODUCTS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::addmm_": 1,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
    "ligermodels::wide_product": 0,
    "ligermodels::accumulate_product": 1,
}
_UNWRITTEN = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
_UNWRITTEN |= {"aten::new_empty_strided"}
_LOOKUPS = {"aten::embedding", "aten::index_select", "aten::index", "aten::gather"}
# Their floating point operations are counted apart.
_ATTENTION = ("_scaled_dot_product_", "torch_attn::_varlen_attn")


@dataclass
class Work:
    """What one pass computes and moves."""

    product_flops: int = 0  # of matrix products, two for each multiplication and addition
    attention_flops: int = 0  # of attention, over the query-key pairs that the mask leaves
    moved_bytes: int = 0  # read and written by all other ops
    to_host_bytes: int = 0
    from_host_bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other))))


@dataclass
class Phase:
    """A part of a step: its bytes and its work."""

    before: int  # bytes that exist when it begins
    peak: int = 0  # the most bytes in it
    after: int = 0  # bytes that exist when it ends
    work: Work = field(default_factory=Work)


@dataclass
class Simulation:
    """What a training step takes on one device, without the optimizer and its states."""

    peak_bytes: int  # the most allocated at any time, with weights, buffers, inputs and gradients
    peak_phase: str  # "forward of layer 3", "forward of head", "backward of layer 3", ...
    weight_bytes: int  # parameters and buffers
    grad_bytes: int  # gradients of all parameters when backward ends
    kept_bytes: int  # what forward leaves for backward, without weights and inputs
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    phases: dict[str, Phase] = field(default_factory=dict)  # in their order
    reserved_bytes: int = 0  # what CUDA's caching allocator reserves from the GPU for the step

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory when forward ends."""
        return self.forward.to_host_bytes


class _PlainSizes:
    """An allocator of a CPU: a block has the size of the request."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0

    def allocate(self, size: int) -> Block:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        return Block(0, size, False)

    def free(self, block: Block) -> None:
        self.allocated -= block.size


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages, and the work, of the operators that run under it.

    Args:
        device_type: "cuda" counts what CUDA's caching allocator and the operators' scratch take;
            "cpu" counts the plain sizes.
        seen: the device of the tensors that count, "meta" or the real one.
    """

    def __init__(self, device_type: str, seen: str = "meta") -> None:
        super().__init__()
        self.on_gpu, self.seen = device_type == "cuda", seen
        # By storage: a weak reference to it, its allocator and its block.
        self.live: dict[int, tuple[Any, CachingAllocator | _PlainSizes, Block]] = {}
        self.uncounted: set[int] = set()  # storages
        self.allocators: dict[str, CachingAllocator | _PlainSizes] = {}  # of streams
        self.stream = "compute"
        self.phases: dict[str, Phase] = {}
        self.phase = Phase(0)

    @property
    def work(self) -> Work:
        """The work of the phase that is running."""
        return self.phase.work

    def enter(self, name: str) -> None:
        """Begin a phase; later peaks and work count for it."""
        self.leave()
        self.phase = self.phases.setdefault(name, Phase(self.bytes, self.bytes))

    def leave(self) -> None:
        """End the phase that is running."""
        self.phase.after = self.bytes

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Count the storages of tensors that exist already; return their bytes."""
        before = self.bytes
        for x in tensors:
            self._allocate(x)
        return self.bytes - before

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Take memory from the allocator of another stream, which keeps what it reserves."""
        before, self.stream = self.stream, name
        try:
            yield
        finally:
            self.stream = before

    @property
    def allocator(self) -> CachingAllocator | _PlainSizes:
        """The allocator of the stream that is running."""
        if self.stream not in self.allocators:
            self.allocators[self.stream] = CachingAllocator() if self.on_gpu else _PlainSizes()
        return self.allocators[self.stream]

    @property
    def bytes(self) -> int:
        """The bytes that are allocated now."""
        return sum(allocator.allocated for allocator in self.allocators.values())

    @property
    def reserved(self) -> int:
        """The bytes that the allocators have reserved."""
        return sum(allocator.reserved for allocator in self.allocators.values())

    def block_bytes(self, x: Tensor) -> int:
        """Return the bytes that a tensor's storage takes."""
        return self.live[x.untyped_storage()._cdata][2].size

    def _allocate(self, x: Tensor) -> None:
        if x.device.type != self.seen:
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live or key in self.uncounted or size == 0:
            return
        reference = weakref.ref(storage, lambda _: self._free(key))
        self.live[key] = reference, self.allocator, self.allocator.allocate(size)

    def _free(self, key: int) -> None:
        _, allocator, block = self.live.pop(key)
        allocator.free(block)

    def _peak(self, extra: int = 0) -> None:
        block = self.allocator.allocate(extra) if extra else None
        self.phase.peak = max(self.phase.peak, self.bytes)
        if block is not None:
            self.allocator.free(block)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.nonzero.default and args[0].is_meta:
            # At most every element.
            out = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif func is _aten.add.Tensor and _accumulates(args[0]):
            out = args[0].add_(args[1])
        else:
            out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._count(func, args, given, made)
        for x in made:
            self._allocate(x)
        self._peak(scratch(func, args) if self.on_gpu else 0)
        return out

    def _count(
        self, func: Any, args: tuple[Any, ...], given: list[Tensor], made: list[Tensor]
    ) -> None:
        name = func.name().partition(".")[0]
        if name in _PRODUCTS:
            a, b = args[_PRODUCTS[name] :][:2]
            self.work.product_flops += 2 * a.numel() * b.shape[-1]
        elif name in _LOOKUPS:
            self.work.moved_bytes += 2 * sum(map(_bytes, made))
        elif name not in _UNWRITTEN and not any(part in name for part in _ATTENTION):
            known = {x.untyped_storage()._cdata for x in given}
            fresh = [x for x in made if x.untyped_storage()._cdata not in known]
            if fresh or func._schema.is_mutable:
                written = fresh or made
                self.work.moved_bytes += sum(map(_bytes, given)) + sum(map(_bytes, written))

    def launched(self, tensors: Iterable[Any]) -> None:
        """Count a launch of one of this library's kernels."""
        self.work.moved_bytes += sum(_bytes(x) for x in tensors if isinstance(x, Tensor))


def _accumulates(total: Tensor) -> bool:
    """Whether autograd's engine adds a gradient to `total` in place when no dispatch mode runs.

    Under a dispatch mode it always makes a new tensor. Otherwise it adds in place if nothing else
    refers to `total` or its storage: `can_accumulate_inplace` in torch/csrc/autograd.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("_fn", "inner"):
        frame = frame.f_back  # wrappers of `__torch_dispatch__`
    # The engine is called by torch, for a backward inside a backward, and by `run_step`.
    if frame.f_code.co_name not in ("_engine_run_backward", "step"):
        return False
    # The engine's buffer holds the tensor. The Python object, its call and this one add three.
    storage = total.untyped_storage()
    users = total._use_count()  # type: ignore[attr-defined]
    return users <= 4 and torch._C._storage_Use_Count(storage._cdata) <= 2


def _bytes(x: Tensor) -> int:
    """The bytes of a tensor's elements; those of an expanded tensor count once."""
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())


class _Simulator:
    """The device that meta tensors stand for; see `kernels.simulation.Simulator`."""

    def __init__(
        self, device: torch.device, num_sms: int, autocast: torch.dtype | None, tracker: Tracker
    ) -> None:
        self.device, self.num_sms, self.autocast = device, num_sms, autocast
        self.tracker = tracker

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        before, self.autocast = self.autocast, None
        try:
            yield
        finally:
            self.autocast = before

    def copied(self, to_host: bool, size: int) -> None:
        if to_host:
            self.tracker.work.to_host_bytes += size
        else:
            self.tracker.work.from_host_bytes += size

    def attend(
        self,
        backend: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        scale: float,
        window: int | None,
        softcap: float | None,
        causal: bool,
    ) -> Tensor:
        batch, heads, queries, head_dim = q.shape
        length = mask.max_seqlen if backend == "varlen" and mask.max_seqlen else queries
        pairs = batch * heads * (queries / length) * attention_pairs(length, window, causal)
        if k.shape[2] != queries:  # keys of another sequence, which all queries see
            pairs = batch * heads * queries * k.shape[2]
        flops = int(4 * pairs * head_dim)
        # Backward computes five products of this size, where forward computes two.
        q = _Count.apply(q, self.tracker, flops, 5 * flops // 2)
        if backend == "varlen":
            return attention_backend._varlen(q, k, v, mask, scale, window, causal)
        if backend == "flex":
            if not mask.hides_nothing(window, causal=causal):
                self.block_mask(mask, window, batch, causal)
            return _Flex.apply(q, k, v)
        visible = None
        if backend == "dense" and not mask.hides_nothing(window, causal=causal):
            visible = mask.dense(window, q.device, causal=causal)
        if softcap is not None:
            with self.without_autocast():
                return attention_backend._capped(q, k, v, visible, scale, softcap)
        if self.autocast is not None:
            q, k, v = (x.to(self.autocast) for x in (q, k, v))
        return self._sdpa(q, k, v, visible, scale, causal)

    def _sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, causal: bool
    ) -> Tensor:
        heads, queries, head_dim = q.shape[1:]
        causal = causal and visible is None and queries > 1
        if self.device.type == "cpu":
            if visible is not None:
                # As PyTorch turns a bool mask into numbers to add.
                hidden = torch.scalar_tensor(-torch.inf, dtype=q.dtype, device=q.device)
                shown = torch.scalar_tensor(0.0, dtype=q.dtype, device=q.device)
                visible = torch.where(visible, shown, hidden)
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=visible, scale=scale
            )[0]
        if visible is None:
            k, v = attention_backend.heads_for_sdpa(q, k, v)
        backend = sdpa_backend(heads, k.shape[1], head_dim, q.dtype)
        if visible is None and backend == SDPBackend.CUDNN_ATTENTION:
            return _aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=scale
            )[0]
        if visible is None and backend == SDPBackend.FLASH_ATTENTION:
            return _aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, False, scale=scale
            )[0]
        if visible is None and backend == SDPBackend.EFFICIENT_ATTENTION:
            return _aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )[0]
        return F.scaled_dot_product_attention(
            q, k, v, visible, is_causal=causal, scale=scale, enable_gqa=True
        )

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
    def forward(ctx: Any, q: Tensor, tracker: Tracker, flops: int, backward_flops: int) -> Tensor:
        tracker.work.attention_flops += flops
        ctx.tracker, ctx.flops = tracker, backward_flops
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tracker.work.attention_flops += ctx.flops
        return grad, None, None, None


class _Flex(torch.autograd.Function):
    """The allocations of compiled FlexAttention: it saves its output and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        torch.empty_like(lse)  # the largest score of each query
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del delta
        return grads


class _Autocast(TorchFunctionMode):
    """Casts the operands of plain PyTorch's products as autocast does on the simulated device."""

    def __init__(self, simulator: _Simulator) -> None:
        super().__init__()
        self.simulator = simulator
        self.casts: dict[int, Tensor] = {}  # of leaves, as long as forward lasts
        self.keeps = True
        self.products = {F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm}
        self.products |= {Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.simulator.autocast is not None and func in self.products:
            args = tuple(map(self._cast, args))
            kwargs = {key: self._cast(x) for key, x in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _cast(self, x: Any) -> Any:
        dtype = self.simulator.autocast
        if not isinstance(x, Tensor) or x.dtype not in (
            torch.float32,
            torch.float16,
            torch.bfloat16,
        ):
            return x
        if not (self.keeps and x.is_leaf and x.requires_grad and x.dtype == torch.float32):
            return x.to(dtype)
        if id(x) not in self.casts:
            self.casts[id(x)] = x.to(dtype)
        return self.casts[id(x)]


class _NoLaunch:
    """Stands in for a Triton kernel: a launch with meta tensors is counted, others happen."""

    def __init__(self, kernel: Any, tracker: Tracker) -> None:
        self.kernel, self.tracker = kernel, tracker

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(x, Tensor) and x.is_meta for x in args):
                return self.tracker.launched(args)
            return self.kernel[grid](*args, **kwargs)

        return launch


@contextmanager
def _no_launches(tracker: Tracker) -> Iterator[None]:
    """Put `_NoLaunch` in the place of every Triton kernel of this library."""
    import ligermodels.kernels.triton as triton

    modules = [x for x in vars(triton).values() if isinstance(x, ModuleType)]
    kernels = [
        (module, name, kernel)
        for module in modules
        for name, kernel in vars(module).items()
        if name.endswith("_kernel") and not isinstance(kernel, _NoLaunch)
    ]
    for module, name, kernel in kernels:
        setattr(module, name, _NoLaunch(kernel, tracker))
    try:
        yield
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def _stand_in(x: Tensor) -> Tensor:
    """Return a meta tensor like x."""
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
    collector runs.
    """
    parts = [(f"layer {i}", x) for i, x in enumerate(getattr(model, "layers", ()))]
    if isinstance(head := getattr(model, "head", None), nn.Module):
        parts.append(("head", head))

    def began(part: str) -> None:
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


def run_step(
    model: nn.Module,
    tracker: Tracker,
    state: dict[str, Tensor],
    input_ids: Tensor,
    *,
    gradients: Gradients = "new",
    on_forward_end: Callable[[], None] = lambda: None,
    sharding: Sharding | None = None,
    **inputs: Any,
) -> Simulation:
    """Run forward and backward with the parameters and buffers of `state`, and count.

    Without gradients (`torch.no_grad`), only forward runs. Of the parameters of `sharding`, `state`
    has whole ones, which do not count.
    """
    sharded = sharding.parameters if sharding is not None else {}
    held = [x for name, x in state.items() if name not in sharded]
    leaves = [x for x in held if x.requires_grad]
    weight_bytes = tracker.hold(held)
    tracker.uncounted = {state[name].untyped_storage()._cdata for name in sharded}
    if sharding is not None:
        weight_bytes += tracker.hold(sharding.begin(tracker.on_stream, gradients))
        tracker.hold(sharding.gradients())
    if gradients == "kept":
        for x in leaves:
            x.grad = torch.empty_like(x)
        tracker.hold(x.grad for x in leaves if x.grad is not None)
    elif gradients == "freed":
        for x in leaves:
            x.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    tracker.hold(x for x in (input_ids, *inputs.values()) if isinstance(x, Tensor))
    before, kept_bytes = tracker.bytes, 0

    def step(model: nn.Module) -> None:
        nonlocal kept_bytes
        with ExitStack() as stack:
            stack.enter_context(_phases(model, tracker))
            if sharding is not None:
                stack.enter_context(sharding.hooked(model))
            out = model(input_ids, **inputs)
        on_forward_end()
        loss = out if isinstance(out, Tensor) else out[0]
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
        whole = {f"model.{name}": x for name, x in state.items()}
        torch.func.functional_call(_Step(model, step), whole, ())
    tracker.leave()
    phases = tracker.phases
    grads = [x.grad for x in leaves if x.grad is not None]
    grads += [] if sharding is None else sharding.gradients()

    def work(direction: str) -> Work:
        return sum((p.work for name, p in phases.items() if name.startswith(direction)), Work())

    return Simulation(
        peak_bytes=max(phase.peak for phase in phases.values()),
        peak_phase=max(phases, key=lambda name: phases[name].peak),
        weight_bytes=weight_bytes,
        grad_bytes=sum(map(tracker.block_bytes, grads)),
        kept_bytes=kept_bytes,
        forward=work("forward"),
        backward=work("backward"),
        phases=phases,
        reserved_bytes=tracker.reserved,
    )


def simulate(
    model: nn.Module,
    batch: int,
    seq: int,
    *,
    device: torch.device,
    autocast: torch.dtype | None = None,
    labels: bool = True,
    packed: bool = False,
    max_seqlen: int | None = None,
    head_options: dict[str, Any] | None = None,
    gradients: Gradients = "new",
    num_sms: int | None = None,
) -> Simulation:
    """Run forward and backward of a model on meta tensors, under its memory plan.

    Args:
        model: any decoder of this library, on any device, "meta" included.
        batch, seq: rows, and tokens of each row.
        device: the device to simulate. A GPU need not exist.
        autocast: the dtype of autocast around forward; None for no autocast.
        labels: whether forward gets labels and returns a loss. Without them, backward begins at the
            hidden states.
        packed: whether rows hold several documents, told by position_ids; if max_seqlen is given
            and batch is 1, by cu_seqlens of documents of this length.
        head_options: keyword arguments of the head.
        gradients: "new" if no gradient exists before the step, "kept" if all do (accumulation), and
            "freed" if an optimizer step in backward frees each as soon as it is complete.
        num_sms: multiprocessors of the GPU, by default those of the GPU that is here, or 132.
    Returns: a `Simulation`. Its bytes are those of `torch.cuda.max_memory_allocated`.
    Raises:
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
    simulator = _Simulator(device, num_sms or DEFAULT_SMS, autocast, tracker)
    casts = _Autocast(simulator)

    named = (*model.named_parameters(), *model.named_buffers())
    sharding = Sharding(model)
    state = {
        name: sharding.parameters[name].stand_in() if name in sharding.parameters else _stand_in(x)
        for name, x in named
    }

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs: dict[str, Any] = dict(head_options or {})
    if labels:
        inputs["labels"] = integers(batch, seq)
    if packed and max_seqlen is not None and batch == 1:
        documents = -(-seq // max_seqlen)
        inputs |= {"cu_seqlens": integers(documents + 1, dtype=torch.int32)}
        inputs |= {"max_seqlen": max_seqlen}
    elif packed:
        inputs["position_ids"] = integers(batch, seq)

    def end_forward() -> None:
        casts.keeps = False
        casts.casts.clear()

    with ExitStack() as stack:
        if on_gpu:
            for size in cublas_workspaces():
                tracker.allocator.allocate(size)
            stack.enter_context(_no_launches(tracker))
        stack.enter_context(sharding.without_fsdp())
        stack.enter_context(simulating(simulator))
        stack.enter_context(_eagerly())
        if autocast is not None:
            stack.enter_context(casts)
        return run_step(
            model,
            tracker,
            state,
            integers(batch, seq),
            gradients=gradients,
            on_forward_end=end_forward,
            sharding=sharding,
            **inputs,
        )


def _eagerly() -> AbstractContextManager[object]:
    """Return a context in which compiled functions run uncompiled."""
    return torch.compiler.set_stance("force_eager")
