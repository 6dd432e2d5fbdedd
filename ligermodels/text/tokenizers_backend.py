"""Read a tokenizer.json with the `tokenizers` package."""

from collections.abc import Callable
from typing import Any

from ligermodels.errors import first_line, short_repr
from ligermodels.text.tokenizer_config import TokenizerFiles, added_token

NAME = "tokenizer.json"


class TokenizersBackend:
    """A tokenizer.json, with the added and special tokens of the tokenizer config.

    The post-processor of the file adds bos and eos. As in transformers, `add_bos_token` and
    `add_eos_token` of the config have no effect.

    Raises:
        CheckpointError: the file is damaged, or gives several tokens one id, or the config gives a
            token another id than the file.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        import tokenizers

        self.files = files
        content = files.read_json(NAME)
        read = tokenizers.Tokenizer.from_buffer
        self.tokenizer = tokenizer = self._call(read, files.contents[NAME])
        first: dict[int, str] = {}
        vocab = content["model"].get("vocab")  # In a list, each token's place is its id.
        for token, index in vocab.items() if isinstance(vocab, dict) else ():
            if first.setdefault(index, token) != token:
                raise files.error(
                    NAME,
                    f"the vocabulary has {short_repr(first[index])} and {short_repr(token)} as "
                    f"{index}; give each token its own id",
                )
        self.token_to_id, self.id_to_token = tokenizer.token_to_id, tokenizer.id_to_token
        # A file may have been saved with settings for training: truncation, padding, and dropout,
        # which leaves out merges at random.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        for entry in content.get("added_tokens") or []:
            self._check_id(NAME, entry["content"], entry["id"])
        entries = files.added_tokens()
        new = [e for e in entries.values() if self.token_to_id(e["content"]) is None]
        self._call(tokenizer.add_tokens, [added_token(entry) for entry in new])
        for index, entry in entries.items():
            self._check_id("tokenizer_config.json", entry["content"], index)
        self.special_tokens = files.special_tokens()
        added = tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        new_special = [t for t in dict.fromkeys(self.special_tokens.values()) if t not in special]
        self._call(tokenizer.add_special_tokens, new_special)

    def _check_id(self, name: str, token: str, index: int) -> None:
        got = self.token_to_id(token)
        if got != index:
            raise self.files.error(
                name,
                f"the added token {short_repr(token)} has id {index}, but with {NAME} it gets id "
                f"{got}; correct one of the two",
            )

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the package; raise CheckpointError if it fails.

        The package raises a bare Exception for every fault, or it panics: a regular expression
        takes too long, or a file is inconsistent. A panic is not an Exception.
        """
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            problem = f"the package tokenizers cannot use this file: {first_line(error)}"
            raise self.files.error(NAME, problem) from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._call(self.tokenizer.encode, text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._call(self.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)

    def size(self) -> int:
        # The ids may have gaps, so this uses the highest id and not only the number of tokens.
        added = self.tokenizer.get_added_tokens_decoder()
        return max(self.tokenizer.get_vocab_size(), max(added, default=-1) + 1)
