"""The gated MLP on a packed gate and up projection."""

from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.layers.fusion import is_plain, norm_then_linear
from ligermodels.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), arXiv:2002.05202, keeping only gate and up for backward.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width of gate and up.
        bias: whether the projections have one.
        activation: "silu", "gelu_tanh" or "gelu", of the gate.
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

    def forward(
        self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply to x, or to norm(x + residual) with the add and norm fused in.

        Args: x, residual (..., hidden).
        Returns: (..., hidden); with a norm the pair (that, x + residual).
        """
        if norm is None:
            return self._down(self.gate_up_proj(x if residual is None else x + residual))
        gate_up, total = norm_then_linear(x, residual, norm, self.gate_up_proj)
        return self._down(gate_up), total

    def _down(self, gate_up: Tensor) -> Tensor:
        down, activation = self.down_proj, self.activation
        if is_plain(down, nn.Linear):
            return kernels.glu_linear(gate_up, down.weight, down.bias, activation)
        return down(kernels.glu(gate_up, activation))
