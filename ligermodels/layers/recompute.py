"""Activation checkpointing: what a layer keeps for backward, and the recomputation of the rest.

| checkpointing policy | kept tensors | what backward computes again |
| --- | --- | --- |
| `all` | both residual sums, q, k, v, attention's output, gate_up | norm outputs, the activation |
| `no_gate_up` | all of these but gate_up | also the first projection of the MLP |
| `attention` | the block's input, attention's output and log-sum-exp | all but attention itself |
| `input` | the block's input | the whole block |

Keys and values that a layer shares with later layers are kept under every policy.

No policy computes the block's last product again, because no gradient needs it. In eager mode
`torch.utils.checkpoint` stops the second forward when the last saved tensor exists, and saves the
inputs of a product before it computes the product.

Every policy gives bitwise the same gradients, as far as attention's own backward is
deterministic.

A layer may keep some of these tensors in float8, which rounds them to e4m3: gate_up under `all`,
with a scale for each 128 elements of a row, where the linear after the activation computes in
float8; and the input of what runs again under the other policies, with a scale for each row.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ligermodels.kernels.float8_cast import absolute_maximum, float8_cast, formats
from ligermodels.layers.kv_cache import CachedLayer

CheckpointingPolicy = Literal["all", "no_gate_up", "attention", "input"]
POLICIES: tuple[CheckpointingPolicy, ...] = get_args(CheckpointingPolicy)
# From the most memory to the least.


class Store(Protocol):
    """Holds kept tensors elsewhere, for example in host memory, between forward and backward."""

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor; return a handle for it."""

    def unpack(self, handle: Any) -> Tensor:
        """Return the tensor of a handle."""


class Planned:
    """A module whose checkpointing policy and tile a memory plan sets.

    Attributes:
        policy: the checkpointing policy of the layer.
        tile: the number of tokens that an MLP computes at once. By default it computes all.
        keeps_float8: whether it keeps some tensors in float8.
    """

    policy: CheckpointingPolicy = "all"
    tile: int | None = None
    keeps_float8: bool = False

    @property
    def keeps_output(self) -> bool:
        """Whether attention calls `attend_once`.

        In a compiled layer, the checkpoint itself keeps the outputs of attention's ops.
        """
        return self.policy == "attention" and not torch.compiler.is_compiling()


def set_policy(
    layer: nn.Module,
    policy: CheckpointingPolicy,
    mlp_tile: int | None = None,
    in_float8: bool = False,
) -> None:
    """Set what a layer keeps for backward; the arguments are those of `run_layer`."""
    for module in layer.modules():
        if isinstance(module, Planned):
            module.policy, module.tile, module.keeps_float8 = policy, mlp_tile, in_float8
    vars(layer)["_policy"] = policy, mlp_tile, in_float8


def run_layer(
    layer: nn.Module,
    x: Tensor,
    residual: Tensor | None,
    context: Any,
    policy: CheckpointingPolicy,
    mlp_tile: int | None = None,
    in_float8: bool = False,
    store: Store | None = None,
) -> tuple[Tensor, Tensor]:
    """Call `layer(x, residual, context)` under a checkpointing policy.

    A compiled layer must have got the same policy from `set_policy` before.

    Args:
        x, residual: (batch, seq, hidden). Their sum is the layer's input.
        context: the `AttentionContext` of the pass.
        policy: the checkpointing policy. With a cache, a layer never runs again, so it is "all".
        mlp_tile: the number of tokens that an MLP computes at once. By default it computes all.
        in_float8: whether some kept tensors are in float8.
        store: where the policy "attention" puts the outputs of attention. By default they stay.
    Returns: (x, residual), whose sum is the layer's output.
    Raises:
        ValueError: the layer returned something else.
    """

    def run(x: Tensor, residual: Tensor | None, context: Any) -> tuple[Tensor, Tensor]:
        # The recomputation has the policy of its forward, although the plan may have changed.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if vars(layer).get("_policy", ("all", None, False)) != (policy, mlp_tile, in_float8):
                set_policy(layer, policy, mlp_tile, in_float8)
        out = layer(x, residual, context)
        _check_output(layer, out, x)
        return out

    # A layer that ran again would append its keys to the cache again.
    once = getattr(context, "cache", None) is not None
    if policy in ("all", "no_gate_up") or once or not torch.is_grad_enabled():
        return run(x, residual, context)
    # Adding the pair first leaves one tensor to keep for backward instead of two.
    x = x if residual is None else x + residual
    options: dict[str, Any] = {}
    if policy == "attention":
        if torch.compiler.is_compiling():
            ops = _attention_ops()
            options["context_fn"] = partial(create_selective_checkpoint_contexts, ops)
        else:
            kept = _KeptOutputs(store)
            options["context_fn"] = lambda: (
                _Activate(kept, replays=False),
                _Activate(kept, replays=True),
            )
    taken, left = _shared_by(layer)
    if not taken and not left:
        return checkpointed(run, x, None, context, in_float8=in_float8, **options)

    # Shared keys and values are arguments and results: the recomputation neither reads nor writes
    # the context of the pass, which may have changed by then.
    known = [index for index in taken if index in context.shared]
    given = [tensor for index in known for tensor in context.shared[index]]

    def run_with(x: Tensor, context: Any, *given: Tensor) -> tuple[Any, ...]:
        own = context.changed(shared=dict(zip(known, zip(given[::2], given[1::2]))))
        out = run(x, None, own)
        return *out, *(tensor for index in left for tensor in own.shared[index])

    bare = context.changed(shared={})
    results = checkpointed(run_with, x, bare, *given, in_float8=in_float8, **options)
    count = len(results) - 2 * len(left)
    kv = results[count:]
    context.shared.update(zip(left, zip(kv[::2], kv[1::2])))
    return results[:count]


def checkpointed(
    function: Callable[..., Any], x: Tensor, *args: Any, in_float8: bool, **options: Any
) -> Any:
    """Return torch's `checkpoint` of function(x, *args).

    Args: in_float8: whether it keeps x in float8, with a scale for each row. Then backward runs the
        function with this x.
    """
    if not in_float8 or torch.compiler.is_compiling():
        return checkpoint(function, x, *args, use_reentrant=False, **options)
    rows, shape, dtype = x.detach().flatten(0, -2), x.shape, x.dtype
    kept, _ = float8_cast(rows, absolute_maximum(rows, "rows"), formats()[0])
    assert kept is not None
    needs_grad, exact = x.requires_grad, [x]

    def run(values: Tensor, scale: Tensor, *args: Any) -> Any:
        if exact:  # the first forward
            return function(exact.pop(), *args)
        rounded = values.to(dtype).mul_(scale).view(shape)
        return function(rounded.requires_grad_(needs_grad), *args)

    return checkpoint(run, *kept, *args, use_reentrant=False, **options)


def _shared_by(layer: nn.Module) -> tuple[list[int], list[int]]:
    """Return which layers' keys and values a layer takes, and which ones it leaves for others."""
    taken, left = [], []
    for module in layer.modules():
        if isinstance(module, CachedLayer):
            if module.kv_from is not None:
                taken.append(module.kv_from)
            elif module.shares_kv:
                left.append(module.layer_index)
    return taken, left


def _check_output(layer: nn.Module, out: Any, x: Tensor) -> None:
    """Raise ValueError unless a layer returned a pair whose sum may be its output."""
    parts = [*out] if isinstance(out, (tuple, list)) else [out]
    if len(parts) == 2 and type(parts[0]) is type(parts[1]) is Tensor:
        if parts[0].shape == parts[1].shape == x.shape:
            return  # the usual case, on a short way
    if len(parts) in (2, 3) and isinstance(out, (tuple, list)):
        summands = parts[:1] if parts[1] is None else parts[:2]
        good = all(isinstance(each, Tensor) and each.shape == x.shape for each in summands)
        if good and all(isinstance(each, Tensor) for each in tree_leaves(parts[2:])):
            return
    shown = ", ".join(
        f"a tensor {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
        for each in parts
    )
    raise ValueError(
        f"{type(layer).__name__} returned {shown or 'nothing'}; a block returns a pair "
        f"(x, residual) of tensors {tuple(x.shape)}, whose sum is its output; the residual may be "
        "None, and a third tensor is for the model's auxiliary_loss"
    )


def _attention_ops() -> list[Any]:
    """Return the attention ops of torch, for a compiled layer that keeps their outputs."""
    aten, higher = torch.ops.aten, torch.ops.higher_order
    ops = [
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._flash_attention_forward.default,
        higher.flex_attention,
    ]
    if hasattr(torch.ops, "torch_attn") and hasattr(torch.ops.torch_attn, "_varlen_attn"):
        ops.append(torch.ops.torch_attn._varlen_attn.default)
    return ops


class _KeptOutputs:
    """Attention's outputs of one layer, from its forward until its backward."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.outputs: list[Any] = []  # handles of the store, in the order of the calls
        self.replayed = 0  # how many of them the recomputation has taken

    def pack(self, tensor: Tensor) -> Any:
        return tensor if self.store is None else self.store.pack(tensor)

    def unpack(self, handle: Any) -> Tensor:
        return handle if self.store is None else self.store.unpack(handle)

    def next(self) -> Tensor:
        self.replayed += 1
        return self.unpack(self.outputs[self.replayed - 1])


class _Active(threading.local):
    """The layer that this thread computes now. Backward runs in other threads."""

    kept: _KeptOutputs | None = None
    replays = False


_active = _Active()


class _Activate:
    """The context of a layer's first forward, or of its recomputation; it may be entered again."""

    def __init__(self, kept: _KeptOutputs, *, replays: bool) -> None:
        self.now = kept, replays
        self.before: list[tuple[_KeptOutputs | None, bool]] = []

    def __enter__(self) -> None:
        self.before.append((_active.kept, _active.replays))
        _active.kept, _active.replays = self.now
        self.now[0].replayed = 0

    def __exit__(self, *_: object) -> None:
        _active.kept, _active.replays = self.before.pop()


def attend_once(attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return attend(*inputs), but compute it only in the first forward of a recomputed layer.

    Attention's backward needs q, k, v, the output and the log-sum-exp. The first forward keeps the
    last two, and backward computes q, k and v again.

    Args: attend: a differentiable function; inputs: the tensors that it needs gradients of: q, k
        and v, (batch, heads, seq, head_dim), and sinks, if there are any.
    """
    kept = _active.kept
    if kept is None:
        return attend(*inputs)
    if _active.replays:
        return _Replay.apply(kept.next(), *inputs)
    inputs = _Hold.apply(*inputs)
    held = inputs[0].grad_fn
    if held is None:  # nothing before attention needs a gradient
        out = attend(*inputs)
    else:
        places = {x.untyped_storage()._cdata: i for i, x in enumerate(inputs)}
        count = 0  # of the views of the inputs that attention saves
        again: list[Tensor] = []  # the inputs, until backward has taken all of these views
        taken = 0

        def pack(tensor: Tensor) -> Any:
            nonlocal count
            index = places.get(tensor.untyped_storage()._cdata)
            if index is None:
                # The output's grad_fn would refer to itself through this graph.
                return _Kept(kept.pack(tensor.detach()))
            count += 1
            return index, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(handle: Any) -> Tensor:
            nonlocal taken
            if isinstance(handle, _Kept):
                return kept.unpack(handle.handle)
            index, dtype, shape, stride, offset = handle
            if not again:
                # This makes the checkpoint compute them. It gives them out only once.
                again.extend(held.saved_tensors)  # type: ignore[attr-defined]
            x = again[index]
            taken += 1
            if taken == count:
                again.clear()
                taken = 0
            assert x.dtype == dtype
            return x.as_strided(shape, stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = attend(*inputs)
    kept.outputs.append(kept.pack(out.detach()))
    return out


class _Kept(NamedTuple):
    handle: Any  # of the store


class _Hold(torch.autograd.Function):
    """Return attention's inputs, and save them, so that the checkpoint can give them back."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _Replay(torch.autograd.Function):
    """Return the kept output, and save the inputs where the first forward saved them."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("no gradient flows through the graph of a recomputation")
