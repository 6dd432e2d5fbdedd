"""The command `ligermodels generate`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ligermodels.cli.interrupts import raise_on_interrupt
from ligermodels.cli.options import loading_arguments, loading_options, number
from ligermodels.errors import LigerError

if TYPE_CHECKING:
    from pathlib import Path

    from ligermodels.heads.medusa import MedusaHeads
    from ligermodels.models.base import DecoderModel
    from ligermodels.text.tokenizer import Tokenizer

HELP = "generate text from a prompt, or chat"
OUT_OF_MEMORY = " (try a smaller --max-new-tokens, or --dtype bfloat16)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the model, the prompt, and the options for sampling and loading."""
    command.description = (
        "Generate text that continues PROMPT. Decoding is greedy unless a sampling option "
        "(--temperature, --top-k, --top-p or --seed) is given, and with --temperature 0. Without "
        "PROMPT, the text is read from stdin; on a terminal, --chat then holds a conversation, "
        "with one line per turn."
    )
    add = command.add_argument
    add("model", metavar="MODEL", help="hub id or local folder of a checkpoint")
    add("prompt", metavar="PROMPT", nargs="?", help="the text to continue; - reads it from stdin")
    add("--chat", action="store_true", help="format the prompt with the chat template")
    add("--system", metavar="TEXT", help="the system message for --chat")
    count = number(int, at_least=1, at_most=10**9)
    share = number(float, more_than=0, at_most=1)
    add("--max-new-tokens", type=count, default=256, metavar="N", help="generate at most N tokens")
    add(
        "--temperature",
        type=number(float, at_least=0),
        metavar="T",
        help="sample at this temperature (default: 1); 0 is greedy",
    )
    add("--top-k", type=count, metavar="K", help="sample from the K most likely tokens")
    add(
        "--top-p",
        type=share,
        metavar="P",
        help="sample from the most likely tokens whose probabilities sum to P",
    )
    add(
        "--repetition-penalty",
        type=number(float, more_than=0, at_most=10**6),
        metavar="P",
        help="a value above 1 makes tokens that occurred before less likely (default: that of "
        "generation_config.json, else 1)",
    )
    add(
        "--seed",
        type=number(int, at_least=0, at_most=2**63 - 1),
        metavar="N",
        help="sample; the same seed gives the same text",
    )
    add(
        "--no-heads",
        action="store_true",
        help="do not use Medusa's heads, which a folder may hold and which make greedy generation "
        "faster",
    )
    add("--no-stream", action="store_true", help="print the text only when it is complete")
    add("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    loading_arguments(command)


def run(given: argparse.Namespace) -> None:
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
    prompt = given.prompt
    if not conversation and prompt in (None, "-"):
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
        model = AutoLiger.from_hf(real, device=device, **loading_options(given))
        return model, None if given.no_heads else load_heads(model, real)

    model, given.heads = read_one_version(folder, load)
    if not given.chat:
        _continue(given, model, tokenizer, ids)
        return
    messages = [] if given.system is None else [{"role": "system", "content": given.system}]
    if conversation:
        with raise_on_interrupt():  # Ctrl-C ends an answer, not the conversation.
            _converse(given, model, tokenizer, messages)
    else:
        _answer(given, model, tokenizer, [*messages, {"role": "user", "content": prompt}])


def _converse(
    given: argparse.Namespace,
    model: DecoderModel,
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
) -> None:
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
        pieces: list[str] = []
        try:
            _answer(given, model, tokenizer, [*messages, question], pieces)
        except KeyboardInterrupt:
            print()
        if pieces:  # An answer that was stopped before it began leaves no trace.
            messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def _answer(
    given: argparse.Namespace,
    model: DecoderModel,
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    pieces: list[str] | None = None,
) -> None:
    """Print the answer to a chat, as `_continue` does."""
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except ValueError as error:
        raise LigerError(f"generate: {error}") from error
    _continue(given, model, tokenizer, ids, pieces)


def _continue(
    given: argparse.Namespace,
    model: DecoderModel,
    tokenizer: Tokenizer,
    ids: list[int],
    pieces: list[str] | None = None,
) -> None:
    """Generate the text that follows `ids`, and print it in pieces or at once.

    Args: pieces receives the pieces.
    """
    from ligermodels.generation.generate import stream_text

    pieces = [] if pieces is None else pieces
    sampling = _sampling(given, model)
    try:
        stream = stream_text(
            model.eval(),
            tokenizer,
            ids,
            max_new_tokens=given.max_new_tokens,
            repetition_penalty=given.repetition_penalty,
            heads=None if sampling or _penalty(given, model) != 1 else given.heads,
            **sampling,
        )
    except (ValueError, IndexError) as error:  # the prompt is empty, or the model lacks an id
        raise LigerError(f"generate: {error}") from error
    for piece in stream:
        pieces.append(piece)
        if not given.no_stream:
            print(piece, end="", flush=True)
    print("".join(pieces) if given.no_stream else "")


def _penalty(given: argparse.Namespace, model: DecoderModel) -> float:
    from ligermodels.generation.generation_config import (
        checked_generation_config,
        resolve_repetition_penalty,
    )

    return resolve_repetition_penalty(given.repetition_penalty, checked_generation_config(model))


def _sampling(given: argparse.Namespace, model: DecoderModel) -> dict[str, Any]:
    """Return the options of `generate` for sampling; none if decoding is greedy."""
    import torch

    sampling = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if given.seed is not None:
        device = model.embed_tokens.weight.device
        sampling["generator"] = torch.Generator(device).manual_seed(given.seed)
    if not sampling or given.temperature == 0:
        return {}
    return {"do_sample": True, **sampling}
