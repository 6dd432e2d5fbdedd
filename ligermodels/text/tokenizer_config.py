"""Read the files of a checkpoint's tokenizer, and check its settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.converters.files import GENERATION_CONFIG_NAME, copied_files, parse_json
from ligermodels.errors import CheckpointError, short_repr
from ligermodels.text.batch import SIDES

if TYPE_CHECKING:
    from tokenizers import AddedToken

# transformers has the same names in SPECIAL_TOKENS_ATTRIBUTES.
SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in "bos eos unk sep pad cls mask".split())
# The values of settings whose other values would be taken for one of these without a word.
_CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("padding_side", "truncation_side"), (*SIDES, None)),
}
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


class TokenizerFiles:
    """The files of a tokenizer's folder, read once.

    Args: folder: a local folder.
    Attributes:
        contents: name -> content of each file.
        config: the settings of tokenizer_config.json. In the older layout, without
            "added_tokens_decoder", it is filled from special_tokens_map.json.
    Raises:
        CheckpointError: a file is damaged. The message names the file and the key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents = copied_files(folder)
        self.contents.pop(GENERATION_CONFIG_NAME, None)
        self.config = self.read_json("tokenizer_config.json")
        for key, choices in _CHOICES.items():
            value = self.config.get(key)
            if value not in choices:
                problem = f"{key!r} is {short_repr(value)}, expected one of {choices}"
                raise self.error("tokenizer_config.json", problem)
        if "added_tokens_decoder" not in self.config:
            self.config = {**self.read_json("special_tokens_map.json"), **self.config}

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / name}: {problem}")

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file, or {} if there is no such file."""
        return parse_json(self.contents.get(name, b"{}"), str(self.folder / name), CheckpointError)

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


def added_token(entry: dict[str, Any], **flags: bool) -> "AddedToken":
    """Return an entry of "added_tokens_decoder" as a token of the package `tokenizers`."""
    from tokenizers import AddedToken

    given = {flag: entry[flag] for flag in _FLAGS if entry.get(flag) is not None}
    return AddedToken(entry["content"], **given | flags)


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
