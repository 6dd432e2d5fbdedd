"""The gated MLP, whole or over tiles of tokens. One packed linear projects gate and up.

With tiles, gate_up never exists for all tokens at once: forward keeps the input of the MLP, and
backward runs the MLP again tile by tile, and sums the gradients of the parameters over the tiles.
Source: ALST, arXiv:2506.13996.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from ligermodels import kernels
from ligermodels.kernels.checks import check_activation, check_count
from ligermodels.kernels.dispatch import cast, compute_dtype, refuse_double_backward
from ligermodels.layers.fusion import (
    PendingNorm,
    PreNormed,
    fusion_pays,
    is_sharded,
    norm_then_linear,
    products_of,
)
from ligermodels.layers.recompute import CheckpointingPolicy, Planned, checkpointed


class GatedMLP(Planned, nn.Module):
    """down(act(gate(x)) * up(x)), arXiv:2002.05202. It saves only gate and up for backward.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width of gate and up.
        bias: whether the projections have a bias.
        activation: activation of the gate: "silu", "gelu_tanh" or "gelu".

    Raises:
        ValueError: a size is not a positive integer, or the activation is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        check_count("GatedMLP", "hidden_size", hidden_size, 1)
        check_count("GatedMLP", "intermediate_size", intermediate_size, 1)
        check_activation("GatedMLP", activation)
        self.activation = activation
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    @property
    def hf_linears(self) -> dict[str, dict[str, int]]:
        """The packed linear, and the linears of HF that it consists of, with their rows."""
        inner = self.gate_up_proj.out_features // 2
        return {"gate_up_proj": {"gate_proj": inner, "up_proj": inner}}

    def forward(self, x: Tensor | PreNormed) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the MLP to x, or to norm(x + residual) if x comes from `pre_norm`.

        Args: x (..., hidden), or what `pre_norm` returns.
        Returns: the output (..., hidden); for an x from `pre_norm`, (the output, x + residual).
        """
        grad = torch.is_grad_enabled()
        if grad and isinstance(x, PendingNorm) and (self.tile or self.policy == "no_gate_up"):
            # The norm gets only one input, the sum, which is kept for backward.
            x = x.of_the_sum()
        if grad and self.tile is not None:
            out, total = self._run_tiles(self.policy, x, self.tile)
        elif grad and self.policy == "no_gate_up":
            # The tensors are arguments themselves, so that checkpoint saves them as autograd does.
            kind, (first, *rest) = (None, [x]) if isinstance(x, Tensor) else (type(x), x)
            out, total = checkpointed(
                *(self._run_parts, first, self.policy, kind, *rest), in_float8=self.keeps_float8
            )
        else:
            out, total = self._run(self.policy, x)
        return out if isinstance(x, Tensor) else (out, total)

    def _run_tiles(
        self, policy: CheckpointingPolicy, x: Tensor | PreNormed, tile: int
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(x, PendingNorm):
            options = x.options

            def with_norm(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
                out, total = self._run(policy, PendingNorm(rows, None, weight, options))
                assert total is not None
                return out, total

            return tiled(self, with_norm, x.x, tile, [x.weight])
        y, total = (x, None) if isinstance(x, Tensor) else x.apply()
        out, _ = tiled(self, lambda rows: (self._run(policy, rows)[0], rows), y, tile)
        return out, total

    def _run_parts(
        self, first: Tensor, policy: CheckpointingPolicy, kind: type[PreNormed] | None, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        return self._run(policy, first if kind is None else kind(first, *rest))

    def _run(
        self, policy: CheckpointingPolicy, x: Tensor | PreNormed
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the MLP under the policy of the forward, also when it runs again."""
        gate_up, total = norm_then_linear(x, self.gate_up_proj)
        down, activation = self.down_proj, self.activation
        if not fusion_pays(gate_up):
            return down(kernels.glu(gate_up, activation)), total
        # A linear that may be fused does not save its output, so backward may overwrite it.
        owned = products_of(self.gate_up_proj) is not None
        products = products_of(down)
        if policy == "all" and products is not None:
            out = kernels.glu_linear(
                *(gate_up, down.weight, down.bias, activation), consume=owned, products=products
            )
            return out, total
        # A recomputation stops before the last product, because `down` saves its input first.
        return down(kernels.glu(gate_up, activation, consume=owned)), total


RowFunction = Callable[..., tuple[Tensor, Tensor]]


def tiled(
    module: nn.Module, function: RowFunction, x: Tensor, tile: int, tensors: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return (out, x) of function(x, *tensors), computed for `tile` tokens at a time.

    A residual connection takes the x that is returned: `function` then adds its gradient. The
    gradient of x is that without tiles. The gradients of the parameters differ in the order of one
    sum, which is taken in float32. Each parameter receives one gradient, so hooks (DDP, FSDP2) run
    once. Backward draws the random numbers of forward again (dropout).

    If a projection is sharded on its own (`fully_shard` or tensor parallelism on the linear), all
    tokens run at once, because each tile would gather the weight again. Under torch.compile each
    tile is a checkpointed part of the graph.

    Args:
        module: the module whose parameters `function` uses. Its parts may be replaced (LoRA).
        function: maps rows (tokens, hidden) and `tensors` to (out, rows), where out is
            (tokens, out). A row of out depends only on the same row of the input. The rows that it
            returns equal the input; they may be an output of an op that adds their gradient itself.
        x: (..., hidden).
        tile: the number of tokens of a tile. If there are no more, they run at once, and what
            `function` saves for backward is kept.
        tensors: further inputs of `function` that may need gradients, such as a norm's weight.
    Returns: out (..., out) and x.
    """
    shape = x.shape[:-1]
    if shape.numel() <= tile or any(is_sharded(p) for p in module.parameters()):
        return function(x, *tensors)
    if torch.compiler.is_compiling():
        parts = [
            checkpoint(function, rows, *tensors, use_reentrant=False)[0]
            for rows in x.flatten(0, -2).split(tile)
        ]
        return torch.cat(parts).unflatten(0, shape), x
    trained = {f"module.{k}": p for k, p in module.named_parameters() if p.requires_grad}
    tiles = _Tiles(module, function, x, tile, list(trained))
    inputs = *tensors, *trained.values()
    kept = _Keep.apply(x, *inputs)
    out, same = _TiledMLP.apply(tiles, kept.grad_fn, kept, *inputs)
    return out, same if tiles.needs_x_grad else x


class _Called(nn.Module):
    """A function and the module whose parameters it uses, for `torch.func.functional_call`."""

    def __init__(self, module: nn.Module, function: RowFunction) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(*args)


class _Tiles:
    """The tiles of one call, and how to run one in forward and again in backward.

    Args: as in `tiled`; names, those of the parameters that are inputs of `_TiledMLP`.
    """

    def __init__(
        self, module: nn.Module, function: RowFunction, x: Tensor, tile: int, names: list[str]
    ) -> None:
        self.called, self.tile, self.names = _Called(module, function), tile, names
        self.needs_x_grad = x.requires_grad
        self.device_type = kind = x.device.type
        if kind != "meta":
            self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # These linears draw no random numbers, and to read the state of a GPU takes time.
        plain = all(products_of(child) is not None for child in module.children())
        self.random = None if plain else (torch.get_rng_state(), *get_device_states(x))

    def rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split (..., columns) into the rows of each tile."""
        return x.reshape(-1, x.shape[-1]).split(self.tile)

    def forward(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return out (..., out). Each tile writes its rows to it."""
        parts: tuple[Tensor, ...] = ()
        for i, rows in enumerate(self.rows(x)):
            with self._autocast():
                part, _ = self.called(rows, *tensors)
            if i == 0:
                out = part.new_empty(*x.shape[:-1], part.shape[-1])
                parts = self.rows(out)
            parts[i].copy_(part)
            del part
        return out

    def gradients(
        self, rows: Tensor, inputs: Sequence[Tensor], grad_out: Tensor, grad_rows: Tensor | None
    ) -> list[Tensor | None]:
        """Run a tile again and return the gradients of rows and inputs.

        Args: inputs: the function's further tensors and the parameters; grad_out, grad_rows: the
            gradients of the function's outputs.
        Returns: None for what has no gradient or does not require one.
        """
        count = len(inputs) - len(self.names)
        parameters = dict(zip(self.names, inputs[count:]))
        with torch.enable_grad(), self._autocast():
            outputs = torch.func.functional_call(self.called, parameters, (rows, *inputs[:count]))
        upstream = {
            output: grad
            for output, grad in zip(outputs, (grad_out, grad_rows))
            if grad is not None and output.requires_grad
        }
        if not upstream:
            return [None] * (1 + len(inputs))
        leaves = [leaf for leaf in (rows, *inputs) if leaf.requires_grad]
        outputs, grads = zip(*upstream.items())
        found = iter(torch.autograd.grad(outputs, leaves, grads, allow_unused=True))
        return [next(found) if leaf.requires_grad else None for leaf in (rows, *inputs)]

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return forward's autocast. Its cache would hold casts of another tile's graph."""
        if self.device_type == "meta":
            return nullcontext()
        enabled, dtype = self.autocast
        return torch.autocast(self.device_type, dtype, enabled, cache_enabled=False)

    @contextmanager
    def random_numbers_again(self) -> Iterator[None]:
        """Draw the random numbers of forward again, if a part of the module may have drawn any."""
        if self.random is None:
            yield
            return
        cpu, devices, states = self.random
        kind = self.device_type if devices else "cuda"
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(cpu)
            set_device_states(devices, states, device_type=kind)
            yield


class _Keep(torch.autograd.Function):
    """Return x, and keep all inputs for the backward of `_TiledMLP`.

    Under `torch.utils.checkpoint`, a forward that runs again stops when everything that the first
    one kept exists. `_TiledMLP` keeps nothing itself, so its tiles do not run again for nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(x, *inputs)
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiles: _Tiles, kept: Any, x: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.tiles, ctx.kept = tiles, kept
        ctx.set_materialize_grads(False)
        return tiles.forward(x, inputs[: len(inputs) - len(tiles.names)]), x

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_rows: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("tiled MLP")
        x, *inputs = ctx.kept.saved_tensors
        if grad_out is None:
            return None, None, grad_rows, *[None] * len(inputs)
        tiles = ctx.tiles
        needs_x_grad, *needs_grad = ctx.needs_input_grad[2:]
        needs_x_grad = needs_x_grad and tiles.needs_x_grad
        leaves = [t.detach().requires_grad_(needed) for t, needed in zip(inputs, needs_grad)]
        sums: list[Tensor | None] = [None] * len(leaves)
        grad_x = x.new_zeros(x.shape) if needs_x_grad else None
        parts = [
            repeat(None) if t is None else tiles.rows(t) for t in (grad_x, grad_out, grad_rows)
        ]
        with tiles.random_numbers_again():
            for rows, to, *upstream in zip(tiles.rows(x), *parts):
                rows = rows.detach().requires_grad_(needs_x_grad)
                grad, *grads = tiles.gradients(rows, leaves, *upstream)
                if to is not None and grad is not None:
                    to.copy_(grad)
                sums = [_added(total, grad) for total, grad in zip(sums, grads)]
                del grad, grads
        sums = [None if s is None else cast(s, t.dtype) for s, t in zip(sums, inputs)]
        return None, None, grad_x, *sums


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Add a tile's gradient to the sum, which is in float32 and has its own memory."""
    if grad is None or total is None:
        return total if grad is None else grad.to(compute_dtype(grad), copy=True)
    return total.add_(grad)
