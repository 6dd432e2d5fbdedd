"""Read a tokenizer.model with the `sentencepiece` package."""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError, first_line, short_repr
from ligermodels.text.tokenizer_config import AddedToken

# The characters that the `tokenizers` package takes for spaces (Unicode's White_Space).
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_WORD = re.compile(r"\w")


class SentencePieceBackend:
    """A tokenizer that encodes and decodes with a sentencepiece model.

    Added and special tokens are split off before the model sees the text, because the model would
    encode `</s>` as four ordinary characters. A leading space is kept, as in sentencepiece and
    transformers 4 (transformers 5 merges it into the prefix). Text after a special token gets no
    prefix space unless `legacy` is true in the config. By default bos is added and eos is not, as
    in Llama's tokenizer; `add_bos_token` and `add_eos_token` change this.

    Args:
        path: the file, for messages.
        raw: its content.
        config: the content of tokenizer_config.json.
        special_tokens: name -> text. For bos, eos and unk, the model's own token is the default.
        added_tokens: id -> token.
    Raises:
        CheckpointError: the file is not a sentencepiece model, or an added token has the id of
            another token, or another id than in the model.
    """

    def __init__(
        self,
        path: Path,
        raw: bytes,
        config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        added_tokens: Mapping[int, AddedToken],
    ) -> None:
        import sentencepiece

        self.path = path
        try:
            self.prefixing = sentencepiece.SentencePieceProcessor(model_proto=raw)
            # protobuf merges a field that appears twice, and the later value wins. So this appends
            # `normalizer_spec { add_dummy_prefix: false }` without the protobuf package.
            self.plain = sentencepiece.SentencePieceProcessor(model_proto=raw + b"\x1a\x02\x18\x00")
            model = self.plain
            pieces = range(model.get_piece_size())
            self.to_token = {i: model.id_to_piece(i) for i in pieces}
            self.bytes = {i: int(self.to_token[i][3:5], 16) for i in pieces if model.is_byte(i)}
        except MemoryError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path}: the file is not a sentencepiece model; if it is a tiktoken file, as "
                "Llama 3 has, the checkpoint needs its tokenizer.json"
            ) from error
        if config.get("add_prefix_space") is False:
            self.prefixing = self.plain
        self.legacy = bool(config.get("legacy", False))
        self.to_id = {token: i for i, token in self.to_token.items()}
        self.strips_space = self._pieces(self.prefixing, "a") != self._pieces(self.plain, "a")
        own = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}
        own["unk_token"] = model.unk_id()
        self.special_tokens = {name: self.to_token[i] for name, i in own.items() if i >= 0}
        self.special_tokens |= special_tokens

        self.special_ids: set[int] = set()
        self.added: dict[str, AddedToken] = {}
        for index, entry in added_tokens.items():
            token = entry["content"]
            self._check_added(token, index)
            self.to_token[index], self.to_id[token] = token, index
            self.added[token] = entry
            if entry.get("special"):
                self.special_ids.add(index)
        for token in self.special_tokens.values():
            if token not in self.to_id:
                index = max(self.to_token) + 1
                self.to_token[index], self.to_id[token] = token, index
            self.added.setdefault(token, {"content": token})
            self.special_ids.add(self.to_id[token])
        # The longest token comes first, because a shorter token may be a prefix of it.
        longest_first = sorted(filter(None, self.added), key=len, reverse=True)
        self.split = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.before = self._ids_if(config.get("add_bos_token", True), "bos_token")
        self.after = self._ids_if(config.get("add_eos_token", False), "eos_token")

    def _ids_if(self, asked: Any, name: str) -> list[int]:
        token = self.special_tokens.get(name)
        return [self.to_id[token]] if asked and token is not None else []

    def _check_added(self, token: str, index: int) -> None:
        """Raise CheckpointError if the model has the token or the id, but not as this pair.

        A reserved place, as <unused0> or <unk>, may get another text: the model itself never
        encodes a text as these.
        """
        model = self.plain
        if self.to_id.get(token, index) != index:
            raise CheckpointError(
                f"{self.path}: {short_repr(token)} is token {self.to_id[token]} there, but among "
                f"the added tokens it is {index}; correct one of the two"
            )
        taken = self.to_token.get(index, token)
        if taken != token:
            if not (model.is_control(index) or model.is_unused(index) or model.is_unknown(index)):
                raise CheckpointError(
                    f"{self.path}: token {index} is {short_repr(taken)} there, but among the added "
                    f"tokens it is {short_repr(token)}; correct one of the two"
                )
            del self.to_id[taken]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for part, is_token in self._parts(text):
            if is_token:
                ids.append(self.to_id[part])
            else:
                prefixed = self.legacy or not ids
                ids += self._pieces(self.prefixing if prefixed else self.plain, part)
        return self.before + ids + self.after if add_special_tokens else ids

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield (part, whether it is an added token), as the package `tokenizers` splits a text."""
        done = 0
        for match in self.split.finditer(text):
            start, end = match.span()
            token = self.added[match[0]]
            around = text[max(start - 1, 0) : start], text[end : end + 1]
            if token.get("single_word") and any(map(_WORD.match, around)):
                continue
            if token.get("lstrip"):
                start = done + len(text[done:start].rstrip(_SPACES))
            while token.get("rstrip") and end < len(text) and text[end] in _SPACES:
                end += 1
            if done < start:
                yield text[done:start], False
            if start < end:  # Otherwise it went with the spaces on the right of the token before.
                yield token["content"], True
            done = max(done, end)
        if done < len(text):
            yield text[done:], False

    def _pieces(self, model: Any, text: str) -> list[int]:
        try:
            return model.encode(text)
        except MemoryError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: sentencepiece cannot encode the text: {first_line(error)}"
            ) from error

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        text: list[str] = []
        # Consecutive bytes are decoded together, because a character may have several bytes.
        for is_byte, group in groupby(ids, key=self.bytes.__contains__):
            if is_byte:
                text.append(_decode_bytes(bytes(self.bytes[i] for i in group)))
            else:
                text += [self.to_token.get(i, "").replace("▁", " ") for i in group]
        joined = "".join(text)
        return joined.removeprefix(" ") if self.strips_space else joined

    def token_to_id(self, token: str) -> int | None:
        return self.to_id.get(token)

    def id_to_token(self, index: int) -> str | None:
        return self.to_token.get(index)

    def size(self) -> int:
        return max(self.to_token) + 1


def _decode_bytes(run: bytes) -> str:
    # Like the `tokenizers` package, this returns one replacement character per byte of a run that
    # is not UTF-8.
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
