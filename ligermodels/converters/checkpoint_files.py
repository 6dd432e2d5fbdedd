"""The files of an HF checkpoint: their names, and which of them hold the weights."""

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ligermodels.converters.files import read_json
from ligermodels.errors import CheckpointError, listing, printable, shown

# As transformers.utils calls them.
CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_DIR = "additional_chat_templates"
SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")
_PLAIN_NAME = re.compile(r"[^./\\:][^/\\:]*\.safetensors")
# An export copies these bit for bit from the checkpoint that was loaded, and CHAT_TEMPLATE_DIR.
COPIED_FILES = (
    GENERATION_CONFIG_NAME,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE_FILE,
    "chat_template.json",
)


def copied_files(folder: Path) -> list[str]:
    """Names, relative to the folder, of those of its files that an export copies."""
    templates = sorted(path.name for path in (folder / CHAT_TEMPLATE_DIR).glob("*"))
    names = [*COPIED_FILES, *(f"{CHAT_TEMPLATE_DIR}/{name}" for name in templates)]
    return [name for name in names if (folder / name).is_file()]


def file_names(folder: Path) -> set[str]:
    """Names of what is in a folder, without links whose target is gone: the hub cache has such.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    try:
        return {name for name in os.listdir(folder) if os.path.exists(folder / name)}
    except OSError as fault:
        raise CheckpointError(f"{folder}: cannot be read: {fault.strerror}") from None


def local_weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """`weight_files` of a local folder."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    return weight_files(str(folder), file_names(folder), lambda: read_json(index, CheckpointError))


def weight_files(
    where: str, names: Collection[str], read_index: Callable[[], dict[str, Any]]
) -> tuple[list[str], dict[str, str] | None]:
    """Which of the files of a folder or of a hub repository hold the weights.

    Args:
        where: the folder or repository, for messages.
        names: of all its files.
        read_index: reads model.safetensors.index.json; called only where there is one.
    Returns: the names of the weight files, and the index's tensor -> file map or None.
    Raises:
        CheckpointError: no file can be read, or it is unclear which to read; the message says
            what to do.
    """
    if SAFE_WEIGHTS_INDEX_NAME not in names:
        if SAFE_WEIGHTS_NAME in names:
            return [SAFE_WEIGHTS_NAME], None
        raise CheckpointError(_why_no_weights(where, names))
    index = f"{where}/{SAFE_WEIGHTS_INDEX_NAME}"
    shard_of = read_index().get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index}: 'weight_map' is missing or empty")
    for key, name in shard_of.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                f"{index}: 'weight_map' puts {shown(key)} into {shown(name)}, which is no plain "
                "file name"
            )
    files = sorted(set(shard_of.values()))
    if SAFE_WEIGHTS_NAME in names and SAFE_WEIGHTS_NAME not in files:
        raise CheckpointError(
            f"{index}: does not name {SAFE_WEIGHTS_NAME}, which stands beside it: one of the two "
            "is stale; remove it"
        )
    if absent := [name for name in files if name not in names]:
        raise CheckpointError(
            f"{where}/{printable(absent[0])}: is missing, but {SAFE_WEIGHTS_INDEX_NAME} names it "
            f"({len(absent)} of {len(files)} shards missing)\n{listing(absent)}"
        )
    return files, shard_of


def _is_plain_name(name: str) -> bool:
    return _PLAIN_NAME.fullmatch(name) is not None and name.isprintable() and len(name) <= 255


def _why_no_weights(where: str, names: Collection[str]) -> str:
    """The message for a folder whose weights, if there are any, cannot be read."""
    if "adapter_config.json" in names:
        return (
            f"{where}/adapter_config.json: this is an adapter, not a model; merge it into its base "
            "with peft (merge_and_unload, then save_pretrained)"
        )
    if any(SHARD_NAME.fullmatch(n) for n in names):
        return f"{where}/{SAFE_WEIGHTS_INDEX_NAME}: is missing, but there are shards"
    if "consolidated.safetensors" in names:
        return (
            f"{where}/consolidated.safetensors: is not in the HF layout; {SAFE_WEIGHTS_NAME} or "
            f"{SAFE_WEIGHTS_INDEX_NAME} with its shards is needed"
        )
    pickled = sorted(n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickled := [n for n in pickled if "training_args" not in n]:
        return (
            f"{where}/{printable(pickled[0])}: holds pickled weights, which are never unpickled "
            f"here, and there is no {SAFE_WEIGHTS_NAME}; convert once, where you trust the file: "
            "transformers.AutoModelForCausalLM.from_pretrained(<this>, dtype='auto')"
            ".save_pretrained(<new folder>)"
        )
    if gguf := sorted(n for n in names if n.endswith(".gguf")):
        return (
            f"{where}/{printable(gguf[0])}: GGUF is not read here; get the model's safetensors "
            "checkpoint"
        )
    right = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    if misspelt := [n for n in names if n.casefold() in right]:
        return f"{where}/{misspelt[0]}: has to be spelt in small letters; rename it"
    return f"{where}: holds no weights: neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}"
