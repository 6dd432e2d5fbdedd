"""Read a tokenizer.json with the `tokenizers` package."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ligermodels.converters.files import parse_json
from ligermodels.errors import CheckpointError, first_line, short_repr
from ligermodels.text.tokenizer_config import FLAGS, added_tokens

T = TypeVar("T")


class TokenizersBackend:
    """A tokenizer.json, with the added and special tokens of the tokenizer config.

    The post-processor of the file adds bos and eos. As in transformers, `add_bos_token` and
    `add_eos_token` of the config have no effect.

    Args:
        path: the file, for messages.
        raw: its content.
        config: the content of tokenizer_config.json.
        special_tokens: name -> text.
    Raises:
        CheckpointError: the file is damaged, or gives a token several ids or an id several tokens,
            or the config gives a token another id than the file.
    """

    def __init__(
        self,
        path: Path,
        raw: bytes,
        config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
    ) -> None:
        import tokenizers

        self.path = path
        # The package keeps the last of several equal keys, and one of several tokens of one id.
        content = parse_json(raw, str(path), CheckpointError)
        read = tokenizers.Tokenizer.from_buffer
        self.tokenizer = tokenizer = self._call("this is not a tokenizer file", read, raw)
        _check_ids(path, content)
        # A file may have been saved with settings for training: truncation, padding, and dropout,
        # which leaves out merges at random.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        for entry in content.get("added_tokens") or []:
            self._check_id(f"{path}: added_tokens", entry["content"], entry["id"])
        for index, entry in added_tokens(config).items():
            token = entry["content"]
            if self.token_to_id(token) is None:
                given: dict[str, Any] = {**entry}
                flags = {name: given[name] for name in FLAGS if given.get(name) is not None}
                self._add(tokenizer.add_tokens, [tokenizers.AddedToken(token, **flags)])
            where = f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder"
            self._check_id(where, token, index)
        added = tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        self._add(
            tokenizer.add_special_tokens,
            [
                tokenizers.AddedToken(token, normalized=False, special=True)
                for token in dict.fromkeys(special_tokens.values())
                if token not in special
            ],
        )
        self.special_tokens = dict(special_tokens)

    def _add(self, add: Callable[[Any], object], tokens: list[Any]) -> None:
        self._call("the tokens of the tokenizer config cannot be added", add, tokens)

    def _check_id(self, where: str, token: str, index: int) -> None:
        got = self.token_to_id(token)
        if got != index:
            raise CheckpointError(
                f"{where} gives {short_repr(token)} id {index}, but with {self.path.name} the "
                f"token gets id {got}; correct one of the two"
            )

    def _call(self, problem: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of the package; raise CheckpointError if it fails.

        The package raises a bare Exception for every fault, or it panics: a regular expression
        takes too long, or a file is inconsistent. A panic is not an Exception.
        """
        try:
            return function(*args, **kwargs)
        except MemoryError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(f"{self.path}: {problem}: {first_line(error)}") from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encode = self.tokenizer.encode
        failed = "the tokenizer cannot encode the text"
        return self._call(failed, encode, text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        decode = self.tokenizer.decode
        failed = "the tokenizer cannot decode the tokens"
        return self._call(failed, decode, ids, skip_special_tokens=skip_special_tokens)

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


def _check_ids(path: Path, content: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the vocabulary has an id twice or one that int32 cannot hold."""
    vocab = content.get("model", {}).get("vocab")
    if not isinstance(vocab, dict):  # A list gives each token its place as its id.
        return
    if len(set(vocab.values())) < len(vocab):
        first: dict[int, str] = {}
        token = next(token for token, i in vocab.items() if first.setdefault(i, token) != token)
        raise CheckpointError(
            f"{path}: the vocabulary has {short_repr(first[vocab[token]])} and {short_repr(token)} "
            f"as {vocab[token]}; give each token its own id"
        )
    if vocab and (highest := max(vocab, key=vocab.__getitem__)) and vocab[highest] >= 2**31:
        raise CheckpointError(
            f"{path}: the vocabulary has {short_repr(highest)} as {vocab[highest]}, expected an id "
            "from 0 to 2**31 - 1"
        )
