"""Text to token ids and back, as a Hugging Face folder describes it, without transformers.

`tokenizer.json` runs in the `tokenizers` package; a folder that has only `tokenizer.model` runs in
sentencepiece, with the special tokens cut out of the text first, because sentencepiece would spell
`</s>` as four ordinary characters. Chat templates are in chat.py.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from ligermodels.converters.hub import resolve
from ligermodels.errors import CheckpointError, shown
from ligermodels.text.chat_template import Template, pick, read_templates, render

NAMED_SPECIALS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Backend(Protocol):
    """What `Tokenizer` needs of a tokenizer file's engine."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def id_to_token(self, index: int) -> str | None: ...
    def size(self) -> int: ...


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    `vocab_size` counts added tokens too (transformers' `len(tokenizer)`). `special_tokens` maps
    names such as `"bos_token"` to their text; `chat_template` is a template, a dict of named ones,
    or None.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: Template | None = None,
        source: str = "tokenizer",
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.source = source

    @classmethod
    def from_hf(cls, path: str | Path, revision: str | None = None) -> "Tokenizer":
        """Read the tokenizer of a local folder or a hub id.

        Raises:
            CheckpointError: no such checkpoint, or one with neither tokenizer.json nor a
                sentencepiece tokenizer.model, or a damaged file.
        """
        folder = resolve(path, revision, weights=False)
        config = _read_settings(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            # the older layout has a file of its own for what later moved into the config
            config = {**_read_settings(folder / "special_tokens_map.json"), **config}
        named = {k: _content(config[k]) for k in NAMED_SPECIALS if config.get(k) is not None}
        backend: Backend
        if (folder / "tokenizer.json").is_file():
            backend = JsonBackend(folder / "tokenizer.json", config, named)
        elif (folder / "tokenizer.model").is_file():
            added = _read_json(folder / "added_tokens.json")
            for token, index in added.items():
                if type(index) is not int:
                    raise CheckpointError(
                        f"{folder / 'added_tokens.json'}: {shown(token)} is {shown(index)}, "
                        "expected an integer"
                    )
            backend = SentencePieceBackend(folder / "tokenizer.model", config, named, added)
            named = backend.named
        else:
            raise CheckpointError(_nothing_usable(folder))
        return cls(backend, named, read_templates(folder, config), str(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the bos and eos the checkpoint asks for by default."""
        return self.backend.encode(text, add_special_tokens)

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """Text of ids (a list, a 1-D tensor or one int); ids the vocabulary lacks give no text."""
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        ids = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        size = self.backend.size()
        return self.backend.decode([i for i in ids if 0 <= i < size], skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Id of one token's text, None when the vocabulary does not have it."""
        return self.backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        """Text of one token as the vocabulary spells it, None when there is none."""
        return self.backend.id_to_token(index)

    @property
    def vocab_size(self) -> int:
        return self.backend.size()

    def __len__(self) -> int:
        return self.backend.size()

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._named_id("unk_token")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        *,
        chat_template: str | None = None,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        **variables: Any,
    ) -> Any:
        """Render a conversation (dicts with "role" and "content") as the model was trained on it.

        `chat_template` is a template or the name of one of the checkpoint's; further keywords reach
        the template. Returns token ids, or the text with `tokenize=False`; no bos or eos is added
        to what the template writes.

        Raises:
            ValueError: no messages; as CheckpointError also no template, or one that fails or
                refuses the conversation.
        """
        if not messages:
            raise ValueError(
                f"{self.source}: an empty conversation has nothing to render; pass messages"
            )
        # templates test whether a key is there; OpenAI-style messages carry `"tool_calls": None`
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        text = render(
            pick(self.chat_template, chat_template, tools is not None, self.source),
            self.source,
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


class JsonBackend:
    """tokenizer.json in the `tokenizers` package.

    The file's own post-processor puts bos and eos; as in transformers, `add_bos_token` and
    `add_eos_token` have no say beside it.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises a bare Exception for every fault
            raise CheckpointError(f"{path}: not a tokenizer file: {error}") from error
        # a file saved after training with truncation would silently cut what it encodes
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for index, entry in sorted(_added_tokens(config).items()):
            if tokenizer.token_to_id(entry["content"]) is None:
                tokenizer.add_tokens([_added_token(entry)])
                got = tokenizer.token_to_id(entry["content"])
                if got != index:
                    raise CheckpointError(
                        f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder gives "
                        f"{entry['content']!r} id {index}, but {path.name} leaves it {got}"
                    )
        known = {int(i): t for i, t in tokenizer.get_added_tokens_decoder().items()}
        special = {t.content for t in known.values() if t.special}
        tokenizer.add_special_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=True)
                for token in dict.fromkeys(named.values())
                if token not in special
            ]
        )
        self.tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        return self.tokenizer.id_to_token(index)

    def size(self) -> int:
        # ids may have gaps, so the highest id counts and not the number of tokens
        added = self.tokenizer.get_added_tokens_decoder()
        return max(
            self.tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1
        )


class SentencePieceBackend:
    """tokenizer.model in sentencepiece, added and special tokens cut out of the text before it.

    A leading space is kept, as sentencepiece and transformers 4 keep it (transformers 5 merges it
    into the prefix). After a special token no prefix space is put in unless the config says
    `legacy`. An absent `add_bos_token` means True and an absent `add_eos_token` False, Llama's own
    defaults.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        named: Mapping[str, str],
        added: Mapping[str, int],
    ) -> None:
        import sentencepiece

        raw = path.read_bytes()
        try:
            self.prefixing = sentencepiece.SentencePieceProcessor(model_proto=raw)
            # A protobuf field that comes twice is merged, the later value winning: this appends
            # `normalizer_spec { add_dummy_prefix: false }` without needing the protobuf package.
            self.plain = sentencepiece.SentencePieceProcessor(model_proto=raw + b"\x1a\x02\x18\x00")
        except Exception as error:
            raise CheckpointError(
                f"{path}: not a sentencepiece model (Llama 3's is a tiktoken file; "
                "such a checkpoint needs its tokenizer.json)"
            ) from error
        if config.get("add_prefix_space") is False:
            self.prefixing = self.plain
        self.strips_space = self.prefixing.encode("a") != self.plain.encode("a")
        self.legacy = bool(config.get("legacy", False))

        pieces = self.plain.get_piece_size()
        self.to_id = {self.plain.id_to_piece(i): i for i in range(pieces)}
        self.to_token = {i: token for token, i in self.to_id.items()}
        self.named = self._with_defaults(named)
        self.special: set[int] = set()
        split: dict[str, tuple[bool, bool]] = {}
        entries = {i: {"content": token} for token, i in added.items()} | _added_tokens(config)
        for index, entry in sorted(entries.items()):
            token = entry["content"]
            self.to_token[index], self.to_id[token] = token, index
            split[token] = (bool(entry.get("lstrip")), bool(entry.get("rstrip")))
            if entry.get("special"):
                self.special.add(index)
        for token in self.named.values():
            if token not in self.to_id:
                index = max(self.to_token) + 1
                self.to_token[index], self.to_id[token] = token, index
            split.setdefault(token, (False, False))
            self.special.add(self.to_id[token])
        self.bytes = {
            i: int(self.plain.id_to_piece(i)[3:5], 16)
            for i in range(pieces)
            if self.plain.is_byte(i)
        }
        # the longest first: one special token may begin with another
        longest = sorted(split, key=len, reverse=True)
        patterns = [
            (r"\s*" if split[t][0] else "") + re.escape(t) + (r"\s*" if split[t][1] else "")
            for t in longest
            if t
        ]
        self.split = re.compile("(" + "|".join(patterns) + ")") if patterns else None
        self.before = self._ids_if(config.get("add_bos_token", True), "bos_token")
        self.after = self._ids_if(config.get("add_eos_token", False), "eos_token")

    def _with_defaults(self, named: Mapping[str, str]) -> dict[str, str]:
        model = self.plain
        own = {
            "bos_token": model.bos_id(),
            "eos_token": model.eos_id(),
            "unk_token": model.unk_id(),
        }
        return {name: model.id_to_piece(i) for name, i in own.items() if i >= 0} | dict(named)

    def _ids_if(self, asked: Any, name: str) -> list[int]:
        return [self.to_id[self.named[name]]] if asked and name in self.named else []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        parts = self.split.split(text) if self.split else [text]
        for position, part in enumerate(parts):
            if position % 2:  # re.split puts what the group matched at the odd places
                ids.append(self.to_id[part if part in self.to_id else part.strip()])
            elif part:
                prefixed = self.legacy or position == 0
                ids += (self.prefixing if prefixed else self.plain).encode(part)
        return self.before + ids + self.after if add_special_tokens else ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special]
        text: list[str] = []
        # neighbouring bytes are decoded together: a character may need several
        for is_byte, group in groupby(ids, key=lambda i: i in self.bytes):
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


class TextStream:
    """Text of tokens that arrive one at a time, never half a character.

    Args:
        tokenizer: whose `decode` is used.
        context: ids before the first pushed one; their text is not repeated, but a word that
            follows them keeps its leading space.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Iterable[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        # Only a short window is decoded at each token: some ids already shown, and what follows.
        # The shown ones are there because a leading space depends on something being before it.
        self.ids = list(context)[-8:]
        self._mark_shown()

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids, self.skip_special_tokens)

    def _mark_shown(self) -> None:
        self.shown_ids, self.shown_length = len(self.ids), len(self._decode())

    def push(self, token: int) -> str:
        """The text that has become final with this token; "" within a multi-byte character."""
        self.ids.append(int(token))
        text = self._decode()
        # an incomplete character reads as U+FFFD until its last byte is there
        if len(text) <= self.shown_length or text.endswith("\ufffd"):
            return ""
        new = text[self.shown_length :]
        self.ids = self.ids[self.shown_ids :]
        self._mark_shown()
        return new

    def finish(self) -> str:
        """What was held back: an incomplete character at the very end comes out as U+FFFD."""
        new = self._decode()[self.shown_length :]
        self._mark_shown()
        return new


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _read_settings(path: Path) -> dict[str, Any]:
    """tokenizer_config.json or special_tokens_map.json, with what is used of it as it has to be."""
    found = _read_json(path)

    def check(key: str, good: bool, expected: str) -> None:
        if not good:
            raise CheckpointError(f"{path}: {key!r} is {shown(found[key])}, expected {expected}")

    for name in NAMED_SPECIALS:
        if found.get(name) is not None:
            token = found[name]
            token = token.get("content") if isinstance(token, dict) else token
            check(name, isinstance(token, str), "a string or an object with 'content'")
    decoder = found.get("added_tokens_decoder", {})
    good = isinstance(decoder, dict) and all(
        index.isdecimal()
        and len(index) < 10
        and isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        for index, entry in decoder.items()
    )
    check("added_tokens_decoder", good, "ids with an object that has 'content' each")
    template = found.get("chat_template")
    named = template if isinstance(template, list) else []
    good = all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in named
    )
    good = good and isinstance(template, (str, list, type(None)))
    check("chat_template", good, "a string or a list of named ones")
    return found


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else str(token)


def _added_tokens(config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    return {int(index): entry for index, entry in config.get("added_tokens_decoder", {}).items()}


def _added_token(entry: Mapping[str, Any]) -> Any:
    import tokenizers

    known = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return tokenizers.AddedToken(entry["content"], **{k: entry[k] for k in known if k in entry})


def _decode_bytes(run: bytes) -> str:
    # the `tokenizers` package has one replacement character per byte of a run that is not UTF-8
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _nothing_usable(folder: Path) -> str:
    found = sorted(
        p.name for p in folder.glob("*") if re.search("token|vocab|merges|tekken", p.name)
    )
    return (
        f"{folder}: no tokenizer.json and no tokenizer.model; "
        f"found {', '.join(found) if found else 'no tokenizer files'}\n"
        "transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )
