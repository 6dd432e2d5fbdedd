"""The command `ligermodels inspect`."""

from __future__ import annotations

import argparse
import json

from ligermodels.errors import printable

HELP = "describe a checkpoint without loading its tensors"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the checkpoint and the output format."""
    command.description = (
        "Show a checkpoint's family, config, parameter count and memory needs. The command reads "
        "only the config and the headers of the weight files, and checks them as a load does. "
        "It downloads a hub checkpoint first."
    )
    command.add_argument("model", metavar="MODEL", help="hub id or local folder of a checkpoint")
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
        (
            "config keys that the model does not use (an export keeps them)",
            found["unknown_keys"],
            json.dumps,
        ),
        ("tensors that are not loaded (they belong to other towers)", found["left_out"], str),
        ("stored bytes by dtype", found["dtype_bytes"], _bytes),
        ("files", found["files"], _bytes),
        ("estimated memory", found["memory"], _bytes),
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
