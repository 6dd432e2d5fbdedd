"""Ready-made decoder blocks. The norm after each residual addition computes it in one fused op."""

from torch import Tensor, nn

from ligermodels.layers.attention import Attention, AttentionContext
from ligermodels.layers.experts import Experts, SharedExperts
from ligermodels.layers.fusion import pre_norm
from ligermodels.layers.gated_delta import LinearAttention
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import RMSNorm


class DecoderBlock(nn.Module):
    """h = x + attention(norm(x)); the output is h + mlp(norm(h)).

    The MLP may be `Experts`.

    For backward the block saves, per token: both sums, q, k and v after rope, attention's output
    and gate_up. Backward recomputes the outputs of the norms and the activation product.
    """

    mixer = "self_attn"  # HF's name of the module that mixes tokens
    self_attn: Attention

    def __init__(
        self,
        self_attn: Attention | LinearAttention,
        mlp: GatedMLP | Experts | SharedExperts,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.add_module(self.mixer, self_attn)
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, ...]:
        """Return (x, residual), whose sum is the block's output; `Experts` add a router's logits.

        Args: x, residual (batch, seq, hidden). Their sum is the block's input. A residual of None
            means zero.
        """
        mixer = getattr(self, self.mixer)
        x, residual = mixer(pre_norm(self.input_layernorm, x, residual), context)
        normed = pre_norm(self.post_attention_layernorm, x, residual)
        return self.mlp(normed) if context.experts is None else self.mlp(normed, context.experts)


class LinearBlock(DecoderBlock):
    """A `DecoderBlock` with a `LinearAttention`, under HF's name of it."""

    mixer = "linear_attn"


class SandwichBlock(nn.Module):
    """h = x + norm(attention(norm(x))); the output is h + norm(mlp(norm(h))).

    Source: Gemma 2, arXiv:2408.00118.
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
        """Return (x, residual), whose sum is the output. See `DecoderBlock` for the arguments."""
        x, residual = self.self_attn(pre_norm(self.input_layernorm, x, residual), context)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp(pre_norm(self.pre_feedforward_layernorm, x, residual))
        return self.post_feedforward_layernorm(x), residual
