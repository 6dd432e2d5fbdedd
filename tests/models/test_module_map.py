"""Compare each family's weight map with its model's parameters and transformers' tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from ligermodels import register
from ligermodels.checks.check_family import check_family
from ligermodels.errors import ConfigError
from ligermodels.layers import LayerNorm, RMSNorm
from ligermodels.models.llama import LigerLlama, LlamaConfig


@pytest.mark.usefixtures("registry")
def test_a_name_that_no_module_has() -> None:
    class Config(LlamaConfig):
        model_type: ClassVar[str] = "misnamed"

    class Misnamed(LigerLlama):
        config_class = Config
        hf_names: ClassVar[dict[str, str]] = {"self_attn.qkv_porj": "attention.qkv"}

    with pytest.raises(ConfigError, match=r"'self_attn.qkv_porj'.* did you mean '.*qkv_proj'"):
        register(Misnamed)


@pytest.mark.usefixtures("registry")
def test_norms_without_weights_and_norms_after_rope() -> None:
    """OLMo has the former, Hunyuan the latter; both are families of a few lines."""

    class OlmoConfig(LlamaConfig):
        model_type: ClassVar[str] = "olmo"

    class HunyuanConfig(LlamaConfig):
        model_type: ClassVar[str] = "hunyuan_v1_dense"
        architecture: ClassVar[str | None] = "HunYuanDenseV1ForCausalLM"

    class LigerOlmo(LigerLlama):
        config_class = OlmoConfig

        def norm_of(self, size: int | None = None) -> Any:
            return LayerNorm(self.config.hidden_size, elementwise_affine=False, bias=False)

    class LigerHunyuan(LigerLlama):
        config_class = HunyuanConfig
        hf_names: ClassVar[dict[str, str]] = {
            "self_attn.q_norm": "self_attn.query_layernorm",
            "self_attn.k_norm": "self_attn.key_layernorm",
        }

        def make_block(self, layer_index: int) -> Any:
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
