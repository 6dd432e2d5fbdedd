"""Read the tokenizer settings of a checkpoint: the special tokens and the added tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Required

from ligermodels.converters.files import is_int, read_json
from ligermodels.errors import CheckpointError, shown

# transformers has the same names in SPECIAL_TOKENS_ATTRIBUTES.
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class AddedToken(TypedDict, total=False):
    """An entry of "added_tokens_decoder"; the flags are those of `tokenizers.AddedToken`."""

    content: Required[str]
    special: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    single_word: bool


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, or {} if there is no such file.

    The keys that ligermodels uses are checked. A config without "added_tokens_decoder" has the
    older layout, whose special tokens are in special_tokens_map.json.

    Raises:
        CheckpointError: a file is damaged. The message names the file and the key.
    """
    config = _read_checked(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**_read_checked(folder / "special_tokens_map.json"), **config}
    return config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of the config: name, such as "bos_token" -> text."""
    found = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in found.items()
    }


def added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the config's "added_tokens_decoder" as id -> token, in the order of the ids."""
    decoder = config.get("added_tokens_decoder", {})
    return {int(index): decoder[index] for index in sorted(decoder, key=int)}


def read_added_tokens(folder: Path) -> dict[int, AddedToken]:
    """Return added_tokens.json of the older layout as id -> token, or {} if there is no such file.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / "added_tokens.json"
    found = _read_if_there(path)
    for token, index in found.items():
        if not is_int(index):
            raise CheckpointError(f"{path}: {shown(token)} is {shown(index)}, expected an integer")
    return {index: {"content": token} for token, index in found.items()}


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path, CheckpointError) if path.is_file() else {}


def _read_checked(path: Path) -> dict[str, Any]:
    """Read a settings file and check the types of the values that ligermodels uses."""
    found = _read_if_there(path)

    def check(key: str, good: bool, expected: str) -> None:
        if not good:
            raise CheckpointError(f"{path}: {key!r} is {shown(found[key])}, expected {expected}")

    for name in SPECIAL_TOKENS:
        if found.get(name) is not None:
            token = found[name]
            token = token.get("content") if isinstance(token, dict) else token
            check(name, isinstance(token, str), "a string or an object with 'content'")
    decoder = found.get("added_tokens_decoder", {})
    good = isinstance(decoder, dict) and all(
        index.isdecimal() and len(index) < 10 and _has_strings(entry, "content")
        for index, entry in decoder.items()
    )
    check("added_tokens_decoder", good, "an object that maps ids to objects with 'content'")
    template = found.get("chat_template")
    good = template is None or isinstance(template, str)
    if isinstance(template, list):
        good = all(_has_strings(entry, "name", "template") for entry in template)
    check("chat_template", good, "a string or a list of objects with 'name' and 'template'")
    return found


def _has_strings(entry: Any, *keys: str) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in keys)
