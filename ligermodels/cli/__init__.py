"""The command line: `ligermodels COMMAND`, where COMMAND is one of `COMMANDS`.

Each command is a module with HELP (its line in `ligermodels --help`), `add_arguments` and `run`.
A module may also define OUT_OF_MEMORY, the advice that is printed with that error, and OTHER_NAMES,
what other programs call its options. Ctrl-C ends the process at once, except in a command's
`with raise_on_interrupt():`. This module prints each error and each warning as one line on stderr.
The exit code is 0 on success, 1 if memory runs out or a comparison fails, and 130 after Ctrl-C. It
is 2 if the arguments or the input are wrong, or if a file cannot be read or written.
"""

from __future__ import annotations

from ligermodels.cli.interrupts import EXIT_CODE, quit_on_interrupt

with quit_on_interrupt():
    import argparse
    import os
    import sys
    import warnings
    from collections.abc import Sequence
    from importlib import import_module
    from types import ModuleType
    from typing import Any

    from ligermodels import __version__
    from ligermodels.cli import (
        check_family,
        convert,
        evaluate,
        families,
        finetune,
        generate,
        inspect,
    )
    from ligermodels.cli.launch import report_error
    from ligermodels.cli.options import Formatter, Parser, import_argument, import_modules
    from ligermodels.errors import LigerError, did_you_mean, first_line, printable

COMMANDS = (finetune, evaluate, generate, inspect, convert, families, check_family)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with `argv` (default: `sys.argv[1:]`) and return the exit code."""
    with quit_on_interrupt():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    # The tokenizers library warns if a process forks after its threads ran. The user of a command
    # cannot act on that warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # With expandable segments, the GPU's memory does not run out because it lies in pieces.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torch's profiler (--profile) writes its own lines on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            # If the terminal's encoding lacks a character, print a question mark and no traceback.
            output.reconfigure(errors="replace")
    given = argparse.Namespace(module=None)
    try:
        given = _parse(argv)
        import_module("ligermodels.training.finetune")  # It imports most of what is slow.
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            import_modules(given.modules)
            given.module.run(given)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse exits after --help or an error that it has printed
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_CODE
    except BrokenPipeError:
        # The program that read our output has exited (`| head`). Redirect stdout, so that the
        # interpreter's last flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except LigerError as error:
        if not error.is_repeated and not report_error(first_line(error), 2):
            _say(first_line(error))
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror or first_line(error)}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = f": {first_line(error)}" if str(error).strip() else ""
        text = f"out of memory{reason}{getattr(given.module, 'OUT_OF_MEMORY', '')}"
        if not report_error(text, 1):
            _say(text)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; print a mistake as one line and exit."""
    parser = Parser(
        prog="ligermodels",
        description="Load, fine-tune, run and export Hugging Face checkpoints.",
        epilog="'ligermodels COMMAND --help' shows the options of a command.",
        formatter_class=Formatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"ligermodels {__version__}",
        help="show the version and exit",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    commands = {}
    for module in COMMANDS:
        command = subparsers.add_parser(_name(module), help=module.HELP, formatter_class=Formatter)
        command.set_defaults(module=module)
        module.add_arguments(command)
        import_argument(command)
        commands[module] = command
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        # argparse itself would report these arguments without the name of the command.
        command = commands[given.module]
        word = unknown[0].partition("=")[0] or " "
        others = getattr(given.module, "OTHER_NAMES", None)
        known = command._option_string_actions
        hint = did_you_mean(word, known, others) if word[0] == "-" else ""
        command.error(f"unrecognized arguments: {' '.join(map(printable, unknown))}{hint}")
    given.argv = [*(sys.argv[1:] if argv is None else argv)]
    return given


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2].replace("_", "-")


def _say(text: str) -> None:
    print(f"ligermodels: {text}", file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any) -> None:
    """Print a warning's message without its place in the code."""
    _say(str(message))


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    signs = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(sign in text for sign in signs)
