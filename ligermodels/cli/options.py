"""The command line's way with arguments: help, complaints, kinds of values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Formatter(argparse.HelpFormatter):
    """Options on one line, defaults shown where there is one."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.default not in (None, False, argparse.SUPPRESS) and action.option_strings
        return f"{text} (default: %(default)s)" if shown else text


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaint is one line."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}\n")


class Version(argparse.Action):
    """`--version`, looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("ligermodels")
        except PackageNotFoundError:
            found = "(not installed)"
        print(f"ligermodels {found}")
        parser.exit()


def loading_arguments(command: argparse.ArgumentParser) -> None:
    """The options with which any command loads a checkpoint."""
    add = command.add_argument
    add("--revision", help="branch, tag or commit of a hub checkpoint")
    add("--dtype", choices=DTYPES, help="(default: the checkpoint's)")
    add("--allow-nonfinite", action="store_true", help="let NaN and infinite weights in")


def loading_options(given: argparse.Namespace) -> dict[str, Any]:
    """What `from_hf` is told by them, the revision aside."""
    import torch

    dtype = None if given.dtype is None else getattr(torch, given.dtype)
    return {"dtype": dtype, "allow_nonfinite": given.allow_nonfinite}


def byte_size(text: str) -> int:
    """Bytes from "5GB", "512MiB" or a plain number."""
    number, unit = text.strip().upper(), 1
    for name, factor in UNITS.items():
        if number.endswith(name):
            number, unit = number[: -len(name)], factor
            break
    try:
        found = int(float(number) * unit)
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; write 5GB, 512MiB or bytes")
    return found


def whole_number(least: int) -> Callable[[str], int]:
    """A kind of argument: an integer from `least` on."""

    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    convert.__name__ = "int"  # argparse says "invalid int value" with it
    return convert


def real_number(above: float, most: float = math.inf) -> Callable[[str], float]:
    """A kind of argument: a finite number more than `above` and at most `most`."""

    def convert(text: str) -> float:
        value = float(text)
        if not above < value <= most or math.isinf(value):
            limit = "" if math.isinf(most) else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"must be more than {above:g}{limit}, not {text}")
        return value

    convert.__name__ = "float"
    return convert
