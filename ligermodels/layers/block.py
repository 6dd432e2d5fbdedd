"""The pre-norm decoder block, carrying the residual through add + norm."""

from torch import Tensor, nn

from ligermodels.layers.attention import Attention, AttentionContext
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import RMSNorm


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(.)), with each add left to the norm that follows.

    Per token it keeps for backward: both residual sums, q, k, v after rope, attention's output
    and gate_up; norm outputs and the activation product are computed again.
    """

    def __init__(
        self,
        self_attn: Attention,
        mlp: GatedMLP,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the block's output.

        Args: x, residual (batch, seq, hidden); their sum is the block's input, and a residual of
            None stands for zero.
        """
        x, residual = self.self_attn(x, context, norm=self.input_layernorm, residual=residual)
        return self.mlp(x, norm=self.post_attention_layernorm, residual=residual)


class SandwichBlock(nn.Module):
    """x + norm(attention(norm(x))), then + norm(mlp(norm(.))): a norm before and after each.

    Source: Gemma 2, arXiv:2408.00118. The adds are left to the norms that follow them.
    """

    def __init__(
        self,
        self_attn: Attention,
        mlp: GatedMLP,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
        pre_feedforward_layernorm: RMSNorm,
        post_feedforward_layernorm: RMSNorm,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the block's output; arguments as `DecoderBlock`'s."""
        x, residual = self.self_attn(x, context, norm=self.input_layernorm, residual=residual)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp(x, norm=self.pre_feedforward_layernorm, residual=residual)
        return self.post_feedforward_layernorm(x), residual
