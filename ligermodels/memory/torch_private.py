"""Copies of PyTorch's private behaviour: what it allocates, and a simulation cannot see.

A simulated step runs PyTorch's operators on tensors without data. This file adds what they, and
PyTorch's wrappers of modules, allocate on a real device:

- CUDA's caching allocator: c10/cuda/CUDACachingAllocator.cpp
- the buffers of attention, of an embedding's backward and of cuBLAS
- the sums of gradients that autograd makes in place
- the tensors of FSDP2 (`torch.distributed.fsdp.fully_shard`)

With a version of torch that `CHECKED` does not name, tests/memory/test_torch_private.py fails.
"""

import os
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_flatten, tree_unflatten

from ligermodels.errors import ConfigError
from ligermodels.layers.fusion import is_sharded, local_tensor
from ligermodels.memory.byte_sizes import MIB

CHECKED = ("2.11", "2.13")
"""The versions of torch with which this was checked: 2.11 on GPUs, and both without one."""

# CUDA's caching allocator, with its default settings or with expandable segments. A request takes
# the smallest free block that is large enough; the rest of the block is split off, if it is not too
# small. If no block fits, a new segment comes from the GPU. Expandable segments are two, for small
# and for large blocks, which grow at their ends. Nothing goes back to the GPU.


class Block(NamedTuple):
    """A part of a segment. Small blocks and large ones have separate addresses."""

    address: int
    size: int
    small: bool


class _Pool:
    """The free blocks for small requests, or those for large ones."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # (size, address), in the order in which they serve
        self.sizes: dict[int, int] = {}  # by address
        self.starts: dict[int, int] = {}  # by the address after the block
        self.end = 0  # of the last segment

    def put(self, address: int, size: int) -> None:
        insort(self.free, (size, address))
        self.sizes[address] = size
        self.starts[address + size] = address

    def take(self, address: int) -> int:
        """Take out the block at an address; return its size."""
        size = self.sizes.pop(address)
        del self.starts[address + size]
        self.free.pop(bisect_left(self.free, (size, address)))
        return size


class CachingAllocator:
    """Gives blocks for requests; `allocated` and `reserved` are bytes.

    Args: expandable: whether segments are expandable.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.reserved = 0
        self._pools = {True: _Pool(), False: _Pool()}  # small or not

    def allocate(self, size: int) -> Block:
        """Return a block for a request of `size` bytes."""
        size = max(-(-size // 512), 1) * 512
        small = size <= MIB
        pool = self._pools[small]
        place = bisect_left(pool.free, (size, -1))
        # The last block of an expandable segment counts as large as it may become.
        if self.expandable and place + 1 < len(pool.free) and sum(pool.free[place]) == pool.end:
            place += 1
        if place < len(pool.free):
            address = pool.free[place][1]
            whole = pool.take(address)
        else:
            address, whole = self._from_gpu(pool, size, small)
        rest = whole - size
        if rest >= 512 if small or self.expandable else rest > MIB:
            pool.put(address + size, rest)
        else:
            size = whole
        self.allocated += size
        return Block(address, size, small)

    def free(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours."""
        self.allocated -= block.size
        pool = self._pools[block.small]
        start, end = block.address, block.address + block.size
        if (before := pool.starts.get(start)) is not None:
            pool.take(before)
            start = before
        if end in pool.sizes:
            end += pool.take(end)
        pool.put(start, end - start)

    def _from_gpu(self, pool: _Pool, size: int, small: bool) -> tuple[int, int]:
        """Return the address and the size of memory that is new, at least in part."""
        part = (2 if small else 20) * MIB
        if self.expandable:  # the segment grows until its last block, if that is free, has the size
            address = pool.starts.get(pool.end, pool.end)
            found = pool.take(address) if address < pool.end else 0
            new = _up(size - found, part)
        else:
            address, found = pool.end + 1, 0  # blocks of different segments are no neighbours
            new = part if size < 10 * MIB else _up(size, 2 * MIB)
        pool.end = address + found + new
        self.reserved += new
        return address, found + new


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


# The buffers of operators. A kernel's outputs and gradients are tensors that a simulation sees. Its
# scratch is not: the table `SCRATCH` gives its bytes, for the arguments of the operator.

FLOAT = 4  # bytes of a float32
LONG = 8  # bytes of an int64


def _up(length: int, block: int) -> int:
    return -(-length // block) * block


def _fused_backward(rows: int, width: int, keys: int, heads: int, k: Tensor) -> int:
    """Return the bytes of float32 sums of dq and of one number per row.

    Where heads share keys, dk and dv of each query head are there, too, before they are summed.
    """
    shared = 0 if heads == k.shape[1] else 2 * keys * heads * k.shape[-1] * k.itemsize
    return rows * (width + 1) * FLOAT + shared


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """FlashAttention 2, mha_bwd."""
    batch, heads, queries, head_dim = q.shape
    rows = batch * heads * _up(queries, 128)
    return _fused_backward(rows, _up(head_dim, 32), batch * k.shape[2], heads, k)


def _varlen_backward(grad: Tensor, q: Tensor, k: Tensor, *arguments: Any) -> int:
    """FlashAttention 2, mha_varlen_bwd: it has up to 128 rows more per document."""
    total, heads, head_dim = q.shape
    documents = next(x for x in arguments if isinstance(x, Tensor) and x.dtype == torch.int32)
    rows = heads * (total + 128 * (len(documents) - 1))
    return _fused_backward(rows, _up(head_dim, 32), len(k), heads, k)


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """cudnn-frontend, the backward node of SDPA."""
    batch, heads, queries, head_dim = q.shape
    return _fused_backward(batch * heads * queries, head_dim, batch * k.shape[2], heads, k)


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
SCRATCH: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
}


def scratch(operator: str, arguments: tuple[Any, ...]) -> int:
    """Return the bytes that an operator allocates and frees by itself on a GPU."""
    return SCRATCH[operator](*arguments) if operator in SCRATCH else 0


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


def run_backward(loss: Tensor) -> None:
    """Run backward as `loss.backward()` does, which would suspend the mode that is autocast."""
    gradient = torch.ones_like(loss)
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        (loss,), (gradient,), False, False, (), True, True
    )


def accumulates(total: Tensor) -> bool:
    """Return whether autograd adds a gradient to `total` in place when no dispatch mode runs.

    Under a dispatch mode it always makes a new tensor. Otherwise it adds in place if nothing else
    refers to `total` or its storage: `can_accumulate_inplace` in torch/csrc/autograd.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("_fn", "inner"):
        frame = frame.f_back  # wrappers of `__torch_dispatch__`
    # The engine is called by torch, for a backward inside a backward, and by `run_backward`.
    if frame.f_code.co_name not in ("_engine_run_backward", "run_backward"):
        return False
    # The engine's buffer holds the tensor. The Python object, its call and this one add three.
    storage = total.untyped_storage()
    users = total._use_count()  # type: ignore[attr-defined]
    return users <= 4 and torch._C._storage_Use_Count(storage._cdata) <= 2


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of a class are made of others."""
    return hasattr(kind, "__tensor_flatten__")


def plain(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of values on this rank.

    A quantized tensor is made of several. Values of other types have none.
    """
    for value in values:
        if isinstance(value, Tensor):
            x = local_tensor(value)
            if is_wrapper(type(x)):
                yield from plain(*(getattr(x, name) for name in x.__tensor_flatten__()[0]))  # type: ignore[attr-defined]
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


class ShardedParameter:
    """A parameter of which each rank has a shard.

    Attributes:
        local: elements of a shard, padded to the same number on each rank.
        dtype: of the shard and of its gradient.
        gathered_dtype: in which it is gathered.
        reduced_dtype: in which its gradient is reduced.
        trained: whether it needs a gradient.
        whole: a meta tensor like the whole parameter, with which the simulation computes.
    """

    def __init__(self, parameter: Any, policy: Any) -> None:
        if parameter.offload_to_cpu:
            raise ConfigError(
                "memory plan: FSDP2 offloads parameters to the CPU, which is not simulated; write "
                "a plan by hand (MemoryPlan.of) and measure its peak"
            )
        shard = self.shard = parameter.sharded_param
        self.local, self.dtype = parameter.padded_sharded_param_size.numel(), shard.dtype
        gathered = policy.param_dtype if shard.dtype.is_floating_point else None
        self.gathered_dtype: torch.dtype = gathered or shard.dtype
        self.reduced_dtype: torch.dtype = policy.reduce_dtype or self.gathered_dtype
        self.trained = shard.requires_grad
        self.whole = torch.empty(
            shard.shape, dtype=self.gathered_dtype, device="meta", requires_grad=self.trained
        )


class ShardedParameterGroup:
    """Parameters that FSDP2 gathers and reduces together.

    Attributes:
        modules: whose forward and backward need them.
        state: that of FSDP2. It says which groups are gathered when the forward or the backward of
            this one begins. By default it is the group before this one, in backward.
        ranks: the number of shards.
        reshards: whether the gathered weights are freed after forward, and gathered again.
        replicated: whether the reduced gradients are then averaged over copies of the shards.
    """

    def __init__(self, group: Any, state: Any, keeps: bool) -> None:
        mesh = group.mesh_info
        self.modules, self.state, self.ranks = group.modules, state, mesh.shard_mesh_size
        self.parameters = [ShardedParameter(p, group.mp_policy) for p in group.fsdp_params]
        self.reshards = group.post_forward_mesh_info is not None and not keeps
        self.replicated = getattr(mesh, "replicate_mesh_dim", None) is not None
        self.buffer: Tensor | None = None  # of an all-gather that is under way
        self.gathered: list[Tensor] = []
        self.shard_grads: list[Tensor] = []
        self.averaged: Tensor | None = None  # what was averaged over copies
        self.forward_index = -1  # in the order of forward
        self.reduced = False


class Sharding:
    """The sharded parameters of a model, and their tensors during a simulated step.

    Args:
        model: to which `fully_shard` was applied.
        called: the module that a step calls, which contains the model.
    Raises: ConfigError: a parameter is sharded in another way, which is not simulated.
    """

    def __init__(self, model: nn.Module, called: nn.Module) -> None:
        self.of_state: dict[int, list[ShardedParameterGroup]] = {}
        for module in model.modules():
            # The modules to which `fully_shard` was applied have a state.
            get_state = getattr(module, "_get_fsdp_state", None)
            state: Any = None if get_state is None else get_state()
            for group in _fsdp_groups(state):
                if module is group.modules[0]:
                    # By default FSDP2 keeps the root's weights after forward.
                    keeps = module is model and state._auto_reshard_after_forward
                    made = ShardedParameterGroup(group, state, keeps)
                    self.of_state.setdefault(id(state), []).append(made)
        self.groups = [group for groups in self.of_state.values() for group in groups]
        parameters = [p for group in self.groups for p in group.parameters]
        self.parameters = {id(p.shard): p for p in parameters}
        self.order: list[ShardedParameterGroup] = []  # of forward
        self.last_buffer: Tensor | None = None  # of the all-gather before, in forward
        self.reduce_input: Tensor | None = None
        for name, parameter in called.named_parameters():
            if is_sharded(parameter) and id(parameter) not in self.parameters:
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
            for other in self._groups_of(group.state._states_to_forward_prefetch):
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
        index, group.forward_index = group.forward_index, -1
        given = self._groups_of(group.state._states_to_backward_prefetch, -1)
        for other in given or self.order[max(index - 1, 0) : index]:
            self._gather(other)

    def _groups_of(self, states: Any, step: int = 1) -> list[ShardedParameterGroup]:
        return [group for state in states for group in self.of_state[id(state)][::step]]

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
        grads = [p.whole.grad for p in group.parameters if p.whole.grad is not None]
        for p in group.parameters:
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
    groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
    return [group for group in groups if group is not None]
