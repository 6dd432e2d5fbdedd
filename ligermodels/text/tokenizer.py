"""Convert text to token ids and back with the tokenizer of an HF folder, without transformers."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from ligermodels.converters.files import read_if_present
from ligermodels.converters.hub import HubOptions, resolve
from ligermodels.errors import CheckpointError, DataError
from ligermodels.text.chat_template import (
    ChatTemplate,
    choose_template,
    read_chat_template,
    render_template,
)
from ligermodels.text.growth import check_length
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
        backend: Backend
        file = folder / "tokenizer.json"
        if (raw := read_if_present(file, CheckpointError)) is not None:
            backend = TokenizersBackend(file, raw, config, special)
        elif (
            raw := read_if_present(file := folder / "tokenizer.model", CheckpointError)
        ) is not None:
            added = read_added_tokens(folder, config)
            backend = SentencePieceBackend(file, raw, config, special, added)
        else:
            raise CheckpointError(_nothing_usable(folder))
        return cls(backend, read_chat_template(folder, config), str(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Args: add_special_tokens adds bos and eos, each if the checkpoint's settings enable it.
        Raises:
            DataError: the text is not valid Unicode.
            CheckpointError: the tokenizer fails, for example because it has no token for a
                character and no unk token.
        """
        _check_text(text)
        check_length(text, self.backend.growth, self.backend.path)
        return self.backend.encode(text, add_special_tokens)

    def decode(self, ids: "int | Iterable[int] | Tensor", skip_special_tokens: bool = True) -> str:
        """Return the text of several ids, of a 1-D tensor or of one id.

        Ids outside the vocabulary are skipped.
        """
        found: Any = ids.tolist() if hasattr(ids, "tolist") else ids
        found = [found] if isinstance(found, int) else map(int, found)
        return self.backend.decode([i for i in found if 0 <= i < 2**31], skip_special_tokens)

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
