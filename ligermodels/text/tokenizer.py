"""Convert text to token ids and back with the tokenizer of an HF folder, without transformers."""

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from ligermodels.converters.hub import HubOptions, resolve
from ligermodels.errors import CheckpointError, DataError, LigerError, first_line, short_repr
from ligermodels.text.batch import Encoding, as_tensors, check_options
from ligermodels.text.chat_template import (
    choose_template,
    read_chat_template,
    render_template,
    written_template,
)
from ligermodels.text.tokenizer_config import TokenizerFiles
from ligermodels.text.tokenizer_json import NAME, call, read_tokenizer

if TYPE_CHECKING:
    import tokenizers
    from torch import Tensor


# The classes of transformers that pad on the left if tokenizer_config.json does not say where.
_PADDED_ON_THE_LEFT = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


def _special(name: str) -> tuple[property, property]:
    """Return two properties of a special token, such as "pad_token": its text and its id."""

    def get(self: "Tokenizer") -> str | None:
        return self.special_tokens.get(name)

    def get_id(self: "Tokenizer") -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def set(self: "Tokenizer", text: str | None) -> None:
        if text is None:
            self.special_tokens.pop(name, None)
        elif self.token_to_id(text) is None:
            raise ValueError(f"{name}: {short_repr(text)} is no token of this tokenizer")
        else:
            self.special_tokens[name] = text

    text = property(get, set, doc=f"The text of the {name}, or None. It may be set.")
    return text, property(get_id, doc=f"The id of the {name}, or None.")


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    The `tokenizers` package reads its tokenizer.json.

    Attributes:
        backend: the tokenizer.json, as a tokenizer of that package.
        special_tokens: name, such as "bos_token" -> text of the special token.
        chat_template: a template, a dict of named templates, or None.
        source: the folder, for messages.
        source_files, config: name -> content of the files that the tokenizer was read from, and its
            settings, for `save_hf`.
        padding_side, truncation_side: "left" or "right", for a call; as the checkpoint says.
        model_max_length: how many tokens a call with truncation keeps, or None.
        vocab_size: the number of ids with added tokens, as transformers' `len(tokenizer)`.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.source = str(files.folder)
        self.source_files = files.contents
        if NAME not in files.contents:
            raise CheckpointError(_nothing_usable(files.folder))
        self._files, self.backend = files, read_tokenizer(files)
        self.special_tokens = files.special_tokens()
        self.chat_template = read_chat_template(files)
        self._as_read = copy.copy(self.special_tokens), copy.copy(self.chat_template)
        self.config = config = files.config
        name = str(config.get("tokenizer_class")).removesuffix("Fast")
        side = "left" if name in _PADDED_ON_THE_LEFT else "right"
        self.padding_side: str = config.get("padding_side") or side
        self.truncation_side: str = config.get("truncation_side") or "right"
        limit = config.get("model_max_length")  # transformers writes 1e30 for none
        is_limit = isinstance(limit, int) and 0 < limit < 2**31
        self.model_max_length: int | None = limit if is_limit else None

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
            CheckpointError: the checkpoint does not exist, it has no tokenizer.json, or a file is
                damaged.
        """
        files = TokenizerFiles(resolve(path, revision, weights=False, **hub_options))
        try:
            return cls(files)
        except LigerError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{files.folder}: the settings in tokenizer_config.json or the files of its tokens "
                f"are damaged: {type(error).__name__}: {first_line(error)}"
            ) from error

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
        length = max_length or self.model_max_length or 0
        if not length and (truncation or padding == "max_length"):
            raise ValueError(f"{self.source}: no model_max_length is known; pass max_length")
        texts = [text] if isinstance(text, str) else text
        rows = [self._encode(t, add_special_tokens, length if truncation else 0) for t in texts]
        if padding in (True, "longest", "max_length"):
            length = length if padding == "max_length" else max(map(len, rows), default=0)
            if self.pad_token is None and any(len(row) < length for row in rows):
                raise ValueError(
                    "the tokenizer has no pad_token; set one, such as "
                    "tokenizer.pad_token = tokenizer.eos_token"
                )
            for row in rows:
                row.pad(length, direction=side, pad_id=self.pad_token_id or 0)
        encoding = Encoding(
            input_ids=[row.ids for row in rows], attention_mask=[row.attention_mask for row in rows]
        )
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
        return self._encode(text, add_special_tokens).ids

    def _encode(self, text: str, special: bool, length: int = 0) -> "tokenizers.Encoding":
        """Do what `encode` does. A length other than 0 cuts the text, not the tokens around it."""
        if not isinstance(text, str):
            raise TypeError(f"a text to encode must be a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text is not valid Unicode: character {error.start} is {text[error.start]!r}, "
                "half of a surrogate pair or a byte that was not UTF-8"
            ) from None
        encode = self.backend.encode
        if not length:
            return call(self._files, encode, text, add_special_tokens=special)
        row = call(self._files, encode, text, add_special_tokens=False)
        around = self.backend.num_special_tokens_to_add(False) if special else 0
        if length <= around:
            raise ValueError(
                f"max_length={length}: this has no room for a text beside {around} special tokens"
            )
        row.truncate(length - around, direction=self.truncation_side)
        return self.backend.post_process(row, add_special_tokens=special)

    def decode(self, ids: "int | Iterable[int] | Tensor", skip_special_tokens: bool = True) -> str:
        """Return the text of several ids, of a 1-D tensor or of one id.

        Ids outside the vocabulary are skipped.
        """
        found: Any = ids.tolist() if hasattr(ids, "tolist") else ids
        found = [found] if isinstance(found, int) else map(int, found)
        known = [i for i in found if 0 <= i < 2**31]
        special = {"skip_special_tokens": skip_special_tokens}
        return call(self._files, self.backend.decode, known, **special)

    def batch_decode(
        self, rows: "Iterable[Iterable[int]] | Tensor", skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each row of ids, as `decode`."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of the token with this text, or None if there is no such token."""
        return self.backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        """Return the text of a token as the vocabulary has it, or None if there is no such id."""
        return self.backend.id_to_token(index) if 0 <= index < 2**31 else None

    def __len__(self) -> int:
        # The ids may have gaps, so this uses the highest id and not only the number of tokens.
        added = self.backend.get_added_tokens_decoder()
        return max(self.backend.get_vocab_size(), max(added, default=-1) + 1)

    vocab_size = property(__len__)

    bos_token, bos_token_id = _special("bos_token")
    eos_token, eos_token_id = _special("eos_token")
    pad_token, pad_token_id = _special("pad_token")
    unk_token, unk_token_id = _special("unk_token")

    def save_hf(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer's files, in the format that transformers writes and reads.

        They are the files that it was read from, bit for bit. If the special_tokens or the
        chat_template were changed, tokenizer_config.json holds the new ones. A model in the folder
        stays. A save of a model writes its own tokenizer files, so save the tokenizer after it.

        Raises:
            SaveError: the files cannot be written. The old content of the folder is unchanged.
        """
        # It imports torch, which texts do not need.
        from ligermodels.converters.export import save_tokenizer

        save_tokenizer(folder, self.files())

    save_pretrained = save_hf

    def files(self) -> dict[str, bytes]:
        """Return the content of each file that `save_hf` writes, by name."""
        files = dict(self.source_files)
        special, template = self._as_read
        changed: dict[str, Any] = {
            name: self.special_tokens.get(name)
            for name in special.keys() | self.special_tokens.keys()
            if special.get(name) != self.special_tokens.get(name)
        }
        if template != self.chat_template:
            files = {n: content for n, content in files.items() if "chat_template" not in n}
            changed["chat_template"] = written_template(self.chat_template)
        if changed:
            files.pop("special_tokens_map.json", None)  # The config holds what was in it.
            config = {**self.config, **changed}
            files["tokenizer_config.json"] = (json.dumps(config, indent=2) + "\n").encode()
        return files

    def add_tokens(self, tokens: Iterable[str], *, special: bool = False) -> int:
        """Add tokens after the others, each with the next id, and return how many are new.

        Args: special: whether `decode` leaves them out by default.
        """
        new = [token for token in dict.fromkeys(tokens) if self.token_to_id(token) is None]
        if not new:
            return 0
        files = self._files
        content = files.read_json(NAME)
        flags = {"lstrip": False, "rstrip": False, "normalized": not special, "special": special}
        made = {
            index: {"content": token, "single_word": False, **flags}
            for index, token in enumerate(new, start=len(self))
        }
        old = content.get("added_tokens") or []
        content["added_tokens"] = [*old, *({"id": i, **each} for i, each in made.items())]
        files.contents[NAME] = json.dumps(content, ensure_ascii=False).encode()
        if "tokenizer_config.json" in files.contents and "added_tokens_decoder" in self.config:
            self.config["added_tokens_decoder"] |= {str(i): each for i, each in made.items()}
            text = json.dumps(self.config, indent=2) + "\n"
            files.contents["tokenizer_config.json"] = text.encode()
        self.backend = read_tokenizer(files)
        return len(new)

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
            raise ValueError(f"{self.source}: an empty conversation; pass at least one message")
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


def _nothing_usable(folder: Path) -> str:
    if os.path.lexists(folder / "run.json"):
        return f"{folder}: this is the folder of a run, whose model is in model/"
    names = sorted(p.name for p in folder.glob("*"))
    found = ", ".join(n for n in names if re.search("token|vocab|merges|tekken", n))
    return (
        f"{folder}: there is no tokenizer.json; the folder has {found or 'no tokenizer files'}\n"
        "transformers can write a tokenizer.json, also of a sentencepiece tokenizer.model: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )
