"""The command line: `ligermodels finetune | generate | inspect | convert`.

A thin layer: it turns arguments into calls and errors into one line on stderr. Exit codes are 0, 2
for what a user did (and argparse's own complaints), 1 for what the machine did, 130 for Ctrl-C.
Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ligermodels.arguments import (
    Formatter,
    Parser,
    Version,
    byte_size,
    real_number,
    whole_number,
)
from ligermodels.errors import ConfigError, LigerError

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line on `argv` (default: the process's own); returns the exit code."""
    # Tokenizers' threads and a later fork do not mix; the warning about it is no user's business.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            # A terminal that cannot show a letter shows a question mark, not a traceback.
            output.reconfigure(errors="replace")
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
        run: Callable[[argparse.Namespace], None] = arguments.run
        run(arguments)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: --help, or a complaint that it has printed
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("ligermodels: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); the interpreter's last flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except LigerError as error:
        print(f"ligermodels: {_first_line(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"ligermodels: {where}{error.strerror or _first_line(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print(
            f"ligermodels: out of memory: {_first_line(error)} (finetune: try a smaller "
            "--batch-size with more --grad-accumulation, --activation-checkpointing, or a shorter "
            "--seq-len)",
            file=sys.stderr,
        )
        return 1
    return 0


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    signs = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(sign in text for sign in signs)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ligermodels",
        description="Load, fine-tune, run and export Hugging Face checkpoints.",
        epilog="'ligermodels COMMAND --help' shows the options of a command.",
        formatter_class=Formatter,
    )
    parser.add_argument(
        "--version",
        action=Version,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show the version and exit",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, help, build in (
        ("finetune", "fine-tune a checkpoint on text or JSONL files", _finetune_arguments),
        ("generate", "continue a prompt, or chat", _generate_arguments),
        ("inspect", "show what a checkpoint is, without loading it", _inspect_arguments),
        ("convert", "write a checkpoint anew, or verify its round trip", _convert_arguments),
    ):
        command = commands.add_parser(name, help=help, formatter_class=Formatter, description=None)
        build(command)
    return parser


# finetune ---------------------------------------------------------------------------------------

FINETUNE_GROUPS = {
    "data": "train eval eval_fraction max_eval_rows separator seq_len",
    "schedule": "epochs steps batch_size grad_accumulation eval_every",
    "optimizer": "learning_rate min_lr_ratio warmup_steps weight_decay beta1 beta2 adam_eps "
    "max_grad_norm seed",
    "machine": "device precision activation_checkpointing compile",
    "run": "output resume overwrite save_every keep_checkpoints log_every export_dtype "
    "max_shard_size",
    "hub": "revision",
}

METAVARS = {
    "output": "OUTPUT",
    "separator": "LINE",
    "device": "DEVICE",
    "revision": "REVISION",
    "max_shard_size": "SIZE",
}


def _finetune_arguments(command: argparse.ArgumentParser) -> None:
    from dataclasses import MISSING, fields

    from ligermodels.finetune import FinetuneConfig

    command.description = (
        "Fine-tune MODEL on text and export it. Files are plain text, or .jsonl with an object per "
        'line: {"text"}, {"prompt", "completion"} (only the completion is learnt) or {"messages"} '
        "(only the assistant's turns). Documents are packed into rows; neither attention nor loss "
        "crosses from one to the next. Perplexity on held-out documents is measured before, during "
        "and after."
    )
    command.epilog = (
        "OUTPUT holds model/ (the export), metrics.jsonl, loss.png and checkpoints/. After an "
        "interruption, 'ligermodels finetune --resume --output OUTPUT' goes on where it stopped, "
        "with the options of the run."
    )
    command.usage = (
        "%(prog)s MODEL --train FILE... --output OUTPUT [OPTION...]\n"
        "       %(prog)s --resume --output OUTPUT"
    )
    known = {each.name: each for each in fields(FinetuneConfig)}
    command.add_argument("model", nargs="?", metavar="MODEL", help=known["model"].metadata["help"])
    groups = {title: command.add_argument_group(title) for title in FINETUNE_GROUPS}
    for title, names in FINETUNE_GROUPS.items():
        for name in names.split():
            each = known[name]
            help = each.metadata["help"]
            kind = str(each.type)
            options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
            default = None if each.default is MISSING else each.default
            # Each option is left out of the result unless given: what a resumed run was started
            # with, and else the config's own default, fills the gaps.
            if kind == "bool":
                options["action"] = "store_true"
            else:
                if default is not None:
                    shown = "5GB" if name == "max_shard_size" else default
                    help = f"{help} (default: {shown})"
                if "choices" in each.metadata:
                    options["choices"] = each.metadata["choices"]
                elif name == "max_shard_size":
                    options["type"] = byte_size
                elif "int" in kind or "float" in kind:
                    options["type"] = float if "float" in kind else int
                if "list" in kind:
                    options["nargs"] = "+"
                    options["metavar"] = "FILE"
                elif "choices" not in options:
                    options["metavar"] = METAVARS.get(name, "X" if "float" in kind else "N")
            options["help"] = help
            groups[title].add_argument("--" + name.replace("_", "-"), **options)
    command.add_argument("--quiet", action="store_true", help="no progress bar and no notes")
    command.set_defaults(run=_finetune)


def _finetune(arguments: argparse.Namespace) -> None:
    from ligermodels.finetune import FinetuneConfig, finetune, resumed_settings

    given = {k: v for k, v in vars(arguments).items() if k not in ("run", "quiet")}
    if given["model"] is None:
        del given["model"]
    if "output" not in given:
        raise LigerError("finetune: --output is missing")
    if given.get("resume"):
        settings = resumed_settings(given["output"])
        if not settings and "model" not in given:
            raise LigerError(f"{given['output']}: holds no run to resume")
        given = {**settings, **given}
    for name, shown in (("model", "MODEL"), ("train", "--train")):
        if name not in given:
            raise LigerError(f"finetune: {shown} is missing")
    try:
        config = FinetuneConfig(**given)
    except ConfigError as error:
        name, _, rest = str(error).partition(":")
        option = "--" + name.replace("_", "-") if name in given else name
        raise ConfigError(f"finetune: {option}:{rest}") from None
    try:
        result = finetune(config, progress=not arguments.quiet)
    except KeyboardInterrupt:
        print(
            f"ligermodels: interrupted; 'ligermodels finetune --resume --output {given['output']}' "
            "goes on from the last checkpoint",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    if result.perplexity_before is not None and result.perplexity_after is not None:
        print(
            f"held-out perplexity {result.perplexity_before:.3f} -> {result.perplexity_after:.3f} "
            f"in {result.steps} steps"
        )
    else:
        print(f"training loss {result.loss:.4f} after {result.steps} steps")
    print(f"exported to {result.model_folder}")


# generate ---------------------------------------------------------------------------------------


def _loading_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--revision", help="branch, tag or commit of a hub checkpoint")
    command.add_argument("--dtype", choices=DTYPES, help="(default: the checkpoint's)")


def _generate_arguments(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Continue PROMPT, greedily unless a sampling option is given. Without PROMPT it is read "
        "from stdin; with --chat on a terminal that is a conversation, one line a turn."
    )
    add = command.add_argument
    add("model", metavar="MODEL", help="hub id or folder of a checkpoint")
    add("prompt", metavar="PROMPT", nargs="?", help="the text to continue; - reads stdin")
    add("--chat", action="store_true", help="put the prompt through the chat template")
    add("--system", metavar="TEXT", help="a system message, with --chat")
    add(
        "--max-new-tokens",
        type=whole_number(1),
        default=256,
        metavar="N",
        help="stop after so many",
    )
    add("--temperature", type=real_number(0), metavar="T", help="sample at this temperature (1)")
    add("--top-k", type=whole_number(1), metavar="K", help="sample among the K likeliest tokens")
    add(
        "--top-p",
        type=real_number(0, 1),
        metavar="P",
        help="sample among the likeliest that sum to P",
    )
    add("--seed", type=whole_number(0), metavar="N", help="makes sampling repeatable")
    add("--no-stream", action="store_true", help="print the text when it is finished")
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    _loading_arguments(command)
    command.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    from ligermodels.auto import AutoLiger
    from ligermodels.converters.hub import resolve
    from ligermodels.finetune import pick_device
    from ligermodels.tokenizers import Tokenizer

    if arguments.system is not None and not arguments.chat:
        raise LigerError("generate: --system needs --chat")
    conversation = arguments.chat and arguments.prompt is None and sys.stdin.isatty()
    prompt = arguments.prompt
    if not conversation and prompt in (None, "-"):
        prompt = sys.stdin.read().removesuffix("\n")
    device = pick_device(arguments.device)
    folder = resolve(arguments.model, revision=arguments.revision)
    tokenizer = Tokenizer.from_hf(folder)
    model = AutoLiger.from_hf(folder, dtype=_dtype(arguments.dtype), device=device)
    if not arguments.chat:
        _continue(arguments, model, tokenizer, tokenizer.encode(prompt))
        return
    messages = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
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
        answer = _continue(arguments, model, tokenizer, ids)
        if not conversation:
            return
        messages.append({"role": "assistant", "content": answer})


def _continue(arguments: argparse.Namespace, model: Any, tokenizer: Any, ids: list[int]) -> str:
    """Print what follows `ids`, as it comes or at once; returns it."""
    import warnings

    import torch

    from ligermodels.generation import stream_text

    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    generator = None
    if arguments.seed is not None:
        generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(arguments.seed)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pieces = stream_text(
                model.eval(),
                tokenizer,
                ids,
                max_new_tokens=arguments.max_new_tokens,
                do_sample=bool(sampling) or generator is not None,
                generator=generator,
                **sampling,
            )
    except (ValueError, IndexError) as error:  # an empty prompt, or ids that the model lacks
        raise LigerError(f"generate: {_first_line(error)}") from error
    for warning in caught:
        print(f"ligermodels: {warning.message}", file=sys.stderr)
    text = ""
    for piece in pieces:
        text += piece
        if not arguments.no_stream:
            print(piece, end="", flush=True)
    print(text if arguments.no_stream else "")
    return text


# inspect ----------------------------------------------------------------------------------------


def _inspect_arguments(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Show a checkpoint's family, config, parameters and memory after the checks of a load: "
        "headers are read, tensors are not. A hub checkpoint is downloaded."
    )
    command.add_argument("model", metavar="MODEL", help="hub id or folder of a checkpoint")
    command.add_argument("--revision", help="branch, tag or commit of a hub checkpoint")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from ligermodels.auto import family_of
    from ligermodels.converters.hub import resolve
    from ligermodels.converters.inspect import describe

    folder = resolve(arguments.model, revision=arguments.revision)
    found = asdict(describe(folder, family_of(folder).config_class))
    if arguments.json:
        print(json.dumps(found, indent=2, default=str))
        return
    print(f"{found['folder']}: {found['family']}, {found['parameters']:,} parameters")
    for title, entries, show in (
        ("config", found["config"], json.dumps),
        ("config keys that nothing reads (kept in an export)", found["unknown_keys"], json.dumps),
        ("stored as", found["dtype_bytes"], _bytes),
        ("files", found["files"], _bytes),
        ("memory", found["memory"], _bytes),
    ):
        if entries:
            print(f"\n{title}")
            width = max(map(len, entries))
            for name, value in entries.items():
                print(f"  {name:<{width}}  {show(value)}")


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} bytes"


# convert ----------------------------------------------------------------------------------------


def _convert_arguments(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Load the checkpoint SOURCE and write it to the folder TARGET, in another dtype or other "
        "shards if asked. With --verify every tensor is compared bit for bit: TARGET's with "
        "SOURCE's, or without TARGET, those of a copy that went into the native layout and back. "
        "A difference gives exit code 1."
    )
    add = command.add_argument
    add("source", metavar="SOURCE", help="hub id or folder of a checkpoint")
    add("target", metavar="TARGET", nargs="?", help="the folder to write")
    add("--verify", action="store_true", help="compare every tensor, config key and file")
    add(
        "--max-shard-size",
        type=byte_size,
        default="5GB",
        metavar="SIZE",
        help="most bytes in a file",
    )
    add("--overwrite", action="store_true", help="replace the checkpoint that TARGET holds")
    _loading_arguments(command)
    command.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from ligermodels.auto import AutoLiger, family_of
    from ligermodels.converters.hub import resolve

    if arguments.target is None and not arguments.verify:
        raise LigerError("convert: give TARGET, --verify, or both")
    if arguments.target is None and arguments.dtype:
        raise LigerError("convert: --dtype needs TARGET")
    if arguments.target is not None:
        held = Path(arguments.target) / "config.json"
        if held.exists() and not arguments.overwrite:
            raise LigerError(f"{arguments.target}: holds a checkpoint; replace it with --overwrite")
    source = resolve(arguments.source, revision=arguments.revision)
    config_class = family_of(source).config_class
    if arguments.target is None:
        from ligermodels.converters.verify import verify

        report = verify(source, config_class, max_shard_size=arguments.max_shard_size)
        print(report)
        if not report.ok:
            raise SystemExit(1)
        return
    target = Path(arguments.target)
    if arguments.verify and target.exists() and target.samefile(source):
        raise LigerError("convert: --verify cannot compare a checkpoint with what replaces it")
    model = AutoLiger.from_hf(source, dtype=_dtype(arguments.dtype))
    model.save_hf(target, max_shard_size=arguments.max_shard_size)
    print(f"written to {target}")
    if arguments.verify:
        _compare(source, target, config_class)


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


def _compare(source: Any, target: Any, config_class: Any) -> None:
    """Every tensor of an export against its source, cast where the dtype was changed."""
    from ligermodels.converters.config import fields_from_hf, read_config
    from ligermodels.converters.reader import Checkpoint, same_bits
    from ligermodels.converters.table import table_for

    config = config_class(**fields_from_hf(read_config(source), config_class, str(source)))
    names = list(table_for(config).source_shapes())
    before, after = Checkpoint(source), Checkpoint(target)
    wrong = []
    for name in names:
        found = after.tensor(name)
        if not same_bits(before.tensor(name).to(found.dtype), found):
            wrong.append(name)
    if wrong:
        print(f"{len(wrong)} of {len(names)} tensors differ, the first is {wrong[0]}")
        raise SystemExit(1)
    print(f"bitwise equal: {len(names)} tensors")


if __name__ == "__main__":
    sys.exit(main())
