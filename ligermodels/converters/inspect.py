"""Describe a checkpoint from its config and its headers, without reading any tensor."""

import os
from dataclasses import dataclass
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.files import CONFIG_NAME, copied_files
from ligermodels.converters.hf_config import read_config, unknown_keys
from ligermodels.converters.save_dir import read_one_version
from ligermodels.converters.weight_map import Family


@dataclass(frozen=True)
class Description:
    """The sizes and settings of a checkpoint. All sizes are in bytes.

    Attributes:
        folder: the folder of the checkpoint.
        family: the model_type of the checkpoint.
        config: the fields of the config, with defaults for those that config.json leaves out.
        unknown_keys: keys of config.json that ligermodels does not read. Exports write them again.
        left_out: name prefix of another tower -> how many of its tensors are not loaded.
        kept: the same, for towers that exports write again.
        parameters: the number of parameters. A tied head counts once.
        dtype_bytes: dtype name in safetensors -> stored bytes of that dtype, of what is loaded.
        files: the size of each weight, config, tokenizer and generation file.
        memory: purpose -> estimated memory.
    """

    folder: Path
    family: str
    config: dict[str, Any]
    unknown_keys: dict[str, Any]
    left_out: dict[str, int]
    kept: dict[str, int]
    parameters: int
    dtype_bytes: dict[str, int]
    files: dict[str, int]
    memory: dict[str, int]


def describe(folder: str | os.PathLike[str], family: Family) -> Description:
    """Describe a local HF checkpoint. This makes the checks of a load, but reads no tensor.

    Args: family is the model class of the checkpoint.
    Raises:
        ConfigError, CheckpointError: a load would fail because of the config, a name or a shape.
    """
    folder = Path(folder)

    def read(folder: Path) -> tuple[dict[str, Any], Any, Checkpoint, dict[str, int]]:
        config, checkpoint = family.config_class.from_hf(folder), Checkpoint(folder)
        files = [folder / CONFIG_NAME, *checkpoint.files]
        sizes = {path.name: path.stat().st_size for path in files}
        sizes |= {name: len(content) for name, content in copied_files(folder).items()}
        return read_config(folder), config, checkpoint, sizes

    raw, config, checkpoint, sizes = read_one_version(folder, read)
    weight_map = family.weight_map(config)
    checkpoint.plan(weight_map)
    towers = () if weight_map.towers is None else weight_map.towers.kept
    counts = {start: sum(x.startswith(start) for x in checkpoint.kept) for start in towers}

    parameters = sum(prod(entry.shape) for entry in weight_map)
    dtype_bytes: dict[str, int] = {}
    for name in checkpoint.weight_map.source_shapes():
        info = checkpoint.tensors[name]
        dtype_bytes[info.dtype] = dtype_bytes.get(info.dtype, 0) + info.nbytes
    per_token = [2 * 2 * width for width in config.cache_widths]  # bytes of each layer

    def cache(tokens: int) -> int:
        kept = (min(window or tokens, tokens) for window in config.sliding_windows)
        return sum(map(mul, kept, per_token))

    longest = config.max_position_embeddings
    memory = {
        "weights as stored": sum(dtype_bytes.values()),
        "weights in bfloat16": 2 * parameters,
        "weights in float32": 4 * parameters,
        "AdamW training in bfloat16, without activations": 4 * 2 * parameters,
        "AdamW training in float32, without activations": 4 * 4 * parameters,
        "key/value cache in bfloat16, 1,000 tokens": cache(1000),
        f"key/value cache in bfloat16, longest row ({longest:,} tokens)": cache(longest),
    }
    fields = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    return Description(
        folder=folder,
        family=config.model_type,
        config=fields,
        unknown_keys=unknown_keys(raw, family.config_class),
        left_out=checkpoint.left_out,
        kept={start: count for start, count in counts.items() if count},
        parameters=parameters,
        dtype_bytes=dtype_bytes,
        files=sizes,
        memory=memory,
    )
