"""The names of the files of an HF checkpoint, which of them hold the weights, and its dtypes."""

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ligermodels.converters.files import (
    names_if_present,
    open_regular,
    read_if_present,
    read_json,
)
from ligermodels.errors import CheckpointError, listing, printable, short_repr

# The name in safetensors -> the name in torch and in config.json.
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

# transformers.utils has constants of the same names.
CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER_PICKLE_NAME = "adapter_model.bin"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_DIR = "additional_chat_templates"
SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")
# The same weights in another format, and the state of a training: no part of what is converted.
_NOT_CONVERTED = re.compile(
    r"(pytorch_model.*|consolidated.*|training_args|optimizer.*|scheduler.*|rng_state.*|scaler.*)"
    r"\.(safetensors|bin|pt|pth)"
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_PLAIN_NAME = re.compile(r"[^./\\:][^/\\:]*\.safetensors")
# Files with further weights that a checkpoint may hold beside those of its model. The code of each
# such format reads and writes its file; here, they are only downloaded, replaced and compared.
ADDED_WEIGHTS = ("medusa_lm_head.safetensors",)
# An export copies these files and CHAT_TEMPLATE_DIR bit for bit from the loaded checkpoint.
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


def copied_files(folder: Path) -> dict[str, bytes]:
    """Return the folder's files that an export copies: name relative to the folder -> content.

    Raises:
        CheckpointError: one of these names is there, but is not a file that can be read.
    """
    templates = names_if_present(folder / CHAT_TEMPLATE_DIR, CheckpointError) or []
    shown_templates = [name for name in templates if not name.startswith(".")]
    names = [*COPIED_FILES, *(f"{CHAT_TEMPLATE_DIR}/{name}" for name in shown_templates)]
    found = ((name, read_if_present(folder / name, CheckpointError)) for name in names)
    return {name: content for name, content in found if content is not None}


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter in PEFT's format, and no model."""
    return os.path.lexists(folder / ADAPTER_CONFIG_NAME) and not os.path.lexists(
        folder / CONFIG_NAME
    )


def files_left_out(folder: Path) -> list[str]:
    """Return the names in a folder that a conversion of its model or adapter does not carry over.

    Raises:
        CheckpointError: the folder holds further weights, or an adapter beside a model, which would
            be lost without a word; or it cannot be read.
    """
    adapter = [ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, ADAPTER_PICKLE_NAME]
    model = [CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, *ADDED_WEIGHTS]
    carried = {*COPIED_FILES, CHAT_TEMPLATE_DIR}
    carried.update(adapter if is_adapter(folder) else [*model, *local_weight_files(folder)[0]])
    left = [n for n in names_if_present(folder, CheckpointError) or () if n not in carried]
    for name in left:
        if name in adapter or (name.endswith(_WEIGHTS) and not _NOT_CONVERTED.fullmatch(name)):
            raise CheckpointError(
                f"{folder / printable(name)}: a conversion would lose this part of "
                f"{'an adapter' if name in adapter else 'other weights'}; move it to another "
                "folder, and convert the rest"
            )
    return [name for name in left if not name.startswith(".")]


def local_weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Call `weight_files` for a local folder. Links that lead nowhere raise CheckpointError."""
    try:
        names = os.listdir(folder)
    except OSError as fault:
        raise CheckpointError(f"{folder}: the folder cannot be read: {fault.strerror}") from None
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    found = weight_files(str(folder), names, lambda: read_json(index, CheckpointError))
    for name in found[0]:
        if not os.path.exists(folder / name):
            open_regular(folder / name, CheckpointError).close()  # raises
    return found


def weight_files(
    where: str, names: Collection[str], read_index: Callable[[], dict[str, Any]]
) -> tuple[list[str], dict[str, str] | None]:
    """Find the files of a folder or of a hub repository that hold the weights.

    Args:
        where: the folder or repository, for messages.
        names: the names of all its files.
        read_index: reads model.safetensors.index.json; it is called only if that file exists.
    Returns: the names of the weight files, and the index's map of tensor to file, if there is one.
    Raises:
        CheckpointError: the weights are in no supported format, or it is unclear which files to
            read. The message says what to do.
    """
    if SAFE_WEIGHTS_INDEX_NAME not in names:
        if SAFE_WEIGHTS_NAME in names:
            return [SAFE_WEIGHTS_NAME], None
        raise CheckpointError(_why_no_weights(where, names))
    index = f"{where}/{SAFE_WEIGHTS_INDEX_NAME}"
    shard_of = read_index().get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index}: 'weight_map' is missing or empty, or is not an object")
    for key, name in shard_of.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                f"{index}: 'weight_map' puts {short_repr(key)} into {short_repr(name)}, which is "
                "not a plain .safetensors file name"
            )
    files = sorted(set(shard_of.values()))
    if SAFE_WEIGHTS_NAME in names and SAFE_WEIGHTS_NAME not in files:
        raise CheckpointError(
            f"{index}: the index does not name {SAFE_WEIGHTS_NAME}, which is in the same folder; "
            "one of the two is stale: remove that one"
        )
    if absent := [name for name in files if name not in names]:
        raise CheckpointError(
            f"{where}/{printable(absent[0])}: the file is missing, but {SAFE_WEIGHTS_INDEX_NAME} "
            f"names it ({len(absent)} of {len(files)} shards are missing)\n{listing(absent)}"
        )
    return files, shard_of


def _is_plain_name(name: str) -> bool:
    return _PLAIN_NAME.fullmatch(name) is not None and name.isprintable() and len(name) <= 255


def _why_no_weights(where: str, names: Collection[str]) -> str:
    """Return the message for a folder that holds no weights or weights that cannot be read."""
    right = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    for is_it, what in (
        (
            re.compile("adapter_config.json").fullmatch,
            "this is an adapter, not a model; merge it into its base model with peft "
            "(merge_and_unload, then save_pretrained)",
        ),
        (
            SHARD_NAME.fullmatch,
            f"{SAFE_WEIGHTS_INDEX_NAME}, which names the shards, is missing; get it from the "
            "source of the shards",
        ),
        (
            re.compile("consolidated.safetensors").fullmatch,
            f"the file is not in the HF layout; get {' or '.join(right)}",
        ),
        (
            re.compile(r"(?!training_args).*\.(bin|pt|pth|ckpt)").fullmatch,
            f"the file holds pickled weights, which ligermodels never unpickles, and there is no "
            f"{SAFE_WEIGHTS_NAME}; if you trust the file, convert the folder once with "
            "transformers.AutoModelForCausalLM.from_pretrained(<this>, dtype='auto')"
            ".save_pretrained(<new folder>)",
        ),
        (
            re.compile(r".*\.gguf").fullmatch,
            "ligermodels does not read GGUF; get the model's safetensors checkpoint",
        ),
        (
            re.compile("|".join(right), re.IGNORECASE).fullmatch,
            "the name must be in lower case; rename the file",
        ),
    ):
        if found := sorted(filter(is_it, names)):
            return f"{where}/{printable(found[0])}: {what}"
    return f"{where}: this holds no weights: neither {' nor '.join(right)} is there"


def dtype_name(text: str) -> str:
    """Return torch's name of a dtype, for "bf16" and "torch.bfloat16", too. Others stay."""
    text = text.removeprefix("torch.")
    return _SHORT_NAMES.get(text, text)
