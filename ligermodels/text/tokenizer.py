"""Convert text to token ids and back with the tokenizer of an HF folder, without transformers."""

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from ligermodels.converters.checkpoint_files import (
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_NAME,
    copied_files,
)
from ligermodels.converters.files import parse_json
from ligermodels.converters.hub import HubOptions, resolve
from ligermodels.errors import CheckpointError, DataError, SaveError, short_repr
from ligermodels.text.batch import Encoding, as_tensors, check_options, cut, padded
from ligermodels.text.chat_template import (
    ChatTemplate,
    choose_template,
    read_chat_template,
    render_template,
    template_files,
)
from ligermodels.text.sentencepiece_backend import SentencePieceBackend
from ligermodels.text.tokenizer_config import (
    is_unicode,
    read_added_tokens,
    read_tokenizer_config,
    special_tokens,
)
from ligermodels.text.tokenizers_backend import TokenizersBackend

if TYPE_CHECKING:
    from torch import Tensor


# The classes of transformers that pad on the left if tokenizer_config.json does not say where.
_PADDED_ON_THE_LEFT = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


def _special(name: str) -> property:
    """Return the property of a special token, such as "pad_token"; it is its text, or None."""

    def get(self: "Tokenizer") -> str | None:
        return self.special_tokens.get(name)

    def set(self: "Tokenizer", text: str | None) -> None:
        if text is None:
            self.special_tokens.pop(name, None)
        elif self.token_to_id(text) is None:
            raise ValueError(f"{name}: {short_repr(text)} is no token of this tokenizer")
        else:
            self.special_tokens[name] = text

    return property(get, set, doc=f"The text of the {name}, or None. It may be set.")


def _special_id(name: str) -> property:
    """Return the property of the id of a special token, or None."""

    def get(self: "Tokenizer") -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    return property(get, doc=f"The id of the {name}, or None.")


# Each of the two classes reads one kind of tokenizer file. Both have the same methods.
Backend = TokenizersBackend | SentencePieceBackend


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    The `tokenizers` package reads a tokenizer.json. If the folder has only a tokenizer.model,
    `sentencepiece` reads it.

    Attributes:
        special_tokens: name, such as "bos_token" -> text of the special token.
        chat_template: a template, a dict of named templates, or None.
        source: the folder, for messages.
        source_files: name -> content of the files that the tokenizer was read from, for `save_hf`.
        padding_side, truncation_side: "left" or "right", for a call; as the checkpoint says.
        model_max_length: how many tokens a call with truncation keeps, or None.
        vocab_size: the number of ids with added tokens, as transformers' `len(tokenizer)`.
    """

    def __init__(
        self,
        backend: Backend,
        chat_template: ChatTemplate | None = None,
        source: str = "tokenizer",
    ) -> None:
        self.backend = backend
        self.special_tokens = backend.special_tokens
        self.chat_template = chat_template
        self.source = source
        self.source_files: dict[str, bytes] = {}
        self.padding_side = self.truncation_side = "right"
        self.model_max_length: int | None = None
        self._as_read = copy.copy(self.special_tokens), copy.copy(chat_template)

    @classmethod
    def from_hf(
        cls,
        path: str | os.PathLike[str],
        revision: str | None = None,
        **hub_options: Unpack[HubOptions],
    ) -> "Tokenizer":
        """Read the tokenizer of a local folder or a hub id.

        Args:
            revision: branch, tag or commit of a hub id.
            hub_options: token, cache_dir and local_files_only: see `HubOptions`.
        Raises:
            CheckpointError: the checkpoint does not exist, it has neither a tokenizer.json nor a
                sentencepiece tokenizer.model, or a file is damaged.
        """
        folder = resolve(path, revision, weights=False, **hub_options)
        config = read_tokenizer_config(folder)
        special = special_tokens(config)
        files = copied_files(folder)
        files.pop(GENERATION_CONFIG_NAME, None)
        backend: Backend
        if (raw := files.get("tokenizer.json")) is not None:
            backend = TokenizersBackend(folder / "tokenizer.json", raw, config, special)
        elif (raw := files.get("tokenizer.model")) is not None:
            added = read_added_tokens(folder, config)
            backend = SentencePieceBackend(folder / "tokenizer.model", raw, config, special, added)
        else:
            raise CheckpointError(_nothing_usable(folder))
        tokenizer = cls(backend, read_chat_template(folder, config), str(folder))
        tokenizer.source_files = files
        name = str(config.get("tokenizer_class")).removesuffix("Fast")
        side = "left" if name in _PADDED_ON_THE_LEFT else "right"
        tokenizer.padding_side = config.get("padding_side") or side
        tokenizer.truncation_side = config.get("truncation_side") or "right"
        limit = config.get("model_max_length")  # transformers writes 1e30 for none
        tokenizer.model_max_length = limit if isinstance(limit, int) and 0 < limit < 2**31 else None
        return tokenizer

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
    ) -> Encoding:
        """Return the ids and the mask of a text, or of several, as transformers' tokenizers do.

        Args:
            text: one text, or several.
            add_special_tokens: as in `encode`.
            padding: True or "longest" fills the rows to the longest one, "max_length" to
                max_length, with the pad_token.
            truncation: whether to cut texts to max_length on the truncation_side. The special
                tokens around a text stay.
            max_length: a number of tokens. The default is `model_max_length`.
            padding_side: "left" or "right". The default is that of the checkpoint; `generate` needs
                "left".
            return_tensors: "pt" returns tensors (batch, seq) int64, also of one text; None lists.
        Returns: an `Encoding` with input_ids and attention_mask.
        Raises:
            ValueError: an option is unknown or has no effect, there is no pad_token, or the rows
                of a tensor have different lengths.
            DataError, CheckpointError: as in `encode`.
        """
        side = padding_side or self.padding_side
        check_options(padding, truncation, max_length, side, return_tensors)
        length = max_length or self.model_max_length
        if length is None and (truncation or padding == "max_length"):
            raise ValueError(f"{self.source}: no model_max_length is known; pass max_length")
        rows = [self.encode(each, add_special_tokens) for each in _texts(text)]
        if truncation and length is not None:
            rows = [
                row
                if len(row) <= length
                else cut(row, self.encode(each, False), length, self.truncation_side)
                for row, each in zip(rows, _texts(text))
            ]
        if padding in (True, "longest"):
            length = max(map(len, rows), default=0)
        elif padding != "max_length":
            length = None
        encoding = padded(rows, length, self.pad_token_id, side)
        if return_tensors is not None:
            return as_tensors(encoding)
        if isinstance(text, str):
            return Encoding({name: rows[0] for name, rows in encoding.items()})
        return encoding

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Args: add_special_tokens adds bos and eos, each if the checkpoint's settings enable it.
        Raises:
            DataError: the text is not valid Unicode.
            CheckpointError: the tokenizer fails, for example because it has no token for a
                character and no unk token.
        """
        _check_text(text)
        return self.backend.encode(text, add_special_tokens)

    def decode(self, ids: "int | Iterable[int] | Tensor", skip_special_tokens: bool = True) -> str:
        """Return the text of several ids, of a 1-D tensor or of one id.

        Ids outside the vocabulary are skipped.
        """
        found: Any = ids.tolist() if hasattr(ids, "tolist") else ids
        found = [found] if isinstance(found, int) else map(int, found)
        return self.backend.decode([i for i in found if 0 <= i < 2**31], skip_special_tokens)

    def batch_decode(
        self, rows: "Iterable[Iterable[int]] | Tensor", skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each row of ids, as `decode`."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of the token with this text, or None if there is no such token."""
        return self.backend.token_to_id(token) if is_unicode(token) else None

    def id_to_token(self, index: int) -> str | None:
        """Return the text of a token as the vocabulary has it, or None if there is no such id."""
        return self.backend.id_to_token(index) if 0 <= index < 2**31 else None

    @property
    def vocab_size(self) -> int:
        return self.backend.size()

    def __len__(self) -> int:
        return self.backend.size()

    bos_token = _special("bos_token")
    eos_token = _special("eos_token")
    pad_token = _special("pad_token")
    unk_token = _special("unk_token")

    bos_token_id = _special_id("bos_token")
    eos_token_id = _special_id("eos_token")
    pad_token_id = _special_id("pad_token")
    unk_token_id = _special_id("unk_token")

    def save_hf(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer's files, in the format that transformers writes and reads.

        They are the files that it was read from, bit for bit. If the special_tokens or the
        chat_template were changed, tokenizer_config.json and the templates hold the new ones. A
        model in the folder stays. A save of a model writes its own tokenizer files, so save the
        tokenizer after it.

        Raises:
            SaveError: the files cannot be written, or the tokenizer was not read from a folder. The
                old content of the folder is unchanged.
        """
        # It imports torch, which texts do not need.
        from ligermodels.converters.export import save_tokenizer

        if not self.source_files:
            raise SaveError(f"{folder}: only a tokenizer that `from_hf` has read can be saved")
        files = dict(self.source_files)
        special, template = self._as_read
        changed = {
            name: self.special_tokens.get(name)
            for name in special.keys() | self.special_tokens.keys()
            if special.get(name) != self.special_tokens.get(name)
        }
        moved = template != self.chat_template
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            is_config = name == "tokenizer_config.json"
            if (changed or moved) and (is_config or name in files):
                content = parse_json(files.get(name, b"{}"), name, CheckpointError) | changed
                if moved:
                    content.pop("chat_template", None)
                files[name] = (json.dumps(content, indent=2) + "\n").encode()
        if moved:
            templates = (CHAT_TEMPLATE_FILE, "chat_template.json")
            old = [n for n in files if n in templates or n.startswith(f"{CHAT_TEMPLATE_DIR}/")]
            files = {n: each for n, each in files.items() if n not in old}
            files |= template_files(self.chat_template)
        save_tokenizer(folder, files)

    save_pretrained = save_hf

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        *,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> Any:
        """Render a conversation with the chat template that the model was trained with.

        Args:
            messages: the conversation, as dicts with "role" and "content".
            add_generation_prompt: whether to append the text that begins the assistant's answer.
            tokenize: whether to return token ids. If False, the text is returned.
            chat_template: a template, or the name of one of the checkpoint's templates.
            tools, documents: tools and documents that the template may describe to the model.
            variables: further variables of the template.
        Returns: a list of token ids, or the text. No bos or eos is added to the template's text.
        Raises:
            ValueError: there are no messages.
            CheckpointError: there is no template, or it fails or refuses the conversation.
        """
        if not messages:
            raise ValueError(
                f"{self.source}: an empty conversation cannot be rendered; pass at least one "
                "message"
            )
        # Templates test whether a key exists, but OpenAI's messages have `"tool_calls": None`.
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        text = render_template(
            choose_template(self.chat_template, chat_template, tools is not None, self.source),
            self.source,
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _texts(text: str | Sequence[str]) -> Sequence[str]:
    return [text] if isinstance(text, str) else text


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"a text to encode must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text is not valid Unicode: character {error.start} is {text[error.start]!r}, "
            "half of a surrogate pair or a byte that was not UTF-8"
        ) from None


def _nothing_usable(folder: Path) -> str:
    if os.path.lexists(folder / "run.json"):
        return f"{folder}: this is the folder of a run, whose model is in model/"
    found = sorted(
        p.name for p in folder.glob("*") if re.search("token|vocab|merges|tekken", p.name)
    )
    return (
        f"{folder}: there is no tokenizer.json and no tokenizer.model; the folder has "
        f"{', '.join(found) if found else 'no tokenizer files'}\n"
        "transformers can write a tokenizer.json: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )
