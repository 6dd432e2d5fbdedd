"""`ligermodels generate`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ligermodels.cli.options import loading_arguments, loading_options, number
from ligermodels.errors import LigerError

if TYPE_CHECKING:
    from ligermodels.models.base import DecoderModel
    from ligermodels.text.tokenizer import Tokenizer

HELP = "continue a prompt, or chat"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The model, the prompt, how to choose tokens, and how to load."""
    command.description = (
        "Continue PROMPT, greedily unless a sampling option is given. Without PROMPT it is read "
        "from stdin; with --chat on a terminal that is a conversation, one line a turn."
    )
    add = command.add_argument
    add("model", metavar="MODEL", help="hub id or folder of a checkpoint")
    add("prompt", metavar="PROMPT", nargs="?", help="the text to continue; - reads stdin")
    add("--chat", action="store_true", help="put the prompt through the chat template")
    add("--system", metavar="TEXT", help="a system message, with --chat")
    count, positive = number(int, at_least=1), number(float, more_than=0)
    share = number(float, more_than=0, at_most=1)
    add("--max-new-tokens", type=count, default=256, metavar="N", help="stop after so many")
    add("--temperature", type=positive, metavar="T", help="sample at this temperature (1)")
    add("--top-k", type=count, metavar="K", help="sample among the K likeliest tokens")
    add("--top-p", type=share, metavar="P", help="sample among the likeliest that sum to P")
    add(
        "--repetition-penalty",
        type=positive,
        metavar="P",
        help="above 1: make what is there already less likely (generation_config.json's, or 1)",
    )
    add("--seed", type=number(int, at_least=0), metavar="N", help="makes sampling repeatable")
    add("--no-stream", action="store_true", help="print the text when it is finished")
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    loading_arguments(command)


def run(given: argparse.Namespace) -> None:
    """Print the continuation of a prompt, or hold a conversation."""
    from ligermodels.converters.hub import resolve
    from ligermodels.models.auto import AutoLiger
    from ligermodels.text.tokenizer import Tokenizer
    from ligermodels.training.finetune import pick_device

    if given.system is not None and not given.chat:
        raise LigerError("generate: --system needs --chat")
    conversation = given.chat and given.prompt is None and sys.stdin.isatty()
    prompt = given.prompt
    if not conversation and prompt in (None, "-"):
        prompt = sys.stdin.read().removesuffix("\n")
    device = pick_device(given.device)
    folder = resolve(given.model, revision=given.revision)
    tokenizer = Tokenizer.from_hf(folder)
    model = AutoLiger.from_hf(folder, device=device, **loading_options(given))
    if not given.chat:
        _continue(given, model, tokenizer, tokenizer.encode(prompt))
        return
    messages = [] if given.system is None else [{"role": "system", "content": given.system}]
    while True:
        if conversation:
            try:
                prompt = input("> ")
            except EOFError:
                print()
                return
        messages.append({"role": "user", "content": prompt})
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        except ValueError as error:
            raise LigerError(f"generate: {error}") from error
        answer = _continue(given, model, tokenizer, ids)
        if not conversation:
            return
        messages.append({"role": "assistant", "content": answer})


def _continue(
    given: argparse.Namespace, model: DecoderModel, tokenizer: Tokenizer, ids: list[int]
) -> str:
    """Print what follows `ids`, as it comes or at once; returns it."""
    import torch

    from ligermodels.generation.generate import stream_text

    sampling = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    generator = None
    if given.seed is not None:
        generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(given.seed)
    try:
        pieces = stream_text(
            model.eval(),
            tokenizer,
            ids,
            max_new_tokens=given.max_new_tokens,
            do_sample=bool(sampling) or generator is not None,
            repetition_penalty=given.repetition_penalty,
            generator=generator,
            **sampling,
        )
    except (ValueError, IndexError) as error:  # an empty prompt, or ids that the model lacks
        raise LigerError(f"generate: {error}") from error
    text = ""
    for piece in pieces:
        text += piece
        if not given.no_stream:
            print(piece, end="", flush=True)
    print(text if given.no_stream else "")
    return text
