"""Copies of PyTorch's private behaviour: what it allocates, and a simulation cannot see.

A simulated step runs PyTorch's operators on tensors without data. This file adds what they, and
PyTorch's wrappers of modules, allocate on a real device:

- CUDA's caching allocator: c10/cuda/CUDACachingAllocator.cpp
- the buffers of attention, of an embedding's backward and of cuBLAS
- the sums of gradients that autograd makes in place
- the buckets of `DistributedDataParallel`
- the states and the step of optimizers
- the tensors of FSDP2 (`torch.distributed.fsdp.fully_shard`)

With a version of torch that `CHECKED` does not name, tests/memory/test_torch_private.py fails.
"""

import os
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_flatten, tree_unflatten

from ligermodels.errors import ConfigError
from ligermodels.layers.fusion import is_sharded
from ligermodels.memory.byte_sizes import MIB

CHECKED = ("2.11", "2.13")
"""The versions of torch with which this was checked: 2.11 on GPUs, and both without one."""

# CUDA's caching allocator, with its default settings or with expandable segments. A request takes
# the smallest free block that is large enough; the rest of the block is split off, if it is not too
# small. If no block fits, a new segment comes from the GPU. Expandable segments are two, for small
# and for large blocks, which grow at their ends. Nothing goes back to the GPU.


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment; `before` and `after` are its neighbours there."""

    address: int
    size: int
    small: bool
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def key(self) -> tuple[int, int]:
        """The order in which free blocks are tried."""
        return self.size, self.address


class CachingAllocator:
    """Gives blocks for requests; `allocated` and `reserved` are bytes.

    Args: expandable: whether segments are expandable.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.reserved = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # small or not, by their keys
        self._last: dict[bool, Block | None] = {True: None, False: None}  # of expandable segments
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        """Return a block for a request of `size` bytes."""
        size = max(-(-size // 512), 1) * 512
        small = size <= MIB
        pool = self._free[small]
        place = bisect_left(pool, (size, -1), key=lambda block: block.key)
        if place + 1 < len(pool) and pool[place] is self._last[small]:
            place += 1  # the last block counts as large as it may become
        found = pool.pop(place) if place < len(pool) else None
        if found is not None:
            block = found
        else:
            block = self._grown(size, small) if self.expandable else self._segment(size, small)
        rest = block.size - size
        if rest >= 512 if small or self.expandable else rest > MIB:
            after = Block(block.address + size, rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = after
            elif self.expandable:
                self._last[small] = after
            block.size, block.after = size, after
            self._insert(after)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours."""
        self.allocated -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = _joined(block.before, block)
        if block.after is not None and block.after.free:
            self._remove(block.after)
            block = _joined(block, block.after)
        if self.expandable and block.after is None:
            self._last[block.small] = block
        self._insert(block)

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            length = 2 * MIB
        elif size < 10 * MIB:
            length = 20 * MIB
        else:
            length = -(-size // (2 * MIB)) * 2 * MIB
        block = Block(self._next_address, length, small)
        self._next_address += length
        self.reserved += length
        return block

    def _grown(self, size: int, small: bool) -> Block:
        """Let an expandable segment grow until its last block, if that is free, has the size."""
        last, part = self._last[small], (2 if small else 20) * MIB
        if last is not None and last.free:
            self._remove(last)
            block = last
        else:
            end = int(not small) << 60 if last is None else last.address + last.size
            block = Block(end, 0, small, True, last)
            if last is not None:
                last.after = block
        more = -(-(size - block.size) // part) * part
        block.size += more
        self.reserved += more
        self._last[small] = block
        return block

    def _insert(self, block: Block) -> None:
        insort(self._free[block.small], block, key=lambda other: other.key)

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, block.key, key=lambda other: other.key))


def expandable_segments() -> bool:
    """Return whether CUDA's caching allocator is set to expandable segments.

    Before it runs out of memory, it then also moves free memory to where a block is needed.
    """
    # The environment is read when the allocator starts; torch tells what was read.
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        settings = torch._C._accelerator_getAllocatorSettings()
    else:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        settings = ",".join(os.environ.get(name, "") for name in names)
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def _joined(first: Block, second: Block) -> Block:
    """Make one block of two neighbours."""
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


# The buffers of operators. A kernel's outputs and gradients are tensors that a simulation sees. Its
# scratch is not: the table `SCRATCH` gives its bytes, for the arguments of the operator.

FLOAT = 4  # bytes of a float32
LONG = 8  # bytes of an int64
_aten = torch.ops.aten


def _up(length: int, block: int) -> int:
    return -(-length // block) * block


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """FlashAttention 2, mha_bwd: float32 sums of dq, one number per row, dk and dv of all heads."""
    batch, heads, queries, head_dim = q.shape
    rows = batch * heads * _up(queries, 128)
    scratch = rows * (_up(head_dim, 32) + 1) * FLOAT
    return scratch + _expanded(batch * k.shape[2], heads, k.shape[1], head_dim, k.itemsize)


def _varlen_backward(grad: Tensor, q: Tensor, k: Tensor, *arguments: Any) -> int:
    """FlashAttention 2, mha_varlen_bwd: as above, with up to 128 rows more per document."""
    total, heads, head_dim = q.shape
    documents = next(x for x in arguments if isinstance(x, Tensor) and x.dtype == torch.int32)
    rows = heads * (total + 128 * (len(documents) - 1))
    scratch = rows * (_up(head_dim, 32) + 1) * FLOAT
    return scratch + _expanded(len(k), heads, k.shape[1], head_dim, k.itemsize)


def _expanded(keys: int, heads: int, kv_heads: int, head_dim: int, size: int) -> int:
    """Return the bytes of the gradients of k and v for each query head, before they are summed."""
    return 0 if heads == kv_heads else 2 * keys * heads * head_dim * size


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """cudnn-frontend, the backward node of SDPA: float32 sums of dq, one number per row, and the
    gradients of k and v for each query head."""
    batch, heads, queries, head_dim = q.shape
    scratch = batch * heads * queries * (head_dim + 1) * FLOAT
    return scratch + _expanded(batch * k.shape[2], heads, k.shape[1], head_dim, k.itemsize)


def _efficient_backward(grad: Tensor, q: Tensor, *_: Any) -> int:
    """attention_backward.cu: the product of the output and its gradient, and its sums."""
    return q.numel() * FLOAT + q.numel() // q.shape[-1] * 2 * FLOAT


def _embedding_backward(grad: Tensor, ids: Tensor, *_: Any) -> int:
    """Embedding.cu and EmbeddingBackwardKernel.cu: the ids are sorted, which takes nine arrays, and
    each row of the gradient is copied to float32. Few ids are added without a sort."""
    tokens = ids.numel()
    if tokens <= 3072:
        return 0
    wide = max(grad.itemsize, FLOAT)
    return 9 * tokens * LONG + grad.numel() * wide


# The bytes that an operator allocates and frees by itself.
SCRATCH: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
}


def scratch(operator: Any, arguments: tuple[Any, ...]) -> int:
    """Return the bytes that an operator allocates and frees by itself on a GPU."""
    if operator in SCRATCH:
        return SCRATCH[operator](*arguments)
    # PyTorch registers this one when its module is first imported.
    if operator.name() == "torch_attn::_varlen_attn_backward":
        return _varlen_backward(*arguments)
    return 0


def cublas_workspaces() -> tuple[int, int]:
    """Return the bytes that cuBLAS keeps for the threads of forward and of backward.

    Source: CublasHandlePool.cpp; Hopper takes 32 MiB and other GPUs 8.125 MiB.
    """
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
    size = 32 * 2**20 if hopper else 8519680
    return size, size


@cache
def sdpa_backend(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> SDPBackend:
    """Return the kernel of scaled_dot_product_attention for a causal mask.

    This asks PyTorch with small tensors. Without a GPU, it returns what PyTorch takes on an H100.
    """
    if torch.cuda.is_available():
        packed = torch.empty(1, 128, heads + 2 * kv_heads, head_dim, dtype=dtype, device="cuda")
        parts = packed.requires_grad_().split((heads, kv_heads, kv_heads), 2)
        q, k, v = (x.transpose(1, 2) for x in parts)
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True))
    if dtype in (torch.float16, torch.bfloat16) and head_dim <= 256:
        small = head_dim <= 128 and head_dim % 8 == 0
        return SDPBackend.CUDNN_ATTENTION if small else SDPBackend.FLASH_ATTENTION
    if heads == kv_heads and head_dim % 4 == 0:
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


class Flex(torch.autograd.Function):
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


# Autograd


def accumulates(total: Tensor) -> bool:
    """Return whether autograd adds a gradient to `total` in place when no dispatch mode runs.

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


# The buckets in which `DistributedDataParallel` averages gradients, with the default sizes. They
# exist as long as the wrapper, and hold all gradients once. Source:
# torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size`.

# "copies": gradients are separate tensors. "views": they are views of the buckets, which is
# gradient_as_bucket_view=True.
Buckets = Literal["copies", "views"]

_FIRST, _OTHERS = MIB, 25 * MIB  # bytes after which a bucket takes no further gradient


def buckets(trained: Iterable[Tensor]) -> list[Tensor]:
    """Return meta tensors of the sizes of the buckets; the parameters are in the model's order."""
    limit = _FIRST
    open_buckets: dict[torch.dtype, int] = {}  # elements
    made: list[tuple[int, torch.dtype]] = []
    for x in reversed([*trained]):  # about the order in which backward computes the gradients
        count = open_buckets.pop(x.dtype, 0) + x.numel()
        if count * x.itemsize >= limit:
            made.append((count, x.dtype))
            limit = _OTHERS
        else:
            open_buckets[x.dtype] = count
    made += ((count, dtype) for dtype, count in open_buckets.items())
    return [torch.empty(count, dtype=dtype, device="meta") for count, dtype in made]


# Optimizers

# Two states of a parameter's shape and dtype: what AdamW keeps, and what is taken for granted of
# an optimizer that is not known.
_ADAM = 2


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's states on the devices of its parameters.

    Before its first step an optimizer has none. Then they are told from its class: Adam and its
    relatives, SGD, Adafactor and Muon of torch, and the optimizers of torchao in 8 bits and fewer.
    Others count as Adam. An optimizer that is made of others has them in `inner_optimizers`.
    """
    inner = getattr(optimizer, "inner_optimizers", [])
    held = [value for state in optimizer.state.values() for value in state.values()]
    found = sum(x.nbytes for x in _plain(held) if x.device.type != "cpu" or _on_cpu(optimizer))
    if inner and not found:
        return sum(map(state_bytes, inner))
    return found or sum(
        _expected_of(optimizer, group, local(parameter))
        for group in optimizer.param_groups
        for parameter in _trained(group)
    )


def adam_bytes(model: nn.Module) -> int:
    """Return the bytes of Adam's states for the parameters of a model that need gradients."""
    return sum(_ADAM * local(p).nbytes for p in model.parameters() if p.requires_grad)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all parameters are on the CPU, where some optimizers keep a count of steps."""
    return all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])


def _plain(values: list[Any]) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of some values; one in 8 bits is made of several."""
    for value in values:
        if isinstance(value, Tensor):
            yield from plain(local(value))


def _trained(group: dict[str, Any]) -> list[Tensor]:
    """Return what a group trains: parameters, or parts of them."""
    return [p for p in group["params"] if p.requires_grad or not isinstance(p, nn.Parameter)]


def _expected_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], x: Tensor) -> int:
    amsgrad = bool(group.get("amsgrad"))
    if isinstance(optimizer, torch.optim.SGD):
        return x.nbytes if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.Muon):
        return x.nbytes
    if isinstance(optimizer, torch.optim.Adafactor):
        # A mean of squares for each row and for each column of a matrix.
        numbers = x[..., 0].numel() + x[..., 0, :].numel() if x.ndim > 1 else x.numel()
        return numbers * x.itemsize
    if hasattr(optimizer, "_new_buffer"):  # torchao's: the states of its classes differ in bits
        stand_in = torch.empty_like(x, device="meta")
        made = [optimizer._new_buffer(stand_in, signed) for signed in (True, False)]
        return sum(each.nbytes for each in _plain(made + made[1:] * amsgrad))
    return (_ADAM + amsgrad) * x.nbytes


def step_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that a step allocates for itself while all gradients exist."""
    optimizers = getattr(optimizer, "inner_optimizers", [optimizer])
    return max(
        (_step_bytes_of(each, group) for each in optimizers for group in each.param_groups),
        default=0,
    )


def _step_bytes_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    sizes = [local(p).nbytes for p in _trained(group)]
    counts = [local(p).numel() for p in _trained(group)]
    if not sizes or group.get("fused"):
        return 0
    if hasattr(optimizer, "_new_buffer"):  # torchao's: both states of a parameter in float32
        return 2 * 4 * max(counts)
    if isinstance(optimizer, torch.optim.Muon):  # the update, and three matrices in bfloat16
        return max(size + 3 * 2 * count for size, count in zip(sizes, counts))
    before = [0, *sizes]  # of the parameter before, of which a tensor is still there
    if isinstance(optimizer, torch.optim.Adafactor):
        return max(map(sum, zip(sizes, before)))
    if isinstance(optimizer, torch.optim.SGD) and not group["weight_decay"]:
        return 0
    on_gpu = any(local(p).is_cuda for p in _trained(group))
    if group.get("foreach") or (group.get("foreach") is None and on_gpu):
        return sum(sizes)  # all parameters are updated at once
    return max(map(sum, zip(sizes, sizes, before)))


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of a class are made of others."""
    return hasattr(kind, "__tensor_flatten__")


def plain(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of a tensor; a quantized one is made of several."""
    if is_wrapper(type(x)):
        for name in x.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from plain(getattr(x, name))
    else:
        yield x


# FSDP2. A simulation runs the model with whole weights, which it does not count. `Sharding` follows
# the modules that FSDP2 shards, and allocates what FSDP2 allocates, in its order: the shards, the
# buffer of an all-gather, the gathered weights, the buffer of a reduce-scatter, and the reduced
# gradients. Source: torch/distributed/fsdp/_fully_shard, `_fsdp_param_group.py` and
# `_fsdp_collectives.py`.

Gradients = Literal["new", "kept", "freed"]
# A function of a stream's name. In its context, tensors come from the memory of that stream.
OnStream = Callable[[str], AbstractContextManager[object]]


@dataclass
class ShardedParameter:
    """A parameter of which each rank has a shard.

    Attributes:
        name: of the parameter in the model.
        shape: of the whole parameter.
        local: elements of a shard, padded to the same number on each rank.
        dtype: of the shard and of its gradient.
        gathered_dtype: in which it is gathered.
        reduced_dtype: in which its gradient is reduced.
        trained: whether it needs a gradient.
    """

    name: str
    shape: torch.Size
    local: int
    dtype: torch.dtype
    gathered_dtype: torch.dtype
    reduced_dtype: torch.dtype
    trained: bool
    whole: Tensor | None = None  # with which the simulation computes

    def stand_in(self) -> Tensor:
        """Return a meta tensor like the whole parameter, for the simulated step."""
        self.whole = torch.empty(
            self.shape, dtype=self.gathered_dtype, device="meta", requires_grad=self.trained
        )
        return self.whole


@dataclass(eq=False)
class ShardedParameterGroup:
    """Parameters that FSDP2 gathers and reduces together.

    Attributes:
        modules: whose forward and backward need them.
        ranks: the number of shards.
        reshards: whether the gathered weights are freed after forward, and gathered again.
        replicated: whether the reduced gradients are then averaged over copies of the shards.
        forward_prefetch: the groups that are gathered when the forward of this one begins.
        backward_prefetch: the same for backward. By default it is the group before this one.
    """

    modules: tuple[nn.Module, ...]
    parameters: list[ShardedParameter]
    ranks: int
    reshards: bool
    replicated: bool
    forward_prefetch: "list[ShardedParameterGroup]" = field(default_factory=list)
    backward_prefetch: "list[ShardedParameterGroup]" = field(default_factory=list)
    buffer: Tensor | None = None  # of an all-gather that is under way
    gathered: list[Tensor] = field(default_factory=list)
    shard_grads: list[Tensor] = field(default_factory=list)
    averaged: Tensor | None = None  # what was averaged over copies
    forward_index: int = -1  # in the order of forward
    reduced: bool = False


class Sharding:
    """The sharded parameters of a model, and their tensors during a simulated step.

    Args:
        model: to which `fully_shard` was applied.
        step_module: a module that contains it, and has the names of parameters. By default the
            model.
    Raises: ConfigError: a parameter is sharded in another way, which is not simulated.
    """

    def __init__(self, model: nn.Module, step_module: nn.Module | None = None) -> None:
        named = list((model if step_module is None else step_module).named_parameters())
        names = {id(parameter): name for name, parameter in named}
        self.groups: list[ShardedParameterGroup] = []
        of_state: dict[int, list[ShardedParameterGroup]] = {}
        # The modules to which `fully_shard` was applied have a state.
        found = ((module, getattr(module, "_get_fsdp_state", None)) for module in model.modules())
        states = {module: state() for module, state in found if state is not None}
        for module, state in states.items():
            for group in _fsdp_groups(state):
                if module is group.modules[0]:
                    # By default FSDP2 keeps the root's weights after forward.
                    keeps = module is model and state._auto_reshard_after_forward
                    made = _group(group, keeps, names)
                    self.groups.append(made)
                    of_state.setdefault(id(state), []).append(made)
        for state in states.values():
            for made in of_state.get(id(state), []):
                made.forward_prefetch = [
                    g for s in state._states_to_forward_prefetch for g in of_state[id(s)]
                ]
                made.backward_prefetch = [
                    g for s in state._states_to_backward_prefetch for g in of_state[id(s)][::-1]
                ]
        self.parameters = {p.name: p for group in self.groups for p in group.parameters}
        self.order: list[ShardedParameterGroup] = []  # of forward
        self.last_buffer: Tensor | None = None  # of the all-gather before, in forward
        self.reduce_input: Tensor | None = None
        for name, parameter in named:
            if is_sharded(parameter) and name not in self.parameters:
                raise ConfigError(
                    f"memory plan: {name} is sharded, but not by fully_shard, and such shards are "
                    "not simulated; write a plan by hand (MemoryPlan.of) and measure its peak"
                )

    def begin(self, on_stream: OnStream, gradients: Gradients) -> list[Tensor]:
        """Start the step, and return the shards."""
        self.on_stream, self.keeps_grads = on_stream, gradients == "new"
        self.shards: list[Tensor] = []
        for group in self.groups:
            for parameter in group.parameters:
                shard = torch.empty(parameter.local, dtype=parameter.dtype, device="meta")
                self.shards.append(shard)
                if gradients == "kept" and parameter.trained:
                    group.shard_grads.append(torch.empty_like(shard))
        return self.shards

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the shards that exist now."""
        return [grad for group in self.groups for grad in group.shard_grads]

    @contextmanager
    def without_fsdp(self) -> Iterator[None]:
        """Take FSDP2's own hooks off the modules for a while."""
        modules = {module for group in self.groups for module in group.modules}
        tables = [x for m in modules for x in (m._forward_pre_hooks, m._forward_hooks)]
        copies = [table.copy() for table in tables]
        for table, hooks in zip(tables, copies):
            for key, hook in hooks.items():
                if hook.__module__.startswith("torch.distributed.fsdp."):
                    del table[key]
        try:
            yield
        finally:
            for table, hooks in zip(tables, copies):
                table.clear()
                table.update(hooks)

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Follow a forward, and the backward after it.

        The modules have hooks only in forward, as `_phases` of the simulation says.
        """
        with ExitStack() as stack:
            for group in self.groups:
                first, last = group.modules[0], group.modules[-1]
                before = first.register_forward_pre_hook(self._forward(group), with_kwargs=True)
                after = last.register_forward_hook(self._after_forward(group, last is model))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def end(self) -> None:
        """End backward: reduce the gradients of modules whose inputs need none."""
        for group in self.groups:
            if not group.reduced:
                self._reduce(group)
            group.averaged = None
        self.reduce_input = None

    def _forward(self, group: ShardedParameterGroup) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._gather(group)
            # FSDP2 forgets the buffer before this one when it has copied this one out.
            self.last_buffer = self._copy_out(group)
            for other in group.forward_prefetch:
                self._gather(other)
            leaves, spec = tree_flatten((args, kwargs))
            needed = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
            if needed:
                passed = _AfterBackward.apply(
                    lambda: self._reduce(group), *(leaves[i] for i in needed)
                )
                for i, x in zip(needed, passed):
                    leaves[i] = x
            return tree_unflatten(leaves, spec)

        return before

    def _after_forward(self, group: ShardedParameterGroup, is_root: bool) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, out: Any) -> None:
            if group.reshards:
                group.gathered = []
            if is_root:
                self.last_buffer = None
            group.forward_index = len(self.order)
            self.order.append(group)
            for x in tree_flatten(out)[0]:
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(lambda _: self._backward(group))

        return after

    def _backward(self, group: ShardedParameterGroup) -> None:
        if group.forward_index < 0:
            return  # another output of the module came before
        self._gather(group)
        self._copy_out(group)
        forward_index, group.forward_index = group.forward_index, -1
        for other in (
            group.backward_prefetch or self.order[max(forward_index - 1, 0) : forward_index]
        ):
            self._gather(other)

    def _gather(self, group: ShardedParameterGroup) -> None:
        """Start an all-gather: copy the shards into this rank's part of a buffer.

        A single rank needs none.
        """
        if group.buffer is not None or group.gathered or group.ranks == 1:
            return
        with self.on_stream("gather"):
            cast = [p for p in group.parameters if p.gathered_dtype != p.dtype]
            flat = torch.empty(_gathered_bytes(cast), dtype=torch.uint8, device="meta")
            size = group.ranks * _gathered_bytes(group.parameters)
            group.buffer = torch.empty(size, dtype=torch.uint8, device="meta")
            del flat

    def _copy_out(self, group: ShardedParameterGroup) -> Tensor | None:
        """Allocate the gathered weights; return the buffer, which is not needed any more."""
        if group.gathered:
            return None
        for p in group.parameters:
            own = None
            if group.ranks == 1 and p.gathered_dtype != p.dtype:
                own = torch.empty(p.local, dtype=p.gathered_dtype, device="meta")
            whole = torch.empty(p.local * group.ranks, dtype=p.gathered_dtype, device="meta")
            group.gathered.append(whole)
            del own
        buffer, group.buffer = group.buffer, None
        return buffer

    def _reduce(self, group: ShardedParameterGroup) -> None:
        """Reduce and scatter the gradients; free the weights."""
        group.reduced = True
        grads = [p.whole.grad for p in group.parameters if p.whole is not None]
        grads = [grad for grad in grads if grad is not None]
        for p in group.parameters:
            if p.whole is not None:
                p.whole.grad = None
        group.gathered = []
        if not grads:
            return
        trained = [p for p in group.parameters if p.trained]
        elements, reduced = sum(p.local for p in trained), trained[0].reduced_dtype
        self.reduce_input = None
        self.reduce_input = torch.empty(elements * group.ranks, dtype=reduced, device="meta")
        grads.clear()
        with self.on_stream("reduce"):
            out = torch.empty(elements, dtype=reduced, device="meta")
            if group.replicated:
                group.averaged = out
            out = out.to(trained[0].dtype)
        if self.keeps_grads:
            group.shard_grads.append(out)


class _AfterBackward(torch.autograd.Function):
    """Return tensors, and call a function when backward has computed their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.call()
        return None, *grads


def _gathered_bytes(parameters: list[ShardedParameter]) -> int:
    return sum(p.local * p.gathered_dtype.itemsize for p in parameters)


def _fsdp_groups(state: Any) -> list[Any]:
    # torch 2.11 has one group for each module, and later versions have a list.
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def _group(group: Any, keeps: bool, names: dict[int, str]) -> ShardedParameterGroup:
    policy, parameters = group.mp_policy, []
    for p in group.fsdp_params:
        if p.offload_to_cpu:
            raise ConfigError(
                "memory plan: FSDP2 offloads parameters to the CPU, which is not simulated; write "
                "a plan by hand (MemoryPlan.of) and measure its peak"
            )
        dtype = p.sharded_param.dtype
        gathered = (policy.param_dtype if dtype.is_floating_point else None) or dtype
        parameters.append(
            ShardedParameter(
                name=names[id(p.sharded_param)],
                shape=p.sharded_param.shape,
                local=p.padded_sharded_param_size.numel(),
                dtype=dtype,
                gathered_dtype=gathered,
                reduced_dtype=policy.reduce_dtype or gathered,
                trained=p.sharded_param.requires_grad,
            )
        )
    reshards = group.post_forward_mesh_info is not None and not keeps
    mesh = group.mesh_info
    replicated = getattr(mesh, "replicate_mesh_dim", None) is not None
    return ShardedParameterGroup(
        tuple(group.modules), parameters, mesh.shard_mesh_size, reshards, replicated
    )
