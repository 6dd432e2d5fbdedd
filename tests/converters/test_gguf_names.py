"""llama.cpp's converter finds a name for every tensor of an export.

`gguf` holds the table of names that `convert_hf_to_gguf.py` asks after the code of each
architecture has split or renamed what it must. Only what the table itself says is checked here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors import safe_open

from ligermodels.adapters.adapted_model import add_adapters, export_adapter
from tests.tiny_models import random_model

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "phi3": MODEL_ARCH.PHI3,
    "granite": MODEL_ARCH.GRANITE,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
}
# What the table does not have, so that only the script's own code can convert it.
NOT_IN_THE_TABLE = {
    "gemma4_text": {"router.scale", "router.per_expert_scale"},
    "gpt_oss": {
        "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
    },
    "granitemoehybrid": {"shared_mlp.input_linear.weight"},
    "qwen3_5_text": {"linear_attn.dt_bias"},
    "qwen3_5_moe_text": {"linear_attn.dt_bias"},
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_knows_the_names_of_an_export(family: str) -> None:
    # llama.cpp has no dense layers among the experts of Qwen3-MoE; published sizes have none.
    model = random_model(family, **({"mlp_only_layers": []} if family == "qwen3_moe" else {}))
    known = get_tensor_name_map(ARCHITECTURES[family], model.config.num_hidden_layers)
    unknown = set()
    for name in model.hf_map().source_shapes():
        joined = re.sub(r"\.experts\.\d+\.", ".experts.", name)  # the script stacks the experts
        if known.get_name(joined, try_suffixes=(".weight", ".bias")) is None:
            unknown.add(re.sub(r"^model\.layers\.\d+\.", "", name))
    assert unknown == NOT_IN_THE_TABLE.get(family, set())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_gguf_knows_the_targets_of_an_adapter(family: str, tmp_path: Path) -> None:
    """`convert_lora_to_gguf.py` looks up the name of each base weight, under PEFT's prefix."""
    model = random_model(family)
    add_adapters(model, rank=2, alpha=4.0)
    export_adapter(model, tmp_path, "base", None)
    known = get_tensor_name_map(ARCHITECTURES[family], model.config.num_hidden_layers)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        names = {re.sub(r"\.lora_[AB]\.weight$", "", name) for name in file.keys()}
    assert names
    assert all(known.get_name(name.removeprefix("base_model.model.")) for name in names)
