"""The files of an HF checkpoint: their names, and how they are opened and read safely.

A file from a hub may hold anything. If a key appears twice, `json.loads` silently keeps the last
value. It also raises several kinds of errors. The functions here refuse such files with one kind.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from ligermodels.errors import CheckpointError, LigerError, listing, printable, short_repr

T = TypeVar("T")


def open_regular(path: Path, error: type[LigerError]) -> FileIO:
    """Open a file to read its bytes.

    Raises:
        error: there is no such file, or it cannot be opened.
    """
    file = open_if_present(path, error)
    if file is None:
        raise error(f"{path}: the file is missing")
    return file


def open_if_present(path: Path, error: type[LigerError]) -> FileIO | None:
    """Open a file as `open_regular` does; return None if nothing has this name.

    Something that has the name but cannot be read is never taken for an absent file.

    Raises:
        error: the path is a link that leads nowhere, or a folder, or it cannot be opened.
    """
    return _if_present(path, "file", lambda: FileIO(path, "rb"), error)


def read_if_present(path: Path, error: type[LigerError]) -> bytes | None:
    """Return the bytes of a file, or None if nothing has this name.

    Raises:
        error: something is there, but it cannot be read.
    """
    return _if_present(path, "file", path.read_bytes, error)


def names_if_present(folder: Path, error: type[LigerError]) -> list[str] | None:
    """Return the sorted names in a folder, or None if nothing has the folder's name.

    Raises:
        error: something is there, but it is not a folder, or it cannot be listed.
    """
    return _if_present(folder, "folder", lambda: sorted(os.listdir(folder)), error)


def _if_present(path: Path, kind: str, read: Callable[[], T], error: type[LigerError]) -> T | None:
    """Return what `read` returns, or None if nothing has this name."""
    try:
        return read()
    except ValueError as fault:  # a null byte, or characters that no path can have
        raise error(f"{short_repr(str(path))}: the {kind} cannot be read: {fault}") from None
    except OSError as fault:
        why = fault.strerror
        if isinstance(fault, FileNotFoundError):
            if not os.path.lexists(path):
                return None
            why = (
                f"it is a link to {printable(os.path.realpath(path))}, which does not exist; "
                f"restore that {kind}, or remove the link"
            )
        raise error(f"{path}: the {kind} cannot be read: {why}") from None


def read_json(path: Path, error: type[LigerError]) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        error: the file is absent or cannot be read, or `parse_json` refuses its content.
    """
    found = read_json_if_present(path, error)
    if found is None:
        raise error(f"{path}: the file is missing")
    return found


def read_json_if_present(path: Path, error: type[LigerError]) -> dict[str, Any] | None:
    """Return the JSON object that a file holds, or None if nothing has this name.

    Raises:
        error: something is there, but it cannot be read, or `parse_json` refuses its content.
    """
    text = read_if_present(path, error)
    return None if text is None else parse_json(text, str(path), error)


def unique_keys(
    where: str, error: type[LigerError]
) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an `object_pairs_hook` for json that raises `error` if a key appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: key {short_repr(twice)} appears twice")
        return found

    return unique


def parse_json(text: bytes, where: str, error: type[LigerError]) -> dict[str, Any]:
    """Parse a JSON object that has no duplicate keys.

    Args: where names the source of `text` in messages.
    Raises:
        error: `text` is not such an object. The message says why, for a syntax error with its line.
    """
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys(where, error))
    except LigerError:
        raise
    except (ValueError, RecursionError) as fault:
        raise error(f"{where}: the content is not JSON: {fault}") from None
    if not isinstance(parsed, dict):
        raise error(f"{where}: the JSON holds a {type(parsed).__name__}, expected an object")
    return parsed


def is_int(value: Any) -> bool:
    """Return whether a JSON value is an integer; true and false are not integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: Any) -> bool:
    """Return whether a JSON value is an integer that fits in 32 bits, as all token ids do."""
    return is_int(value) and abs(value) < 2**31


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number for torch: an integer must fit in 64 bits."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_int(value) and abs(value) < 2**63


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
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
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
    names = names_if_present(folder, CheckpointError) or []
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    found = weight_files(str(folder), names, lambda: read_json(index, CheckpointError))
    for name in found[0]:
        open_regular(folder / name, CheckpointError).close()
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
    ):
        if found := sorted(filter(is_it, names)):
            return f"{where}/{printable(found[0])}: {what}"
    return f"{where}: this holds no weights: neither {' nor '.join(right)} is there"


def dtype_name(text: str) -> str:
    """Return torch's name of a dtype, for "bf16" and "torch.bfloat16", too. Others stay."""
    text = text.removeprefix("torch.")
    return _SHORT_NAMES.get(text, text)
