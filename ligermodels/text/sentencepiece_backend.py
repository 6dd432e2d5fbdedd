"""Read a tokenizer.model with the `sentencepiece` package."""

from itertools import groupby
from typing import Any

from ligermodels.errors import short_repr
from ligermodels.text.tokenizer_config import TokenizerFiles, added_token

NAME = "tokenizer.model"


class SentencePieceBackend:
    """A tokenizer that encodes and decodes with a sentencepiece model.

    Added and special tokens are split off before the model sees the text, because the model would
    encode `</s>` as four ordinary characters. A leading space is kept, as in sentencepiece and
    transformers 4 (transformers 5 merges it into the prefix). Text after a special token gets no
    prefix space unless `legacy` is true in the config. By default bos is added and eos is not, as
    in Llama's tokenizer; `add_bos_token` and `add_eos_token` change this.

    Raises:
        CheckpointError: the file is not a sentencepiece model, or an added token has the id of
            another token, or another id than in the model.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        import sentencepiece
        import tokenizers

        raw, config = files.contents[NAME], files.config
        try:
            self.prefixing = sentencepiece.SentencePieceProcessor(model_proto=raw)
            # protobuf merges a field that appears twice, and the later value wins. So this appends
            # `normalizer_spec { add_dummy_prefix: false }` without the protobuf package.
            self.plain = sentencepiece.SentencePieceProcessor(model_proto=raw + b"\x1a\x02\x18\x00")
            model = self.plain
            self.strips_space = self.prefixing.encode("a") != model.encode("a")
        except RuntimeError as error:
            raise files.error(
                NAME,
                "the file is not a sentencepiece model; if it is a tiktoken file, as Llama 3 has, "
                "the checkpoint needs its tokenizer.json",
            ) from error
        if config.get("add_prefix_space") is False:
            self.prefixing, self.strips_space = model, False
        self.legacy = bool(config.get("legacy"))
        self.to_token = {i: model.id_to_piece(i) for i in range(model.get_piece_size())}
        self.bytes = {i: int(t[3:5], 16) for i, t in self.to_token.items() if model.is_byte(i)}
        self.to_id = {token: i for i, token in self.to_token.items()}
        own = {f"{n}_token": getattr(model, f"{n}_id")() for n in ("bos", "eos", "unk")}
        self.special_tokens = {name: self.to_token[i] for name, i in own.items() if i >= 0}
        self.special_tokens |= files.special_tokens()

        added = files.all_added_tokens()
        # A reserved place, as <unused0> or <unk>, may get another text: the model itself never
        # encodes a text as these.
        reserved = model.is_control, model.is_unused, model.is_unknown
        for index, entry in added.items():
            token = entry["content"]
            known, taken = self.to_id.get(token, index), self.to_token.get(index, token)
            if known != index or (taken != token and not any(is_it(index) for is_it in reserved)):
                raise files.error(
                    NAME,
                    f"{short_repr(taken)} is token {index} and {short_repr(token)} is "
                    f"token {known}, but among the added tokens, {short_repr(token)} is {index}; "
                    "correct one of the two",
                )
            self.to_id.pop(taken, None)
            self.to_token[index], self.to_id[token] = token, index
        for token in self.special_tokens.values():
            if token not in self.to_id:
                index = max(self.to_token) + 1
                self.to_token[index], self.to_id[token] = token, index
        self.token_to_id, self.id_to_token = self.to_id.get, self.to_token.get
        self.special_ids = {self.to_id[token] for token in self.special_tokens.values()}
        self.special_ids |= {i for i, entry in added.items() if entry.get("special")}
        # The package `tokenizers` splits the added tokens off; what lies between is its token 0.
        between = tokenizers.models.WordLevel({"": 0}, unk_token="")
        self.splitter = tokenizers.Tokenizer(between)
        entries = {token: {"content": token} for token in self.special_tokens.values()}
        entries |= {entry["content"]: entry for entry in added.values() if entry["content"]}
        self.splitter.add_tokens([added_token(e, normalized=False) for e in entries.values()])
        self.added = [*entries]
        self.split_ids = {self.splitter.token_to_id(t): self.to_id[t] for t in entries}
        self.before = self._ids_if(config.get("add_bos_token", True), "bos_token")
        self.after = self._ids_if(config.get("add_eos_token", False), "eos_token")

    def _ids_if(self, asked: Any, name: str) -> list[int]:
        token = self.special_tokens.get(name)
        return [self.to_id[token]] if asked and token is not None else []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        parts = [(0, (0, len(text)))]
        if any(token in text for token in self.added):  # In most texts there is nothing to split.
            found = self.splitter.encode(text)
            parts = [*zip(found.ids, found.offsets)]
        for number, (start, end) in parts:
            if number:
                ids.append(self.split_ids[number])
            else:
                model = self.prefixing if self.legacy or not ids else self.plain
                ids += model.encode(text[start:end])
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

    def size(self) -> int:
        return max(self.to_token) + 1


def _decode_bytes(run: bytes) -> str:
    # Like the `tokenizers` package, this returns one replacement character per byte of a run that
    # is not UTF-8.
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
