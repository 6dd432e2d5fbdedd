"""vLLM's loaders name every part of the names in an export.

`vllm_names` has read the tables from the code of vLLM 0.33.0, which cannot run in the tests: it
needs versions of its own. That a loader puts a tensor to the right place is not checked. The delta
net's A_log and dt_bias are in vllm/model_executor/layers/mamba; its conv1d was not found there.
"""

from __future__ import annotations

import pytest

from tests.converters.test_gguf_names import ARCHITECTURES as FAMILIES
from tests.converters.vllm_names import words_of_export

_BODY = "model layers embed_tokens norm lm_head self_attn o_proj input_layernorm weight"
_SPLIT = f"{_BODY} post_attention_layernorm q_proj k_proj v_proj"
_LLAMA = f"{_SPLIT} mlp gate_proj up_proj down_proj"
_SANDWICH = f"{_LLAMA} pre_feedforward_layernorm post_feedforward_layernorm"
_HEAD_NORMS = "q_norm k_norm"
_DELTA = "linear_attn in_proj_qkv in_proj_z in_proj_a in_proj_b conv1d A_log dt_bias out_proj"
# Architecture in config.json -> file of vllm/model_executor/models, and the names in its code.
VLLM = {
    "LlamaForCausalLM": ("llama", _LLAMA),
    "MistralForCausalLM": ("mistral", _LLAMA),
    "Ministral3ForCausalLM": ("mistral", _LLAMA),
    "MixtralForCausalLM": ("mixtral", f"{_SPLIT} block_sparse_moe gate experts w1 w2 w3"),
    "GemmaForCausalLM": ("gemma", _LLAMA),
    "Gemma2ForCausalLM": ("gemma2", _SANDWICH),
    "Gemma3ForCausalLM": ("gemma3", f"{_SANDWICH} {_HEAD_NORMS}"),
    "Gemma4ForCausalLM": (
        "gemma4",
        f"{_SANDWICH} {_HEAD_NORMS} layer_scalar experts gate_up_proj router proj scale "
        "per_expert_scale post_feedforward_layernorm_1 post_feedforward_layernorm_2 "
        "pre_feedforward_layernorm_2",
    ),
    "Qwen2ForCausalLM": ("qwen2", f"{_LLAMA} bias"),
    "Qwen3ForCausalLM": ("qwen3", f"{_LLAMA} {_HEAD_NORMS}"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", f"{_LLAMA} {_HEAD_NORMS} gate experts"),
    "Qwen3_5ForCausalLM": ("qwen3_5", f"{_LLAMA} {_HEAD_NORMS} {_DELTA}"),
    "Qwen3_5MoeForCausalLM": (
        "qwen3_5",
        f"{_LLAMA} {_HEAD_NORMS} {_DELTA} gate experts gate_up_proj shared_expert "
        "shared_expert_gate",
    ),
    "GptOssForCausalLM": (
        "gpt_oss",
        f"{_SPLIT} mlp bias sinks router experts gate_up_proj gate_up_proj_bias down_proj "
        "down_proj_bias",
    ),
    "Phi3ForCausalLM": (
        "phi3",
        f"{_BODY} post_attention_layernorm qkv_proj mlp gate_up_proj down_proj",
    ),
    "GraniteForCausalLM": ("granite", _LLAMA),
    "GraniteMoeHybridForCausalLM": (
        "granitemoehybrid",
        f"{_SPLIT} shared_mlp input_linear output_linear",
    ),
}
# vLLM has no code of its own for these: it runs the modules of transformers.
BY_TRANSFORMERS = {"olmo2", "olmo3", "smollm3"}


@pytest.mark.parametrize("family", sorted({*FAMILIES} - BY_TRANSFORMERS))
def test_vllm_names_the_parts_of_an_export(family: str) -> None:
    architecture, parts = words_of_export(family)
    assert parts <= {*VLLM[architecture][1].split()}
