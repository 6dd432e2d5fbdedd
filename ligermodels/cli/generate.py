"""The command `ligermodels generate`."""

from __future__ import annotations

import os
import sys
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any

from ligermodels.cli.interrupts import raise_on_interrupt
from ligermodels.cli.options import LoadingOptions
from ligermodels.errors import LigerError
from ligermodels.training.options import option

if TYPE_CHECKING:
    from pathlib import Path

    from ligermodels.heads.medusa import MedusaHeads
    from ligermodels.models.base import DecoderModel
    from ligermodels.text.tokenizer import Tokenizer

HELP = "generate text from a prompt, or chat"
OUT_OF_MEMORY = " (try a smaller --max-new-tokens, or --dtype bfloat16)"
DESCRIPTION = (
    "Generate text that continues PROMPT. Decoding is greedy unless a sampling option "
    "(--temperature, --top-k, --top-p or --seed) is given, and with --temperature 0. Without "
    "PROMPT, the text is read from stdin; on a terminal, --chat then holds a conversation, "
    "with one line per turn."
)


@dataclass(kw_only=True)
class Arguments(LoadingOptions):
    """The options of `generate`."""

    model: str = option(MISSING, "hub id or local folder of a checkpoint", positional=True)
    prompt: str | None = option(
        None, "the text to continue; - reads it from stdin", positional=True
    )
    chat: bool = option(False, "format the prompt with the chat template")
    system: str | None = option(None, "the system message for --chat", metavar="TEXT")
    max_new_tokens: int = option(256, "the most tokens to generate", at_least=1, at_most=10**9)
    temperature: float | None = option(
        None, "sample at this temperature (default: 1); 0 is greedy", at_least=0
    )
    top_k: int | None = option(
        None, "sample from so many most likely tokens", at_least=1, at_most=10**9
    )
    top_p: float | None = option(
        None,
        "sample from the most likely tokens whose probabilities sum to this",
        more_than=0,
        at_most=1,
    )
    repetition_penalty: float | None = option(
        None,
        "a value above 1 makes tokens that occurred before less likely (default: that of "
        "generation_config.json, else 1)",
        more_than=0,
        at_most=10**6,
    )
    seed: int | None = option(
        None, "sample; the same seed gives the same text", at_least=0, at_most=2**63 - 1
    )
    heads: bool = option(
        True, "use Medusa's heads, which a folder may hold and which make greedy generation faster"
    )
    stream: bool = option(True, "print the text while it is made")
    device: str | None = option(None, "cpu or cuda (default: cuda if there is a GPU)")


def run(given: Arguments) -> None:
    """Print the continuation of a prompt, or hold a conversation."""
    from ligermodels.converters.hub import resolve
    from ligermodels.converters.save_dir import read_one_version
    from ligermodels.heads.medusa_file import load_heads
    from ligermodels.models.auto import AutoLiger, tokenizer_folder
    from ligermodels.text.tokenizer import Tokenizer
    from ligermodels.training.finetune import pick_device

    if given.system is not None and not given.chat:
        raise LigerError("generate: --system needs --chat")
    conversation = given.chat and given.prompt is None and sys.stdin.isatty()
    prompt = given.prompt or ""
    if not conversation and given.prompt in (None, "-"):
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise LigerError(f"generate: the text on stdin is not UTF-8: {error}") from None
    device = pick_device(given.device)
    folder = resolve(given.model, revision=given.revision)
    tokenizer = Tokenizer.from_hf(tokenizer_folder(folder))
    if not given.chat and not (ids := tokenizer.encode(prompt)):
        raise LigerError("generate: PROMPT is empty; give a text to continue")

    def load(real: Path) -> tuple[DecoderModel, MedusaHeads | None]:
        model = AutoLiger.from_hf(real, device=device, **given.loading())
        return model, load_heads(model, real) if given.heads else None

    voice = _Voice(given, tokenizer, *read_one_version(folder, load))
    if not given.chat:
        voice.go_on(ids)
        return
    messages = [] if given.system is None else [{"role": "system", "content": given.system}]
    if conversation:
        with raise_on_interrupt():  # Ctrl-C ends an answer, not the conversation.
            _converse(voice, messages)
    else:
        voice.answer([*messages, {"role": "user", "content": prompt}])


def _converse(voice: _Voice, messages: list[dict[str, str]]) -> None:
    """Answer each line of the user until the input ends."""
    end = "Ctrl-Z and Enter end" if os.name == "nt" else "Ctrl-D ends"
    way_out = f"{end} the chat, and Ctrl-C stops an answer."
    print(way_out, file=sys.stderr)
    while True:
        try:
            if not (prompt := input("> ")).strip():
                continue
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{way_out}", file=sys.stderr)
            continue
        question = {"role": "user", "content": prompt}
        try:
            voice.answer([*messages, question])
        except KeyboardInterrupt:
            print()
        if voice.pieces:  # An answer that was stopped before it began leaves no trace.
            messages += [question, {"role": "assistant", "content": "".join(voice.pieces)}]


class _Voice:
    """Prints what a model generates.

    Attributes: pieces, the text that was generated last.
    """

    def __init__(
        self,
        given: Arguments,
        tokenizer: Tokenizer,
        model: DecoderModel,
        heads: MedusaHeads | None,
    ) -> None:
        import torch

        from ligermodels.generation.generation_config import (
            checked_generation_config,
            resolve_repetition_penalty,
        )

        self.model, self.tokenizer, self.streams = model.eval(), tokenizer, given.stream
        self.pieces: list[str] = []
        asked = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p")}
        asked = {name: value for name, value in asked.items() if value is not None}
        if given.seed is not None:
            device = model.embed_tokens.weight.device
            asked["generator"] = torch.Generator(device).manual_seed(given.seed)
        samples = bool(asked) and given.temperature != 0
        penalty = resolve_repetition_penalty(
            given.repetition_penalty, checked_generation_config(model)
        )
        self.options: dict[str, Any] = {"do_sample": True, **asked} if samples else {}
        self.options |= {
            "max_new_tokens": given.max_new_tokens,
            "repetition_penalty": penalty,
            "heads": None if samples or penalty != 1 else heads,
        }

    def answer(self, messages: list[dict[str, str]]) -> None:
        """Generate the answer to a chat."""
        self.pieces = []
        try:
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        except ValueError as error:
            raise LigerError(f"generate: {error}") from error
        self.go_on(ids)

    def go_on(self, ids: list[int]) -> None:
        """Generate the text that follows `ids`, and print it in pieces or at once."""
        from ligermodels.generation.generate import stream_text

        try:
            stream = stream_text(self.model, self.tokenizer, ids, **self.options)
        except (ValueError, IndexError) as error:  # the prompt is empty, or the model lacks an id
            raise LigerError(f"generate: {error}") from error
        for piece in stream:
            self.pieces.append(piece)
            if self.streams:
                print(piece, end="", flush=True)
        print("".join(self.pieces) if not self.streams else "")
