"""Generate text from a prompt or from many, or chat.

Generate text that continues PROMPT. Decoding is greedy unless a sampling option (--temperature,
--top-k, --top-p or --seed) is given, and with --temperature 0. Without PROMPT, the text is read
from stdin; on a terminal, --chat then holds a conversation, with one line per turn. With --input
and --output, the prompts of a file are answered, many at a time; after a stop, the same command
goes on.
"""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.cli.interrupts import raise_on_interrupt
from ligermodels.cli.options import LoadingOptions
from ligermodels.errors import LigerError, counted
from ligermodels.training.options import option

if TYPE_CHECKING:
    from ligermodels.heads.medusa import MedusaHeads
    from ligermodels.models.base import DecoderModel
    from ligermodels.text.tokenizer import Tokenizer
    from ligermodels.training.data import Group

WAY_OUT = "Ctrl-D ends the chat, and Ctrl-C stops an answer."
OUT_OF_MEMORY = " (try a smaller --max-new-tokens, or --dtype bfloat16)"


@dataclass(kw_only=True)
class Arguments(LoadingOptions):
    """The options of `generate`.

    Attributes:
        model: hub id or local folder of a checkpoint
        prompt: the text to continue; - reads it from stdin
        input: a .jsonl file whose objects have a prompt: a text, or a list of messages
        output: the file for the objects of --input with what is generated for each
        max_batch: the most rows of a batch for --input (default: what fits into memory)
        num_samples: how many texts each prompt of --input gets
        chat: format the prompt with the chat template
        system: the system message for --chat
        max_new_tokens: the most tokens to generate
        temperature: sample at this temperature (default: 1); 0 is greedy
        top_k: sample from so many most likely tokens
        top_p: sample from the most likely tokens whose probabilities sum to this
        repetition_penalty: a value above 1 makes tokens that occurred before less likely (default:
            that of generation_config.json, else 1)
        seed: sample; the same seed gives the same text
        stop: texts before which the new text ends
        device: cpu or cuda (default: cuda if there is a GPU)
    """

    model: str = option(MISSING, positional=True)
    prompt: str | None = option(None, positional=True)
    input: str | None = option(None, metavar="FILE", needs="output")
    output: str | None = option(None, metavar="FILE", needs="input")
    max_batch: int | None = option(None, at_least=1, needs="input")
    num_samples: int = option(1, at_least=1, needs="input")
    chat: bool = option(False)
    system: str | None = option(None, metavar="TEXT", needs="chat")
    max_new_tokens: int = option(256, at_least=1)
    temperature: float | None = option(None, at_least=0)
    top_k: int | None = option(None, at_least=1)
    top_p: float | None = option(None, more_than=0, at_most=1)
    repetition_penalty: float | None = option(None, more_than=0)
    seed: int | None = option(None, at_least=0)
    stop: list[str] = option((), metavar="TEXT")
    device: str | None = option(None)


def run(given: Arguments) -> None:
    """Print the continuation of a prompt, or hold a conversation."""
    from ligermodels.converters.hub import resolve
    from ligermodels.converters.save_dir import read_one_version
    from ligermodels.generation.generate import stream_text
    from ligermodels.heads.medusa_file import load_heads
    from ligermodels.models.auto import AutoLiger, tokenizer_folder
    from ligermodels.text.tokenizer import Tokenizer
    from ligermodels.training.data import local_files, read_prompts
    from ligermodels.training.finetune import pick_device
    from ligermodels.training.run_dir import writing

    if given.input is not None and given.prompt is not None:
        raise LigerError("generate: give --input or PROMPT")
    converses = given.chat and given.prompt is None and sys.stdin.isatty()
    prompt = given.prompt or ""
    if given.input is None and not converses and given.prompt in (None, "-"):
        prompt = sys.stdin.read().removesuffix("\n")
    files = local_files([given.input] if given.input else [])
    device = pick_device(given.device)
    folder = resolve(given.model, revision=given.revision)
    tokenizer = Tokenizer.from_hf(tokenizer_folder(folder))
    system = [] if given.system is None else [{"role": "system", "content": given.system}]
    if files:
        groups = read_prompts(files, tokenizer, system if given.chat else None)
        assert given.output is not None and given.input is not None
        output = Path(given.output)
        if output.exists() and output.samefile(given.input):
            raise LigerError(f"generate: --output {output} is the file of --input; give another")
        if output.exists() and not (output.is_file() or output.is_dir()):
            raise LigerError(f"generate: --output {output} is a pipe or a device; give a file")
        with ExitStack() as opened:
            with writing(output):
                lock = opened.enter_context(open(output, "ab"))
                # The process holds this lock, so a killed one leaves no lock behind.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _answer_file(given, output, groups, folder, device, tokenizer)
        return
    if not given.chat and not (ids := tokenizer.encode(prompt)):
        raise LigerError("generate: PROMPT is empty; give a text to continue")

    def load(real: Path) -> tuple[DecoderModel, MedusaHeads | None]:
        model = AutoLiger.from_hf(real, device=device, **given.loading())
        return model, load_heads(model, real)

    model, heads = read_one_version(folder, load)
    model.eval()
    options = generate_options(given, model, heads)

    def print_text(ids: list[int], pieces: list[str]) -> None:
        """Generate what follows `ids` into `pieces`, and print each of them."""
        try:
            stream = stream_text(model, tokenizer, ids, **options)
        except (ValueError, IndexError) as error:  # the prompt is empty, or the model lacks an id
            raise LigerError(f"generate: {error}") from error
        for piece in stream:
            pieces.append(piece)
            print(piece, end="", flush=True)
        print()

    if converses:
        with raise_on_interrupt():  # Ctrl-C ends an answer, not the conversation.
            _converse(print_text, tokenizer, system)
        return
    if given.chat:
        ids = _chat_ids(tokenizer, [*system, {"role": "user", "content": prompt}])
    print_text(ids, [])


def generate_options(
    given: Arguments, model: DecoderModel, heads: MedusaHeads | None, answered: int = 0
) -> dict[str, Any]:
    """Return what the sampling options mean for the functions of `ligermodels.generation`.

    Args: answered: how many prompts are answered. Their number changes the draws, because the seed
        alone would repeat those of the first prompts.
    """
    import torch

    asked = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p")}
    asked = {name: value for name, value in asked.items() if value is not None}
    if given.seed is not None:
        device = model.embed_tokens.weight.device
        asked["generator"] = torch.Generator(device).manual_seed(given.seed + answered)
    samples = bool(asked) and given.temperature != 0
    return {
        **({"do_sample": True, **asked} if samples else {}),
        **({} if heads is None else {"heads": heads}),
        "max_new_tokens": given.max_new_tokens,
        "repetition_penalty": given.repetition_penalty,
        "stop_strings": given.stop,
    }


def _answer_file(
    given: Arguments,
    output: Path,
    groups: list[Group],
    folder: Path,
    device: Any,
    tokenizer: Tokenizer,
) -> None:
    """Answer the prompts of a file that have no answer yet."""
    from ligermodels.models.auto import AutoLiger
    from ligermodels.training.evaluate import answers, count_answered, write_answers

    done = count_answered(output, groups)
    if not (left := groups[done:]):
        return
    model = AutoLiger.from_hf(folder, device=device, **given.loading()).eval()
    options = generate_options(given, model, None, done)
    options |= {"max_batch": given.max_batch, "num_samples": given.num_samples}
    found = answers(model, tokenizer, left, progress=sys.stderr.isatty(), **options)
    tokens = cut = 0
    started = time.perf_counter()
    for answer in write_answers(output, left, found):
        tokens, cut = tokens + answer.tokens, cut + answer.cut
    seconds = time.perf_counter() - started
    print(
        f"{counted(len(left), 'prompt')}, {counted(tokens, 'token')}, "
        f"{tokens / seconds:,.0f} a second; {cut:,} texts reached --max-new-tokens"
    )


def _converse(
    print_text: Callable[[list[int], list[str]], None],
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
) -> None:
    """Answer each line of the user until the input ends."""
    print(WAY_OUT, file=sys.stderr)
    while True:
        try:
            if not (prompt := input("> ")).strip():
                continue
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{WAY_OUT}", file=sys.stderr)
            continue
        question = {"role": "user", "content": prompt}
        pieces: list[str] = []
        try:
            print_text(_chat_ids(tokenizer, [*messages, question]), pieces)
        except KeyboardInterrupt:
            print()
        if pieces:  # An answer that was stopped before it began leaves no trace.
            messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def _chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except ValueError as error:
        raise LigerError(f"generate: {error}") from error
