"""Parts that the commands share: options from dataclasses, by the library tyro, and loading.

An option is a field of a dataclass of `ligermodels.training.options`, which has its help, type and
limits. tyro finds the words of each option and shows the help; the option checks their value. A
mistake is one line on stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin

from ligermodels.converters.files import open_regular
from ligermodels.errors import LigerError, did_you_mean, first_line, printable
from ligermodels.training.config import EXPORT_DTYPES
from ligermodels.training.options import OTHER_NAMES, Options, flat_name, option, types_of


@dataclass(kw_only=True)
class CommonOptions(Options):
    """The option that every command has."""

    modules: list[str] | None = option(  # noqa: RUF009 (the default is not a list)
        None,
        "import modules, or .py files, that register model families or losses",
        flag="import",
        metavar="MODULE",
    )


@dataclass(kw_only=True)
class LoadingOptions(CommonOptions):
    """How a checkpoint is loaded."""

    revision: str | None = option(None, "branch, tag or commit of a hub checkpoint")
    dtype: str | None = option(
        None, "dtype of the weights (default: as stored)", choices=EXPORT_DTYPES
    )
    allow_nonfinite: bool = option(False, "accept NaN and infinite weights")

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
    description: str,
    defaults: Mapping[str, Any] | None = None,
    owners: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the values of all options of some subjects, each by its own name.

    Args:
        defaults: values that replace the defaults of the options.
        owners: what is said of options that belong elsewhere, by their names.
    Raises:
        SystemExit: after --help, or after a mistake that was printed as one line.
    """
    import tyro

    _check_names(command, subjects, argv, owners or {})
    groups: list[Any] = []
    values: dict[str, Any] = {}
    for subject, kind in subjects.items():
        types = types_of(kind)
        inner = []
        for each in fields(kind):
            name = flat_name(each)
            values[name] = (defaults or {}).get(name, each.default)
            inner.append((each.name, *_described(each, types[each.name], values[name])))
        groups.append((subject, make_dataclass(subject, inner, kw_only=True)))
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), warnings.catch_warnings():
            # An option that is not given has None, whatever its type.
            warnings.simplefilter("ignore")
            arguments: Any = make_dataclass("arguments", groups, kw_only=True)
            given, more = tyro.cli(
                arguments,
                prog=f"ligermodels {command}",
                description=description,
                args=list(argv),
                config=(tyro.conf.OmitArgPrefixes,),
                return_unknown_args=True,
            )
    except SystemExit:
        width = shutil.get_terminal_size().columns
        for line in shown.getvalue().splitlines():  # The boxes have the width of the terminal.
            print(line if len(line) <= width else textwrap.fill(line, width))
        raise
    if more:
        complain(command, f"unrecognized arguments: {printable(' '.join(more))}")
    for subject, kind in subjects.items():
        types = types_of(kind)
        for each in fields(kind):
            name, found = flat_name(each), getattr(getattr(given, subject), each.name)
            if found is not None and (each.type != "bool" or found != (values[name] is True)):
                values[name] = _typed(types[each.name], found)
            if values[name] is MISSING:
                complain(command, f"{name.upper()} is missing")
    return values


def _typed(kind: Any, words: Any) -> Any:
    """Return the value that words stand for; a wrong word stays, and the option refuses it."""
    if get_origin(kind) is list:
        return [_typed(get_args(kind)[0], word) for word in words]
    with contextlib.suppress(ValueError):
        return kind(words)
    return words


def _described(each: Field[Any], kind: Any, value: Any) -> tuple[Any, Any]:
    """Return the type of an option for tyro, with what its help shows, and its default.

    tyro takes every value as a text: what is a mistake in it, the option says.
    """
    import tyro

    facts = each.metadata
    several = get_origin(kind) is list
    usual = {int: "N", float: "X"}.get(get_args(kind)[0] if several else kind)
    metavar = facts["metavar"] or usual or flat_name(each).upper()
    if facts["is_size"]:
        metavar = "SIZE"
    if facts["choices"] is not None:
        metavar = "{" + ",".join(facts["choices"]) + "}"
    shown = "" if value in (None, MISSING, (), []) or kind is bool else f"(default: {value})"
    argument = tyro.conf.arg(
        name=flat_name(each).replace("_", "-"),
        help=facts["help"],
        metavar=None if kind is bool else f"{metavar} ..." if several else metavar,
        help_behavior_hint="" if "(default:" in facts["help"] else shown,
    )
    annotated: Any = Annotated[bool if kind is bool else list[str] if several else str, argument]
    if facts["positional"]:
        annotated = tyro.conf.Positional[annotated]  # type: ignore[misc]
    return annotated, field(default=value is True if kind is bool else None)


def _check_names(
    command: str,
    subjects: Mapping[str, type[Options]],
    argv: Sequence[str],
    owners: Mapping[str, str],
) -> None:
    """Complain of the first option that is unknown, with a suggestion, or lacks its value."""
    flags, known = {"--help"}, set()
    for kind in subjects.values():
        for each in fields(kind):
            name = flat_name(each).replace("_", "-")
            if each.type == "bool":
                flags |= {f"--{name}", f"--no-{name}"}
            else:
                known.add(f"--{name}")
    for word, after in zip(argv, [*argv[1:], "--"]):
        name = word.partition("=")[0]
        if not name.startswith("--"):
            continue
        if (plain := name.replace("_", "-")) not in known | flags:
            hint = did_you_mean(name, sorted(known | flags), OTHER_NAMES)
            said = f"unrecognized arguments: {printable(name)}{hint}"
            complain(command, owners.get(name[2:].replace("-", "_"), said))
        if plain in known and name == word and after.startswith("--"):
            complain(command, f"{name}: its value is missing")


def complain(command: str, message: str) -> NoReturn:
    """Print a mistake in the arguments as one line, and exit with 2."""
    prog = f"ligermodels {command}".rstrip()
    stop = "" if message.endswith("?") else ";"
    print(f"{prog}: {message}{stop} see '{prog} --help'", file=sys.stderr)
    raise SystemExit(2)


def data_library() -> Any:
    """Import what reads data sets, tables and data larger than memory."""
    from ligermodels.integrations import hub_data

    return hub_data


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


def _import_file(name: str) -> None:
    """Import a file under its own name, even if an installed module has the same name."""
    file = Path(os.path.abspath(name))
    if file.stem in sys.modules and file.stem not in _imported_files:
        raise LigerError(f"a module named {file.stem!r} is imported already; rename the file")
    open_regular(Path(name), LigerError).close()  # Python would wait for the writer of a pipe.
    sys.modules.pop(file.stem, None)
    sys.path.insert(0, str(file.parent))
    try:
        importlib.import_module(file.stem)
        _imported_files.add(file.stem)
    finally:  # The modules beside it are found later, too, but hide no others.
        sys.path.remove(str(file.parent))
        sys.path.append(str(file.parent))
