"""The gated MLP. One packed linear projects gate and up."""

from typing import overload

from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.layers.fusion import PreNormed, is_plain, norm_then_linear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), arXiv:2002.05202. It saves only gate and up for backward.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width of gate and up.
        bias: whether the projections have a bias.
        activation: activation of the gate: "silu", "gelu_tanh" or "gelu".
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
        gate_up, total = norm_then_linear(x, self.gate_up_proj)
        out = self._activate_and_project(gate_up)
        return out if isinstance(x, Tensor) else (out, total)

    def _activate_and_project(self, gate_up: Tensor) -> Tensor:
        down, activation = self.down_proj, self.activation
        if is_plain(down, nn.Linear):
            return kernels.glu_linear(gate_up, down.weight, down.bias, activation)
        return down(kernels.glu(gate_up, activation))
