"""Read a tokenizer.json with the `tokenizers` package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError
from ligermodels.text.tokenizer_config import added_tokens


class TokenizersBackend:
    """A tokenizer.json, with the added and special tokens of the tokenizer config.

    The post-processor of the file adds bos and eos. As in transformers, `add_bos_token` and
    `add_eos_token` of the config have no effect.

    Args:
        path: the file.
        config: the content of tokenizer_config.json.
        special_tokens: name -> text.
    Raises:
        CheckpointError: the file is damaged, or the config gives a token another id than the file.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> None:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The package raises a bare Exception for every fault.
            raise CheckpointError(f"{path}: this is not a tokenizer file: {error}") from error
        # A file may have been saved with truncation and padding switched on for training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for index, entry in added_tokens(config).items():
            token = entry["content"]
            if tokenizer.token_to_id(token) is None:
                known = ("lstrip", "rstrip", "normalized", "single_word", "special")
                flags = {name: value for name, value in entry.items() if name in known}
                tokenizer.add_tokens([tokenizers.AddedToken(token, **flags)])
                if (got := tokenizer.token_to_id(token)) != index:
                    raise CheckpointError(
                        f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder gives "
                        f"{token!r} id {index}, but with {path.name} the token gets id {got}"
                    )
        added = tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        tokenizer.add_special_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=True)
                for token in dict.fromkeys(special_tokens.values())
                if token not in special
            ]
        )
        self.tokenizer = tokenizer
        self.special_tokens = dict(special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        return self.tokenizer.id_to_token(index)

    def size(self) -> int:
        # The ids may have gaps, so this uses the highest id and not only the number of tokens.
        added = self.tokenizer.get_added_tokens_decoder()
        return max(
            self.tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1
        )
