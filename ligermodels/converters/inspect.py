"""What a checkpoint is, from its config and headers alone."""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.checkpoint_files import CONFIG_NAME, copied_files
from ligermodels.converters.hf_config import read_config, unknown_keys
from ligermodels.converters.weight_map import Family


@dataclass(frozen=True)
class Description:
    """A checkpoint in numbers; sizes are bytes.

    Attributes:
        folder: where it is.
        family: its model_type.
        config: the config's fields, defaults filled in.
        unknown_keys: config.json keys that nothing reads; they are kept and exported again.
        left_out: how many tensors of other towers are not loaded, by how their names begin.
        parameters: how many there are, a tied head counted once.
        dtype_bytes: bytes stored per dtype, as safetensors spells it.
        files: size of each weight, config, tokenizer and generation file.
        memory: estimates by purpose.
    """

    folder: Path
    family: str
    config: dict[str, Any]
    unknown_keys: dict[str, Any]
    left_out: dict[str, int]
    parameters: int
    dtype_bytes: dict[str, int]
    files: dict[str, int]
    memory: dict[str, int]


def describe(folder: str | os.PathLike[str], family: Family) -> Description:
    """Describe a local HF checkpoint after the checks of a load, without reading a tensor.

    Args: family is its model class.
    Raises:
        ConfigError, CheckpointError: what a load would raise for names, shapes and config.
    """
    folder = Path(folder)
    raw = read_config(folder)
    config = family.config_class.from_hf(folder)
    weight_map = family.weight_map(config)
    checkpoint = Checkpoint(folder)
    checkpoint.plan(weight_map)

    parameters = sum(prod(entry.shape) for entry in weight_map)
    dtype_bytes: dict[str, int] = {}
    for name in weight_map.source_shapes():
        info = checkpoint.tensors[name]
        dtype_bytes[info.dtype] = dtype_bytes.get(info.dtype, 0) + info.nbytes
    names = [CONFIG_NAME, *(path.name for path in checkpoint.files), *copied_files(folder)]
    layers = config.num_hidden_layers
    per_token = 2 * 2 * config.num_key_value_heads * config.head_dim  # in a layer
    longest = config.max_position_embeddings
    kept = sum(min(window or longest, longest) for window in config.sliding_windows)
    memory = {
        "weights as stored": sum(dtype_bytes.values()),
        "weights in bfloat16": 2 * parameters,
        "weights in float32": 4 * parameters,
        "AdamW training in bfloat16, without activations": 4 * 2 * parameters,
        "AdamW training in float32, without activations": 4 * 4 * parameters,
        "key/value cache per 1000 tokens in bfloat16": 1000 * layers * per_token,
        f"key/value cache of all {longest} positions in bfloat16": kept * per_token,
    }
    fields = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    return Description(
        folder=folder,
        family=config.model_type,
        config=fields,
        unknown_keys=unknown_keys(raw, family.config_class),
        left_out=checkpoint.left_out,
        parameters=parameters,
        dtype_bytes=dtype_bytes,
        files={n: (folder / n).stat().st_size for n in names if (folder / n).is_file()},
        memory=memory,
    )
