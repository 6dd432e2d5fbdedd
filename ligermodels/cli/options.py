"""Code that the commands share: the format of help and errors, argument types, loading options."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ligermodels.converters.dtypes import dtype_name
from ligermodels.converters.files import open_regular
from ligermodels.errors import ConfigError, LigerError, did_you_mean, first_line, short_repr
from ligermodels.memory.byte_sizes import parse_bytes
from ligermodels.training.config import EXPORT_DTYPES
from ligermodels.training.options import limit_complaint


class Formatter(argparse.HelpFormatter):
    """Format options on one line, each with its default if it has one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        # 0 is a default, although it equals False.
        none = action.default is False or action.default in (None, [], argparse.SUPPRESS)
        return text if none or not action.option_strings else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """An argparse parser that prints an error as one line, with a suggestion if a word is wrong.

    Options are written whole: what begins only one option today may begin two tomorrow, and `--lr`
    would be the beginning of `--lr-scheduler-type`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            raise argparse.ArgumentError(
                action,
                f"invalid choice: {short_repr(value)} (choose from {', '.join(map(repr, known))})"
                f"{did_you_mean(str(value), known)}",
            )

    def error(self, message: str) -> NoReturn:
        stop = "" if message.endswith("?") else ";"
        self.exit(2, f"{self.prog}: {message}{stop} see '{self.prog} --help'\n")


def loading_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options that several commands have for loading a checkpoint."""
    add = command.add_argument
    add("--revision", help="branch, tag or commit of a hub checkpoint")
    dtype = "dtype of the weights (default: as stored)"
    add("--dtype", type=dtype_name, choices=EXPORT_DTYPES, help=dtype)
    add("--allow-nonfinite", action="store_true", help="accept NaN and infinite weights")


def loading_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `from_hf` that these options set, except the revision."""
    import torch

    dtype = None if given.dtype is None else getattr(torch, given.dtype)
    return {"dtype": dtype, "allow_nonfinite": given.allow_nonfinite}


def import_argument(command: argparse.ArgumentParser) -> None:
    """Add the option for families from outside of the package, which every command has."""
    command.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        help="import a module, or a .py file, that registers model families; may be repeated",
    )


def import_modules(names: list[str] | None) -> None:
    """Import modules by name, from the current folder too, or .py files by path.

    Raises:
        LigerError: there is no such module, or it raised an error or exits.
    """
    for name in names or ():
        try:
            if name.endswith(".py"):
                _import_file(name)
            elif all(part.isidentifier() for part in name.split(".")):
                sys.path.append(os.getcwd())
                importlib.import_module(name)
            else:
                raise LigerError("expected the name of a module, or the path of a .py file")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, which would end the command in silence
            kind = "" if isinstance(error, LigerError) else f"{type(error).__name__}: "
            raise LigerError(f"--import {name}: {kind}{first_line(error)}") from error


_imported_files: set[str] = set()


def _import_file(path: str) -> None:
    """Import a file under its own name, even if an installed module has the same name."""
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules and name not in _imported_files:
        raise LigerError(f"a module named {name!r} is imported already; rename the file")
    open_regular(Path(path), LigerError).close()  # Python would wait for the writer of a pipe.
    sys.path.append(os.path.dirname(os.path.abspath(path)))  # for the modules beside it
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _imported_files.add(name)


def byte_size(text: str) -> int:
    """Return the number of bytes in a size such as "5GB", "512MiB" or "1000"."""
    try:
        found = parse_bytes(text, "size")
    except ConfigError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(
            f"not a size: {short_repr(text)}; write 5GB, 512MiB or a number of bytes"
        )
    return found


def number(kind: type, **limits: float) -> Callable[[str], float]:
    """Return an argparse type: a number of `kind` (int or float) within `limits`.

    `training.options.limit_complaint` defines the limits.
    """

    def convert(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"invalid {kind.__name__} value: {short_repr(text)}"
            ) from None
        complaint = limit_complaint(value, **limits)
        if complaint is not None:
            raise argparse.ArgumentTypeError(complaint)
        return value

    return convert
