"""Read the files of a checkpoint's tokenizer, and check its settings."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.converters.files import (
    GENERATION_CONFIG_NAME,
    copied_files,
    is_token_id,
    parse_json,
)
from ligermodels.errors import CheckpointError, short_repr
from ligermodels.text.batch import SIDES

if TYPE_CHECKING:
    from tokenizers import AddedToken

# transformers has the same names in SPECIAL_TOKENS_ATTRIBUTES.
SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in "bos eos unk sep pad cls mask".split())
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
# A checkpoint's own id: a decimal number below 2**31 that is written in one way only.
_ID = re.compile(r"0|[1-9][0-9]{,9}")


class TokenizerFiles:
    """The files of a tokenizer's folder, read once.

    Args: folder: a local folder.
    Attributes:
        contents: name -> content of each file.
        config: the settings of tokenizer_config.json. Those that ligermodels uses are checked. In
            the older layout, without "added_tokens_decoder", it is filled from
            special_tokens_map.json.
    Raises:
        CheckpointError: a file is damaged. The message names the file and the key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents = copied_files(folder)
        self.contents.pop(GENERATION_CONFIG_NAME, None)
        self.config = self._settings("tokenizer_config.json")
        if "added_tokens_decoder" not in self.config:
            self.config = {**self._settings("special_tokens_map.json"), **self.config}

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / name}: {problem}")

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file, or {} if there is no such file."""
        return parse_json(self.contents.get(name, b"{}"), str(self.folder / name), CheckpointError)

    def _settings(self, name: str) -> dict[str, Any]:
        found = self.read_json(name)
        for keys, is_good, expected in _CHECKS:
            for key in keys:
                value = found.get(key)
                if value is not None and not is_good(value):
                    raise self.error(name, f"{key!r} is {short_repr(value)}, expected {expected}")
        return found

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens: name, such as "bos_token" -> text.

        An empty text, as in the first conversions of Llama, means that there is no such token.
        """
        texts = {name: _text(self.config.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in texts.items() if text}

    def added_tokens(self) -> dict[int, dict[str, Any]]:
        """Return the "added_tokens_decoder" as id -> entry, in the order of the ids."""
        decoder = self.config.get("added_tokens_decoder") or {}
        return {int(index): decoder[index] for index in sorted(decoder, key=int)}

    def all_added_tokens(self) -> dict[int, dict[str, Any]]:
        """Return `added_tokens` with those of the older layout's added_tokens.json.

        Raises:
            CheckpointError: the file is damaged, or it gives another token's id to a token.
        """
        found, name = self.added_tokens(), "added_tokens.json"
        for token, index in self.read_json(name).items():
            is_id = is_token_id(index) and index >= 0
            if not is_id or found.setdefault(index, {"content": token})["content"] != token:
                raise self.error(
                    name,
                    f"{short_repr(token)} is {short_repr(index)}, expected an id from 0 to 2**31 "
                    "- 1 that no other token has",
                )
        return found


def added_token(entry: dict[str, Any], **flags: bool) -> "AddedToken":
    """Return an entry of "added_tokens_decoder" as a token of the package `tokenizers`."""
    from tokenizers import AddedToken

    given = {flag: entry[flag] for flag in _FLAGS if entry.get(flag) is not None}
    return AddedToken(entry["content"], **given | flags)


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _are_added_tokens(decoder: Any) -> bool:
    return isinstance(decoder, dict) and all(
        _ID.fullmatch(index)
        and int(index) < 2**31
        and isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and all(isinstance(entry.get(flag), bool | None) for flag in _FLAGS)
        for index, entry in decoder.items()
    )


def _is_template(value: Any) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    ) and len({entry["name"] for entry in value}) == len(value)


_CHECKS = (
    (SPECIAL_TOKENS, lambda x: isinstance(_text(x), str), "a string or an object with 'content'"),
    (_SWITCHES, lambda x: isinstance(x, bool), "true, false or null"),
    (("padding_side", "truncation_side"), SIDES.__contains__, f"one of {SIDES}"),
    (("added_tokens_decoder",), _are_added_tokens, "ids below 2**31 -> objects with 'content'"),
    (
        ("chat_template",),
        _is_template,
        "a string or a list of 'name' and 'template', no name twice",
    ),
)
