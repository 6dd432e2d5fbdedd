"""The command line: `ligermodels finetune | generate | inspect | convert | families`.

A thin layer: one module a command turns arguments into calls; this one turns errors and warnings
into one line each on stderr. Exit codes are 0, 2 for what a user did (and argparse's own
complaints), 1 for what the machine did, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ligermodels.cli import convert, families, finetune, generate, inspect
from ligermodels.cli.options import Formatter, Parser, Version
from ligermodels.errors import LigerError

COMMANDS = (finetune, generate, inspect, convert, families)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line on `argv` (default: the process's own); returns the exit code."""
    # Tokenizers' threads and a later fork do not mix; the warning about it is no user's business.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            # A terminal that cannot show a letter shows a question mark, not a traceback.
            output.reconfigure(errors="replace")
    arguments = argparse.Namespace()
    try:
        arguments = _parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            arguments.module.run(arguments)
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
        print(f"ligermodels: {in_flags(_first_line(error), arguments)}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"ligermodels: {where}{error.strerror or _first_line(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        hint = getattr(arguments.module, "OUT_OF_MEMORY", "")
        print(f"ligermodels: out of memory: {_first_line(error)}{hint}", file=sys.stderr)
        return 1
    return 0


def in_flags(message: str, arguments: argparse.Namespace) -> str:
    """The library's message with the command's options as they are typed.

    `allow_nonfinite=True lets them in` becomes `--allow-nonfinite lets them in`, and `seq_len: must
    be` becomes `--seq-len: must be`. Advice that this command has no option for is left out.
    """
    options = vars(arguments).keys() - {"module", *POSITIONAL}
    message = re.sub(
        r"; (\w+)=True [^;]*", lambda found: found[0] if found[1] in options else "", message
    )
    for name in options:
        flag = "--" + name.replace("_", "-")
        message = message.replace(f"{name}=True", flag)
        if message.startswith(f"{name}: "):
            message = flag + message.removeprefix(name)
    return message


POSITIONAL = ("model", "prompt", "source", "target", "family")


def _show_warning(message: Warning | str, *_: Any) -> None:
    """What is said, and not where in the code."""
    print(f"ligermodels: {message}", file=sys.stderr)


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
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, formatter_class=Formatter)
        command.set_defaults(module=module)
        module.arguments(command)
    return parser
