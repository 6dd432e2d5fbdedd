"""Tiny Llama checkpoints, made with safetensors and json alone."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ligermodels.converters import export, save_dir
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.files import copied_files
from ligermodels.converters.hf_config import fields_from_hf, to_hf
from ligermodels.models.llama import LigerLlama, LlamaConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "is_llama_config": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
# CONFIG without the keys that have two spellings.
BASE = {k: v for k, v in CONFIG.items() if not k.startswith(("rope", "torch"))}
TOKENIZER = {
    "tokenizer.json": b'{"version": "1.0"}\n',
    "tokenizer.model": bytes(range(256)),
    "generation_config.json": b'{"do_sample": true}',
    "chat_template.jinja": b"{{ messages }}\r\n",
}


def parse(raw: dict, config_class=LlamaConfig):
    """Return the config that a config.json holds."""
    return config_class(**fields_from_hf(raw, config_class))


def llama_config(**changes) -> LlamaConfig:
    return parse({**CONFIG, **changes})


def random_tensors(config, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = LigerLlama.weight_map(config).source_shapes()
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def write_files(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_checkpoint(folder: Path, tensors: dict, config: dict, shards: int = 1) -> Path:
    write_files(folder, TOKENIZER | {"config.json": json.dumps(config).encode()})
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: t for j, (n, t) in enumerate(tensors.items()) if j % shards == i}
        save_file(part, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load_weights(folder, config, dtype=None, **options) -> dict[str, torch.Tensor]:
    """Return the parameters of a Llama checkpoint, in `dtype` or as stored."""
    checkpoint, table = Checkpoint(folder, **options), LigerLlama.weight_map(config)
    dtypes = checkpoint.plan(table)
    checkpoint.check_aliases(table)
    weights = {e.name: torch.full(e.shape, -7.0, dtype=dtype or dtypes[e.name]) for e in table}
    for entry in table:
        checkpoint.read(entry, weights[entry.name])
    return weights


def save_weights(folder, config, weights, **options) -> None:
    table = LigerLlama.weight_map(config)
    options.setdefault("dtypes", {name: weight.dtype for name, weight in weights.items()})
    export.save(folder, to_hf(config), table, weights.__getitem__, **options)


def resave(folder, config, target, **options) -> None:
    options.setdefault("source_files", copied_files(folder))
    save_weights(target, config, load_weights(folder, config), **options)


def contents(folder: Path) -> dict[str, bytes | str] | None:
    """Return each file with its bytes and each link with its target; None without a folder."""
    if not folder.exists():
        return None
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def make(tmp_path):
    """A function that writes a checkpoint and returns its folder and config.

    It takes the folder's name, `shards`, `dtype`, the names of tensors to `drop`, tensors to
    `add`, and config keys.
    """

    def build(name="hf", *, shards=1, dtype=torch.bfloat16, drop=(), add=None, **changes):
        config = llama_config(**changes)
        tensors = random_tensors(config, dtype)
        for gone in drop:
            del tensors[gone]
        tensors.update(add or {})
        folder = write_checkpoint(tmp_path / name, tensors, {**CONFIG, **changes}, shards)
        return folder, config

    return build


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    """Run a test with both ways to replace a folder; some systems lack the first."""
    if request.param == "two renames":
        monkeypatch.setattr(save_dir, "_exchange_names", lambda a, b: False)
    return request.param
