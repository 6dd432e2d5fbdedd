"""The gated MLP. One packed linear projects gate and up."""

from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligermodels import kernels
from ligermodels.kernels.checks import ACTIVATIONS, check_count
from ligermodels.layers.fusion import PendingNorm, PreNormed, norm_then_linear, products_of
from ligermodels.layers.recompute import CheckpointingPolicy, Planned
from ligermodels.layers.tiled_mlp import tiled


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
        if activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"GatedMLP: activation={activation!r}; expected one of {known}")
        self.activation = activation
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: PreNormed) -> tuple[Tensor, Tensor]: ...

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
            parts = (None, x) if isinstance(x, Tensor) else (type(x), *x)
            out, total = checkpoint(self._run_parts, self.policy, *parts, use_reentrant=False)
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
        self, policy: CheckpointingPolicy, kind: type[PreNormed] | None, *parts: Any
    ) -> tuple[Tensor, Tensor | None]:
        return self._run(policy, parts[0] if kind is None else kind(*parts))

    def _run(
        self, policy: CheckpointingPolicy, x: Tensor | PreNormed
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the MLP under the policy of the forward, also when it runs again."""
        gate_up, total = norm_then_linear(x, self.gate_up_proj)
        down, activation = self.down_proj, self.activation
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
