"""Read the tokenizer settings of a checkpoint: the special tokens and the added tokens."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Required

from ligermodels.converters.files import is_token_id, read_json_if_present
from ligermodels.errors import CheckpointError, short_repr
from ligermodels.text.batch import SIDES

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


# The settings that switch something on or off, and the flags of an added token; null means the
# default.
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
# A checkpoint's own id: a decimal number below 2**31 that is written in one way only.
_ID = re.compile(r"0|[1-9][0-9]{,9}")


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
    """Return the special tokens of the config: name, such as "bos_token" -> text.

    An empty text, as in the first conversions of Llama, means that there is no such token.
    """
    texts = {name: _text(config.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text}


def added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the config's "added_tokens_decoder" as id -> token, in the order of the ids."""
    decoder = config.get("added_tokens_decoder", {})
    return {int(index): decoder[index] for index in sorted(decoder, key=int)}


def read_added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens of the older layout's added_tokens.json and of the config as id -> token.

    Raises:
        CheckpointError: the file is damaged, or it contradicts itself or the config.
    """
    path = folder / "added_tokens.json"
    merged = added_tokens(config)
    ids = {token["content"]: index for index, token in merged.items()}
    for token, index in (read_json_if_present(path, CheckpointError) or {}).items():
        if not is_token_id(index) or index < 0:
            raise CheckpointError(
                f"{path}: {short_repr(token)} is {short_repr(index)}, expected an id from 0 to "
                "2**31 - 1"
            )
        if not is_unicode(token):
            raise CheckpointError(f"{path}: {short_repr(token)} is not valid Unicode")
        if ids.setdefault(token, index) != index:
            raise CheckpointError(
                f"{path}: {short_repr(token)} is {index}, but added_tokens_decoder in "
                f"tokenizer_config.json has it as {ids[token]}; correct one of the two"
            )
        other = merged.setdefault(index, {"content": token})["content"]
        if other != token:
            raise CheckpointError(
                f"{path}: {short_repr(token)} is {index}, but {short_repr(other)} has the same id; "
                "give each token its own id"
            )
    return dict(sorted(merged.items()))


def is_unicode(text: str) -> bool:
    """Return whether a string is valid Unicode, which half a surrogate pair is not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _read_checked(path: Path) -> dict[str, Any]:
    """Read a settings file and check the types of the values that ligermodels uses."""
    found = read_json_if_present(path, CheckpointError) or {}

    def check(key: str, good: bool, expected: str) -> None:
        if not good:
            raise CheckpointError(
                f"{path}: {key!r} is {short_repr(found[key])}, expected {expected}"
            )

    for name in SPECIAL_TOKENS:
        good = found.get(name) is None or _are_texts(_text(found[name]))
        check(name, good, "a string or an object with 'content'")
    for name in _SWITCHES:
        check(name, _is_switch(found.get(name)), "true, false or null")
    for name in ("padding_side", "truncation_side"):
        check(name, found.get(name) in (None, *SIDES), f"one of {SIDES}")
    decoder = found.get("added_tokens_decoder", {})
    good = isinstance(decoder, dict) and all(map(_is_added_token, decoder.values()))
    check("added_tokens_decoder", good, "an object that maps ids to objects with 'content'")
    contents: dict[str, str] = {}
    for index, token in decoder.items():
        if not _ID.fullmatch(index) or int(index) >= 2**31:
            raise CheckpointError(
                f"{path}: added_tokens_decoder has the key {short_repr(index)}, expected an id "
                "from 0 to 2**31 - 1 without further signs"
            )
        if contents.setdefault(token["content"], index) != index:
            raise CheckpointError(
                f"{path}: added_tokens_decoder has {short_repr(token['content'])} as "
                f"{contents[token['content']]} and as {index}; remove one of the two"
            )
    template = found.get("chat_template")
    good = template is None or _are_texts(template)
    if isinstance(template, list):
        good = all(
            isinstance(entry, dict) and _are_texts(entry.get("name"), entry.get("template"))
            for entry in template
        ) and len({entry["name"] for entry in template}) == len(template)
    check(
        "chat_template",
        good,
        "a string or a list of objects with 'name' and 'template', each with its own name",
    )
    return found


def _is_added_token(entry: Any) -> bool:
    if not isinstance(entry, dict) or not _are_texts(entry.get("content")):
        return False
    return all(_is_switch(entry.get(flag)) for flag in FLAGS)


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) and is_unicode(value) for value in values)
