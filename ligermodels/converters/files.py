"""Files of a checkpoint folder: opening them, JSON, and which of them hold the weights."""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection
from io import FileIO
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError, LigerError, listing, printable, shown

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# Copied bit for bit from the checkpoint that was loaded to the one that is exported.
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # a folder, copied like them

# Not to wait for a pipe's writer, and not to have the bytes changed on the way in.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_MAX_JSON = 100_000_000  # what safetensors allows a header; an index is of that size at most
_MAX_DEPTH = 100  # of nesting; what reads further (copies, comparisons) recurses, too


def copied_files(folder: Path) -> list[str]:
    """Names, relative to the folder, of those of its files that an export carries along."""
    templates = sorted(path.name for path in (folder / TEMPLATES).glob("*"))
    names = [*COPIED, *(f"{TEMPLATES}/{name}" for name in templates)]
    return [name for name in names if (folder / name).is_file()]


def open_regular(path: Path, error: type[LigerError]) -> FileIO:
    """Open a file to read its bytes; a pipe or a device, on which that could hang, is refused.

    Raises:
        error: it cannot be opened, or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None
    except ValueError as fault:  # a null byte
        raise error(f"{shown(str(path))}: cannot be read: {fault}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path}: is no regular file")
    return FileIO(descriptor, "rb")


def file_names(folder: Path, error: type[LigerError]) -> set[str]:
    """Names of what is in a folder; a link to nothing is not: the hub cache is made of links.

    Raises:
        error: the folder cannot be listed.
    """
    try:
        return {name for name in os.listdir(folder) if os.path.exists(folder / name)}
    except OSError as fault:
        raise error(f"{folder}: cannot be read: {fault.strerror}") from None


def parse_json(text: bytes, where: str, error: type[LigerError]) -> dict[str, Any]:
    """A JSON object without duplicate keys.

    Raises:
        error: `where` holds something else; says what, and on which line.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: key {shown(twice)} appears twice")
        return found

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError:
        raise error(f"{where}: is not UTF-8 text") from None
    except json.JSONDecodeError as fault:
        raise error(
            f"{where}: is not JSON: {fault.msg} in line {fault.lineno}, column {fault.colno}"
        ) from None
    except LigerError:
        raise
    except ValueError:  # the one thing left that json refuses
        raise error(f"{where}: holds a number of too many digits to be read") from None
    except RecursionError:
        raise error(f"{where}: is nested too deep to be read") from None
    if not isinstance(parsed, dict):
        raise error(f"{where}: holds a {type(parsed).__name__}, expected an object")
    return parsed


def read_json(path: Path, error: type[LigerError]) -> dict[str, Any]:
    """`parse_json` of a file; not being able to read the file is an `error` too."""
    with open_regular(path, error) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_JSON:
                raise error(f"{path}: has {size} bytes, expected at most {_MAX_JSON}")
            text = file.read(size) or b""
        except OSError as fault:
            raise error(f"{path}: cannot be read: {fault.strerror}") from None
    parsed = parse_json(text, str(path), error)
    if _deeper(parsed, _MAX_DEPTH):
        raise error(f"{path}: is nested too deep: more than {_MAX_DEPTH} levels")
    return parsed


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects in `value` are nested more than `levels` deep."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(item, levels - 1) for item in inner)


def weight_files(
    where: str, names: Collection[str], read_index: Callable[[], dict[str, Any]]
) -> tuple[list[str], dict[str, str] | None]:
    """Which of the file `names` hold the weights, in a folder or a hub repository alike.

    Args: where names the folder or repository in messages; read_index gets the index's JSON.
    Returns: the file names, and the index's tensor -> file map where there is an index.
    Raises:
        CheckpointError: there are none that can be read, or it is unclear which; says the way out.
    """
    if INDEX not in names:
        if SINGLE in names:
            return [SINGLE], None
        raise CheckpointError(_why_no_weights(where, names))
    index = f"{where}/{INDEX}"
    weight_map = read_index().get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' is missing or empty")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                f"{index}: 'weight_map' puts {shown(key)} into {shown(name)}, which is no plain "
                "file name"
            )
    files = sorted(set(weight_map.values()))
    if SINGLE in names and SINGLE not in files:
        raise CheckpointError(
            f"{index}: does not name {SINGLE}, which stands beside it: one of the two is stale; "
            "remove it"
        )
    absent = [name for name in files if name not in names]
    if absent:
        raise CheckpointError(
            f"{where}/{printable(absent[0])}: is missing, but {INDEX} names it "
            f"({len(absent)} of {len(files)} shards missing)\n{listing(absent)}"
        )
    return files, weight_map


def _is_plain_name(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and not name.startswith(".")
        and not any(c in name for c in "/\\:")
        and name.isprintable()
        and len(name) <= 255
    )


def _why_no_weights(where: str, names: Collection[str]) -> str:
    pickled = sorted(n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt")))
    pickled = [n for n in pickled if "training_args" not in n]
    if "adapter_config.json" in names:
        return (
            f"{where}/adapter_config.json: this is an adapter, not a model; merge it into its base "
            "with peft (merge_and_unload, then save_pretrained)"
        )
    if any(SHARD.fullmatch(n) for n in names):
        return f"{where}/{INDEX}: is missing, but there are shards"
    if "consolidated.safetensors" in names:
        return (
            f"{where}/consolidated.safetensors: is not in the HF layout; {SINGLE} or {INDEX} "
            "with its shards is needed"
        )
    if pickled:
        return (
            f"{where}/{printable(pickled[0])}: holds pickled weights, which are never unpickled "
            f"here, and there is no {SINGLE}; convert once, where you trust the file: "
            "transformers.AutoModelForCausalLM.from_pretrained(<this>, dtype='auto')"
            ".save_pretrained(<new folder>)"
        )
    gguf = sorted(n for n in names if n.endswith(".gguf"))
    if gguf:
        return (
            f"{where}/{printable(gguf[0])}: GGUF is not read here; get the model's safetensors "
            "checkpoint"
        )
    misspelt = [n for n in names if n.casefold() in (SINGLE, INDEX)]
    if misspelt:
        return f"{where}/{misspelt[0]}: has to be spelt in small letters; rename it"
    return f"{where}: holds no weights: neither {SINGLE} nor {INDEX}"
