"""Random models of the zoo's features, which transformers itself makes, saves and loads.

The weights keep activations of order one and make all norms and biases different. Soft caps bend
the logits, and windows hide tokens that matter.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from tests.families import FAMILIES, Json
from tests.models import zoo

# A model of transformers would take the kernels of fla, whose backward refuses on Hopper with some
# versions of Triton.
sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
logging.disable_progress_bar()
logging.set_verbosity_error()


def _model_class(family: str) -> Any:
    return getattr(transformers, FAMILIES[family].hf[1])


def implementations(family: str) -> Json:
    """Return the implementations to compare with; "eager" alone has soft caps and sinks.

    Its experts take any sizes.
    """
    eager = zoo.has(family, "attn_logit_softcapping") or family in ("gpt_oss", "gemma4")
    options = {"attn_implementation": "eager" if eager else "sdpa"}
    return options | ({"experts_implementation": "eager"} if family == "gpt_oss" else {})


_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
# The configs of a wrapper's other towers.
_TOWERS: dict[str, Json] = {
    "gemma3": {
        "vision_config": {**_TOWER, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 1,
    },
    "gemma4": {
        "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
        "audio_config": {**_TOWER, "subsampling_conv_channels": [4, 4], "output_proj_dims": 16},
    },
    "mistral3": {
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8}
        | {"image_size": 28, "patch_size": 14},
    },
}
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
_QWEN_TOWER |= {"out_hidden_size": 48, "num_position_embeddings": 16, "patch_size": 4}
_TOWERS |= {key: {"vision_config": _QWEN_TOWER} for key in ("qwen3_5", "qwen3_5_moe")}


def build(family: str, feature: zoo.Feature, scale: zoo.Scale = zoo.TINY, seed: int = 0) -> Any:
    """Make a random model with transformers."""
    values = {**copy.deepcopy(zoo.sizes(family, scale)), **copy.deepcopy(feature.config)}
    if family == "granitemoehybrid":  # by default its layers are those of Mamba
        values["layer_types"] = ["attention"] * values["num_hidden_layers"]
    if FAMILIES[family].text_model:
        untied = family.startswith(("mistral3", "qwen3_5"))
        tied = values.get("tie_word_embeddings", not untied)
        values = {"text_config": values, **_TOWERS[family], "tie_word_embeddings": tied}
        vocab = values["text_config"]["vocab_size"]
        if family == "mistral3":
            values["text_config"]["model_type"] = "ministral3"
            values["image_token_index"] = vocab - 1
        if family == "gemma3":
            names = "image_token_index", "boi_token_index", "eoi_token_index"
            values |= {name: vocab - 1 - i for i, name in enumerate(names)}
    config = zoo.config_class(family)(**values)
    model = _model_class(family)._from_config(config, **implementations(family))
    randomize(model, family, seed)
    return model.eval()


def randomize(model: torch.nn.Module, family: str, seed: int = 0) -> None:
    """Draw every weight: a matrix by its width, norms around their neutral weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        scalars = [(n, x) for n, x in model.named_buffers() if n.endswith("layer_scalar")]
        for name, weight in [*model.named_parameters(), *scalars]:
            mean, std = 0.0, 0.3
            if "norm" in name or name.endswith(("scale", "scalar")):
                mean, std = FAMILIES[family].norm_weight, 0.2
                if "linear_attn" in name:
                    mean = 1.0
            elif "embed_tokens" not in name and weight.dim() > 1:
                std = 1.5 * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * std + mean)


def save(
    folder: Path, family: str, feature: zoo.Feature, scale: zoo.Scale = zoo.TINY, seed: int = 0
) -> None:
    """Let transformers write the feature's checkpoint, then edit config.json if asked."""
    model = build(family, feature, scale, seed).to(feature.dtype)
    model.save_pretrained(folder, max_shard_size=feature.max_shard_size)
    if feature.rewrite is not None:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        feature.rewrite(raw["text_config"] if FAMILIES[family].text_model else raw)
        path.write_text(json.dumps(raw, indent=2))
    # An export copies these files bit for bit.
    (folder / "tokenizer_config.json").write_text('{"add_bos_token":  true}')
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")


def load(folder: Path, family: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Load a checkpoint into transformers' wrapper, if it has one, or into the decoder."""
    auto = transformers.AutoModelForCausalLM
    if "text_config" in json.loads((folder / "config.json").read_text()):
        auto = transformers.AutoModelForImageTextToText
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_pretrained(folder, dtype=dtype, **implementations(family))
    return with_its_activation(model).eval().to(device)


def read_config(folder: Path) -> Json:
    """Return what transformers reads in a checkpoint's config.json."""
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path")}


def with_its_activation(model: Any) -> Any:
    """Return the model with the activation of its config, which transformers 5.17 ignores."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.alpha = model.config.swiglu_alpha
            module.limit = model.config.swiglu_limit
    return model
