"""The tensors that FSDP2 (`torch.distributed.fsdp.fully_shard`) allocates in a training step.

A simulation runs the model with whole weights, which it does not count. `Sharding` follows the
modules that FSDP2 shards, and allocates what FSDP2 allocates, in its order: the shards, the buffer
of an all-gather, the gathered weights, the buffer of a reduce-scatter, and the reduced gradients.
Source: torch/distributed/fsdp/_fully_shard, `_fsdp_param_group.py` and `_fsdp_collectives.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ligermodels.errors import ConfigError
from ligermodels.layers.fusion import is_sharded

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
        states = {module: state for module in model.modules() for state in _states(module)}
        for module, state in states.items():
            for group in _fsdp_groups(state):
                if module is group.modules[0]:
                    made = _group(group, module is model and _resets_root(state), names)
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
        for name, parameter in named:
            if is_sharded(parameter) and name not in self.parameters:
                raise ConfigError(
                    f"memory plan: {name} is sharded, but not by fully_shard, and such shards are "
                    "not simulated; write a plan by hand (MemoryPlan.of) and measure its peak"
                )

    def begin(self, on_stream: OnStream, gradients: Gradients) -> list[Tensor]:
        """Start a step, and return the shards."""
        self.on_stream, self.keeps_grads = on_stream, gradients == "new"
        self.order: list[ShardedParameterGroup] = []
        self.last_buffer: Tensor | None = None  # of the all-gather before, in forward
        self.reduce_input: Tensor | None = None
        self.shards: list[Tensor] = []
        for group in self.groups:
            group.buffer, group.gathered, group.shard_grads = None, [], []
            group.averaged = None
            group.forward_index, group.reduced = -1, False
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
        """Take FSDP2's own hooks off the modules."""
        with ExitStack() as stack:
            for module in {module for group in self.groups for module in group.modules}:
                stack.enter_context(_without_its_hooks(module))
            yield

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
            flat = torch.empty(_bytes(cast), dtype=torch.uint8, device="meta")
            size = group.ranks * _bytes(group.parameters)
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


def _bytes(parameters: list[ShardedParameter]) -> int:
    return sum(p.local * p.gathered_dtype.itemsize for p in parameters)


def _states(module: nn.Module) -> list[Any]:
    """Return FSDP2's state of a module, if `fully_shard` was applied to it."""
    state = getattr(module, "_get_fsdp_state", None)
    return [] if state is None else [state()]


def _fsdp_groups(state: Any) -> list[Any]:
    # torch 2.11 has one group for each module, and later versions have a list.
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def _resets_root(state: Any) -> bool:
    """Return whether FSDP2 keeps the root's weights after forward, which is its default."""
    return bool(state._auto_reshard_after_forward)


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


@contextmanager
def _without_its_hooks(module: nn.Module) -> Iterator[None]:
    """Take FSDP2's hooks off a module for a while."""
    tables = module._forward_pre_hooks, module._forward_hooks
    copies = [table.copy() for table in tables]
    for table in tables:
        for key, hook in list(table.items()):
            if hook.__module__.startswith("torch.distributed.fsdp."):
                del table[key]
    try:
        yield
    finally:
        for table, copy in zip(tables, copies):
            table.clear()
            table.update(copy)
