"""Parts that the commands share: options from dataclasses, by the library tyro, and loading.

An option is a field of a dataclass of `ligermodels.training.options`, which has its help, type and
limits. tyro finds the words of each option and shows the help; the option checks their value. A
mistake is one line on stderr.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypedDict, get_args, get_origin

from typing_extensions import Required

from ligermodels.errors import LigerError, did_you_mean, first_line, printable
from ligermodels.training.config import EXPORT_DTYPES
from ligermodels.training.options import (
    OTHER_NAMES,
    Options,
    flat_name,
    helps,
    option,
    typed,
    types_of,
)


@dataclass(kw_only=True)
class CommonOptions(Options):
    """The option that every command has.

    Attributes:
        modules: import a module, or a .py file, that registers model families or losses (several:
            --import A --import B)
    """

    modules: list[str] | None = option(None, flag="import", metavar="MODULE", repeats=True)


@dataclass(kw_only=True)
class LoadingOptions(CommonOptions):
    """How a checkpoint is loaded.

    Attributes:
        revision: branch, tag or commit of a hub checkpoint
        dtype: dtype of the weights (default: as stored)
        allow_nonfinite: accept NaN and infinite weights
    """

    revision: str | None = option(None)
    dtype: str | None = option(None, choices=EXPORT_DTYPES)
    allow_nonfinite: bool = option(False)

    def loading(self) -> dict[str, Any]:
        """Return the arguments of `from_hf` that these options set, except the revision."""
        import torch

        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        return {"dtype": dtype, "allow_nonfinite": self.allow_nonfinite}


def parse(
    command: str,
    subjects: Mapping[str, type[Options]],
    argv: Sequence[str],
    *,
    description: str = "",
    owners: Mapping[str, str] | None = None,
    is_whole: bool = True,
) -> dict[str, Any]:
    """Return the values of the options that words give, each by its own name.

    Args:
        subjects: the groups of options, by the title of each.
        description: a docstring, of which the help shows what follows the first line.
        owners: what is said of options that belong elsewhere, by their names.
        is_whole: whether these are all options that the words may give, so that others are
            mistakes, and --help is answered.
    Raises:
        SystemExit: after --help, or after a mistake that was printed as one line.
    """
    import tyro

    known = {flat_name(each): each for kind in subjects.values() for each in fields(kind)}
    types = {name: kind for part in subjects.values() for name, kind in types_of(part).items()}
    for word, after in zip(argv, [*argv[1:], "--"]):  # of which tyro says more than a line
        name = word.removeprefix("--").replace("-", "_")
        if word.startswith("--") and after.startswith("--") and types.get(name, bool) is not bool:
            way = f"one that begins with -- is given as {word}=VALUE"
            complain(command, f"{word}: its value is missing; {way}")
    typed_dict: Any = TypedDict  # What is not given is not in the result.
    groups = {}
    for subject, kind in subjects.items():
        texts = helps(kind)
        options = {flat_name(each): _described(each, types, texts) for each in fields(kind)}
        groups[subject] = typed_dict(subject, options, total=False)
    # tyro keeps the end of a line before one that is indented.
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(width, initial_indent=" ", subsequent_indent=" ")
    given, more = tyro.cli(
        typed_dict("arguments", groups),
        prog=f"ligermodels {command}",
        description=wrapper.fill(description.partition("\n\n")[2]),
        args=list(argv),
        config=(tyro.conf.OmitArgPrefixes,),
        return_unknown_args=True,
        add_help=is_whole,
    )
    if is_whole and more:
        name = next((word for word in more if word.startswith("--")), more[0]).partition("=")[0]
        hint = did_you_mean(name, [f"--{x.replace('_', '-')}" for x in known], OTHER_NAMES)
        for without in (x for x, each in known.items() if each.metadata["positional"]):
            usage = f"{without.upper()} is given without {printable(name)}"
            hint = hint.replace(f"did you mean '--{without}'?", usage)
        said = f"unrecognized arguments: {printable(name)}{hint}"
        complain(command, (owners or {}).get(name[2:].replace("-", "_"), said))
    found = {k: typed(types[k], v) for group in given.values() for k, v in group.items()}
    for name, each in known.items():
        if is_whole and each.default is MISSING and name not in found:
            complain(command, f"{name.upper()} is missing")
    return found


def _described(each: Field[Any], types: Mapping[str, Any], helps: Mapping[str, str]) -> Any:
    """Return the type of an option for tyro, with what its help shows.

    tyro takes every value as a text: what is a mistake in it, the option says.
    """
    import tyro

    facts, name = each.metadata, flat_name(each)
    kind, text = types[name], helps[name]
    is_list = get_origin(kind) is list
    usual = {int: "N", float: "X"}.get(get_args(kind)[0] if is_list else kind, name.upper())
    metavar = "SIZE" if facts["is_size"] else facts["metavar"] or usual
    if facts["choices"] is not None:
        metavar = "{" + ",".join(facts["choices"]) + "}"
    hides = each.default in (None, MISSING, ()) or kind is bool or "(default:" in text
    argument = tyro.conf.arg(
        name=name.replace("_", "-"),
        help=text,
        metavar=None if kind is bool else metavar + " ..." * (is_list and not facts["repeats"]),
        help_behavior_hint="" if hides else f"(default: {each.default})",
    )
    annotated: Any = Annotated[bool if kind is bool else list[str] if is_list else str, argument]
    if facts["positional"]:
        annotated = tyro.conf.Positional[annotated]  # type: ignore[misc]
    if facts["repeats"]:
        # tyro (1.0) cannot append to a key that may be missing, so this one is always there.
        annotated = Required[tyro.conf.UseAppendAction[annotated]]  # type: ignore[misc]
    return annotated


def complain(command: str, message: str) -> NoReturn:
    """Print a mistake in the arguments as one line, and exit with 2."""
    prog = f"ligermodels {command}".rstrip()
    stop = "" if message.endswith("?") else ";"
    print(f"{prog}: {message}{stop} see '{prog} --help'", file=sys.stderr)
    raise SystemExit(2)


def import_modules(names: Sequence[str] | None) -> None:
    """Import modules by name, from the current folder too, or .py files by path.

    Raises:
        LigerError: there is no such module, or it raised an error or exits.
    """
    for name in names or ():
        try:
            if name.endswith(".py"):
                _import_file(os.path.realpath(name))
            else:
                sys.path.append(os.getcwd())
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # SystemExit would end the command in silence.
            kind = "" if isinstance(error, LigerError) else f"{type(error).__name__}: "
            raise LigerError(f"--import {name}: {kind}{first_line(error)}") from error


def _import_file(path: str) -> None:
    """Import a file under its own name, even if an installed module has the same name."""
    folder, name = os.path.dirname(path), Path(path).stem
    if not os.path.isfile(path):
        raise LigerError("there is no such file")
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != path:
        raise LigerError(f"a module named {name!r} is imported already; rename the file")
    sys.path.append(folder)  # where it finds the modules beside it
    spec: Any = spec_from_file_location(name, path)
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
