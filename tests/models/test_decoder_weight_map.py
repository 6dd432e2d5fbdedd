"""Compare each family's weight map with its model's parameters and transformers' tensors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ligermodels import DecoderModel, register
from ligermodels.checks.check_family import check_family
from ligermodels.converters.checkpoint import Checkpoint, bitwise_equal
from ligermodels.converters.weight_map import norm_entries
from ligermodels.layers import DecoderBlock, LayerNorm, RMSNorm
from ligermodels.models.auto import families
from ligermodels.models.decoder_weight_map import attention_entries, decoder_weight_map
from ligermodels.models.llama import LigerLlama, LlamaConfig
from tests.families import DECODERS

# All sizes differ, so that no shape can be mistaken for another.
SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The tied head and the biases do not interact: each occurs with both values.
variants = pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(family, {"tie_word_embeddings": tied, **biases}, id=f"{family}-tied_{tied}")
        for family, of in DECODERS.items()
        for tied, biases in ((True, {}), (False, of.biases))
    ],
)


@variants
def test_it_maps_exactly_transformers_tensors_to_our_parameters(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The map names our parameters and transformers' tensors, and reads the latter bit by bit."""
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **changes))
    tensors = {name: torch.randn_like(tensor) for name, tensor in hf.state_dict().items()}
    if changes["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    cls = families()[family]
    config = cls.config_class(**SIZES, **changes)
    with torch.device("meta"):
        model = cls(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weight_map = cls.weight_map(config)
    assert {entry.name: entry.shape for entry in weight_map} == expected
    assert weight_map.source_shapes() == {name: tuple(t.shape) for name, t in tensors.items()}

    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.plan(weight_map)
    native = {entry.name: torch.empty(entry.shape) for entry in weight_map}
    for entry in weight_map:
        checkpoint.read(entry, native[entry.name])
    for source, parts in weight_map.parts().items():
        rows = [native[entry.name][span.row : span.row + span.rows] for entry, span in parts]
        assert bitwise_equal(torch.cat(rows), tensors[source])


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


@pytest.mark.usefixtures("registry")
def test_a_norm_after_the_embedding(tmp_path: Path) -> None:
    """The first block applies it; Llama of transformers gets it as a hook on its embedding."""

    class NormedConfig(LlamaConfig):
        model_type: ClassVar[str] = "llama_normed"

    class NormedBlock(DecoderBlock):
        def forward(self, x: Any, residual: Any, context: Any) -> Any:
            return super().forward(
                self.embedding_norm(x) if residual is None else x, residual, context
            )

    class LigerNormed(LigerLlama):
        config_class = NormedConfig

        @staticmethod
        def weight_map(config: Any) -> Any:
            found = LigerLlama.weight_map(config)
            norm = norm_entries(
                "layers.0.embedding_norm", "model.embedding_norm", config.hidden_size
            )
            return dataclasses.replace(found, entries=(*found.entries, *norm))

        def make_block(self, layer_index: int) -> nn.Module:
            block: Any = super().make_block(layer_index)
            if layer_index:
                return block
            norms = block.input_layernorm, block.post_attention_layernorm
            first = NormedBlock(block.self_attn, block.mlp, *norms)
            first.embedding_norm = RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
            return first

    report = check_family(register(LigerNormed), compile=False)
    assert report.ok, str(report)
    model = LigerNormed(NormedConfig.small())
    norm = model.layers[0].embedding_norm
    with torch.no_grad():
        norm.weight.normal_()
    model.save_hf(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "llama"}
    theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights.pop("model.embedding_norm.weight"), norm.weight)
    theirs.load_state_dict(weights, strict=False)
    theirs.model.embed_tokens.register_forward_hook(lambda _, __, x: norm(x))
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    torch.testing.assert_close(model.head.logits(model(ids)), theirs(ids).logits)
