"""Read a tokenizer.model with the `sentencepiece` package."""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError
from ligermodels.text.tokenizer_config import AddedToken


class SentencePieceBackend:
    """A tokenizer that encodes and decodes with a sentencepiece model.

    Added and special tokens are split off before the model sees the text, because the model would
    encode `</s>` as four ordinary characters. A leading space is kept, as in sentencepiece and
    transformers 4 (transformers 5 merges it into the prefix). Text after a special token gets no
    prefix space unless `legacy` is true in the config. By default bos is added and eos is not, as
    in Llama's tokenizer; `add_bos_token` and `add_eos_token` change this.

    Args:
        path: the file.
        config: the content of tokenizer_config.json.
        special_tokens: name -> text. For bos, eos and unk, the model's own token is the default.
        added_tokens: id -> token.
    Raises:
        CheckpointError: the file is not a sentencepiece model.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        added_tokens: Mapping[int, AddedToken],
    ) -> None:
        import sentencepiece

        raw = path.read_bytes()
        try:
            self.prefixing = sentencepiece.SentencePieceProcessor(model_proto=raw)
            # protobuf merges a field that appears twice, and the later value wins. So this appends
            # `normalizer_spec { add_dummy_prefix: false }` without the protobuf package.
            self.plain = sentencepiece.SentencePieceProcessor(model_proto=raw + b"\x1a\x02\x18\x00")
        except Exception as error:
            raise CheckpointError(
                f"{path}: the file is not a sentencepiece model; if it is a tiktoken file, as "
                "Llama 3 has, the checkpoint needs its tokenizer.json"
            ) from error
        if config.get("add_prefix_space") is False:
            self.prefixing = self.plain
        self.strips_space = self.prefixing.encode("a") != self.plain.encode("a")
        self.legacy = bool(config.get("legacy", False))

        model = self.plain
        pieces = range(model.get_piece_size())
        self.to_id = {model.id_to_piece(i): i for i in pieces}
        self.to_token = {i: token for token, i in self.to_id.items()}
        self.bytes = {i: int(model.id_to_piece(i)[3:5], 16) for i in pieces if model.is_byte(i)}
        own = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}
        own["unk_token"] = model.unk_id()
        self.special_tokens = {name: model.id_to_piece(i) for name, i in own.items() if i >= 0}
        self.special_tokens |= special_tokens

        self.special_ids: set[int] = set()
        patterns: dict[str, str] = {}  # token -> the pattern that splits it off the text
        for index, entry in sorted(added_tokens.items()):
            token = entry["content"]
            self.to_token[index], self.to_id[token] = token, index
            left = r"\s*" if entry.get("lstrip") else ""
            right = r"\s*" if entry.get("rstrip") else ""
            patterns[token] = left + re.escape(token) + right
            if entry.get("special"):
                self.special_ids.add(index)
        for token in self.special_tokens.values():
            if token not in self.to_id:
                index = max(self.to_token) + 1
                self.to_token[index], self.to_id[token] = token, index
            patterns.setdefault(token, re.escape(token))
            self.special_ids.add(self.to_id[token])
        # The longest token comes first, because a shorter token may be a prefix of it.
        longest_first = sorted(filter(None, patterns), key=len, reverse=True)
        cut = "|".join(patterns[token] for token in longest_first)
        self.split = re.compile(f"({cut})") if cut else None
        self.before = self._ids_if(config.get("add_bos_token", True), "bos_token")
        self.after = self._ids_if(config.get("add_eos_token", False), "eos_token")

    def _ids_if(self, asked: Any, name: str) -> list[int]:
        token = self.special_tokens.get(name)
        return [self.to_id[token]] if asked and token is not None else []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        parts = self.split.split(text) if self.split else [text]
        for position, part in enumerate(parts):
            if position % 2:  # re.split puts the matches of the group at odd positions.
                ids.append(self.to_id[part if part in self.to_id else part.strip()])
            elif part:
                prefixed = self.legacy or position == 0
                ids += (self.prefixing if prefixed else self.plain).encode(part)
        return self.before + ids + self.after if add_special_tokens else ids

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
