"""`ligermodels families`: what is supported, read from the configs of the families."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from dataclasses import fields
from typing import TYPE_CHECKING

from ligermodels.errors import LigerError

if TYPE_CHECKING:
    from ligermodels.models.base import DecoderModel

HELP = "list the families and sizes that are supported"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Which family, and the form of the answer."""
    command.description = (
        "List the model families: the names of their published sizes, their settings where a "
        "config.json says nothing else, and the config fields that only some families have, with "
        "their defaults. A checkpoint's family is the model_type in its config.json."
    )
    command.add_argument("family", metavar="FAMILY", nargs="?", help="show only this one")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> None:
    """Print the facts of every family."""
    from ligermodels.layers.rotary import ROPE_TYPES
    from ligermodels.models.auto import families

    known = families()
    if given.family is not None and given.family not in known:
        raise LigerError(f"families: {given.family!r} is none of them; known: {', '.join(known)}")
    chosen = known.values() if given.family is None else [known[given.family]]
    found = {cls.config_class.model_type: facts(cls) for cls in chosen}
    if given.json:
        print(json.dumps({"families": found, "rope types": ROPE_TYPES}, indent=2))
        return
    for family, entries in found.items():
        print(family)
        width = max(map(len, entries)) + 4
        for name, value in entries.items():
            print(
                textwrap.fill(
                    value if isinstance(value, str) else ", ".join(value) or "none",
                    shutil.get_terminal_size().columns,
                    initial_indent=f"  {name}".ljust(width),
                    subsequent_indent=" " * width,
                    break_on_hyphens=False,
                )
            )
        print()
    print(f"rope types of every family: {', '.join(ROPE_TYPES)}")


def facts(cls: type[DecoderModel]) -> dict[str, str | list[str]]:
    """What a family has where its config.json says nothing else."""
    from ligermodels.models.config import ModelConfig

    config = cls.config_class()
    types = [config.model_type, config.wrapper_type]
    windows = [window for window in config.sliding_windows if window is not None]
    shared = {each.name for each in fields(ModelConfig)}
    own = [each.name for each in fields(config) if each.name not in shared]
    return {
        "model_type": [name for name in types if name is not None],
        "classes": [cls.__name__, type(config).__name__],
        "presets": list(config.presets),
        "activation": config.activation,
        "window": f"{windows[0]} in {len(windows)} of {config.num_hidden_layers} layers"
        if windows
        else "none",
        "head": "tied" if config.tie_word_embeddings else "its own",
        "own fields": [f"{name}={getattr(config, name)!r}" for name in own],
    }
