"""`ligermodels inspect`."""

from __future__ import annotations

import argparse
import json

from ligermodels.errors import printable

HELP = "show what a checkpoint is, without loading it"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The checkpoint, and the form of the answer."""
    command.description = (
        "Show a checkpoint's family, config, parameters and memory after the checks of a load: "
        "headers are read, tensors are not. A hub checkpoint is downloaded."
    )
    command.add_argument("model", metavar="MODEL", help="hub id or folder of a checkpoint")
    command.add_argument("--revision", help="branch, tag or commit of a hub checkpoint")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> None:
    """Print a checkpoint's description."""
    from dataclasses import asdict

    from ligermodels.converters.hub import resolve
    from ligermodels.converters.inspect import describe
    from ligermodels.models.auto import family_of

    folder = resolve(given.model, revision=given.revision)
    found = asdict(describe(folder, family_of(folder)))
    if given.json:
        print(json.dumps(found, indent=2, default=str))
        return
    print(f"{found['folder']}: {found['family']}, {found['parameters']:,} parameters")
    for title, entries, show in (
        ("config", found["config"], json.dumps),
        ("config keys that nothing reads (kept in an export)", found["unknown_keys"], json.dumps),
        ("left out (tensors of other towers)", found["left_out"], str),
        ("stored as", found["dtype_bytes"], _bytes),
        ("files", found["files"], _bytes),
        ("memory", found["memory"], _bytes),
    ):
        if entries:
            print(f"\n{title}")
            names = [printable(name) for name in entries]
            width = max(map(len, names))
            for name, value in zip(names, entries.values()):
                print(f"  {name:<{width}}  {_cut(show(value))}")


def _cut(text: str, longest: int = 500) -> str:
    return text if len(text) <= longest else text[:longest] + " ..."


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} bytes"
