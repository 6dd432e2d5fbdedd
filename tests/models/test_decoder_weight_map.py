"""Compare each family's weight map with its model's parameters and transformers' tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from torch import nn

from ligermodels import DecoderModel, register
from ligermodels.checks.check_family import check_family
from ligermodels.converters.weight_map import norm_entries
from ligermodels.layers import DecoderBlock, LayerNorm, RMSNorm
from ligermodels.models.decoder_weight_map import attention_entries, decoder_weight_map
from ligermodels.models.llama import LigerLlama, LlamaConfig


@pytest.mark.usefixtures("registry")
def test_norms_without_weights_and_norms_after_rope() -> None:
    """OLMo has the former, Hunyuan the latter; both are families of a few lines."""

    class OlmoConfig(LlamaConfig):
        model_type: ClassVar[str] = "olmo"

    class HunyuanConfig(LlamaConfig):
        model_type: ClassVar[str] = "hunyuan_v1_dense"
        architecture: ClassVar[str | None] = "HunYuanDenseV1ForCausalLM"

    def biases(config: Any) -> dict[str, bool]:
        bias = config.attention_bias
        return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": config.mlp_bias}

    class LigerOlmo(DecoderModel):
        config_class = OlmoConfig

        @staticmethod
        def weight_map(config: Any) -> Any:
            return decoder_weight_map(config, **biases(config), norms=(), final_norm=False)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.build(norm=self.plain_norm())

        def plain_norm(self) -> nn.Module:
            return LayerNorm(self.config.hidden_size, elementwise_affine=False, bias=False)

        def make_block(self, layer_index: int) -> nn.Module:
            block: Any = LigerLlama.make_block(self, layer_index)
            return DecoderBlock(block.self_attn, block.mlp, self.plain_norm(), self.plain_norm())

    class LigerHunyuan(LigerLlama):
        config_class = HunyuanConfig

        @staticmethod
        def weight_map(config: Any) -> Any:
            bias = config.attention_bias

            def attention(index: int, name: str, hf: str) -> Any:
                yield from attention_entries(config, name, hf, qkv_bias=bias, out_bias=bias)
                for ours, theirs in (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")):
                    yield from norm_entries(f"{name}.{ours}", f"{hf}.{theirs}", config.head_dim)

            return decoder_weight_map(config, attention=attention, mlp_bias=config.mlp_bias)

        def make_block(self, layer_index: int) -> nn.Module:
            block: Any = super().make_block(layer_index)
            config = self.config
            block.self_attn.norms_after_rope = True
            for name in ("q_norm", "k_norm"):
                norm = RMSNorm(config.head_dim, config.rms_norm_eps)
                setattr(block.self_attn, name, norm)
            return block

    for family in (LigerOlmo, LigerHunyuan):
        report = check_family(register(family), compile=False)
        row = report.rows["small config"]
        assert row["logits"].error is not None, row
        assert row["logits"].ok and row["gradients"].ok and row["generation"].ok, str(report)
