"""The command line: `ligermodels COMMAND`, where COMMAND is one of `COMMANDS`.

Each command is a module with `Arguments` (a dataclass of its options) and `run`; its docstring is
its help, and the first line of that stands in `ligermodels --help`. A module may also define
OUT_OF_MEMORY, the advice that is printed with that error, and `parse_arguments`, its own way from
words to arguments. Ctrl-C ends the process at once, except in a command's
`with raise_on_interrupt():`. This module prints each error and each warning as one line on stderr.
The exit code is 0 on success, 1 if memory runs out or a comparison fails, and 130 after Ctrl-C. It
is 2 if the arguments or the input are wrong, or if a file cannot be read or written.
"""

from __future__ import annotations

from ligermodels.cli.interrupts import EXIT_CODE, quit_on_interrupt

with quit_on_interrupt():
    import os
    import sys
    import warnings
    from collections.abc import Sequence
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
        new_family,
    )
    from ligermodels.cli.options import complain, import_modules, parse
    from ligermodels.errors import LigerError, did_you_mean, first_line, short_repr

MODULES = (finetune, evaluate, generate, inspect, convert, families, check_family, new_family)
COMMANDS = {each.__name__.rpartition(".")[2].replace("_", "-"): each for each in MODULES}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with `argv` (default: `sys.argv[1:]`) and return the exit code."""
    with quit_on_interrupt():
        return _main([*(sys.argv[1:] if argv is None else argv)])


def _main(argv: list[str]) -> int:
    # The tokenizers library warns if a process forks after its threads ran. The user of a command
    # cannot act on that warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # With expandable segments, the GPU's memory does not run out because it lies in pieces.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            # If the terminal's encoding lacks a character, print a question mark and no traceback.
            output.reconfigure(errors="replace")
    module: ModuleType | None = None
    try:
        module = _module(argv)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(str(message))
            module.run(_parsed(module, argv))
        sys.stdout.flush()
    except SystemExit as stop:  # after --help, or after an error that was printed
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_CODE
    except BrokenPipeError:
        # The program that read our output has exited (`| head`). Redirect stdout, so that the
        # interpreter's last flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (LigerError, OSError, MemoryError, RuntimeError) as error:
        line, code = _described(error, module)
        if not getattr(error, "is_repeated", False):
            _say(line)
        return code
    return 0


def _module(argv: list[str]) -> ModuleType:
    """Return the module of the command that is asked for; show the help if that is asked for."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print("usage: ligermodels COMMAND [...]\n")
        print("Load, fine-tune, run and export Hugging Face checkpoints.\n")
        for command, module in COMMANDS.items():
            print(f"  {command:<13}{str(module.__doc__).splitlines()[0]}")
        print("\n'ligermodels COMMAND --help' shows the options of a command.")
        print("'ligermodels --version' shows the version.")
        raise SystemExit(0)
    if name == "--version":
        print(f"ligermodels {__version__}")
        raise SystemExit(0)
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        what = f"no command {short_repr(name)} (choose from {known})"
        complain("", what + did_you_mean(name, COMMANDS))
    return COMMANDS[name]


def _parsed(module: ModuleType, argv: list[str]) -> Any:
    """Return the arguments of a command, after it has imported the modules that they name."""
    command, *words = argv
    if hasattr(module, "parse_arguments"):
        return module.parse_arguments(words)
    kind = module.Arguments
    try:
        given = kind.taken(parse(command, {command: kind}, words, description=module.__doc__ or ""))
    except LigerError as error:
        complain(command, first_line(error))
    import_modules(given.modules)
    return given


def _described(error: BaseException, module: ModuleType | None) -> tuple[str, int]:
    """Return the line and the exit code of an error; raise it again if it is a mistake of ours."""
    line = first_line(error)
    if isinstance(error, LigerError):
        return line, 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or line}", 2
    signs = ("out of memory", "can't allocate memory")
    if not isinstance(error, MemoryError) and not any(x in str(error).lower() for x in signs):
        raise error
    reason = f": {line}" if str(error).strip() else ""
    return f"out of memory{reason}{getattr(module, 'OUT_OF_MEMORY', '')}", 1


def _say(text: str) -> None:
    print(f"ligermodels: {text}", file=sys.stderr)
