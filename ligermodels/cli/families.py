"""List the supported model families and sizes.

List the model families. For each family, show its presets (the names of the published sizes), its
settings if a config.json does not change them, and its own config fields (those that not every
family has) with their defaults. A checkpoint's family is the model_type in its config.json.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ligermodels.cli.options import CommonOptions
from ligermodels.errors import LigerError
from ligermodels.training.options import option

if TYPE_CHECKING:
    from ligermodels.models.base import DecoderModel


@dataclass(kw_only=True)
class Arguments(CommonOptions):
    """The options of `families`.

    Attributes:
        family: show only this family
        json: print JSON
    """

    family: str | None = option(None, positional=True)
    json: bool = option(False)


def run(given: Arguments) -> None:
    """Print the settings of every family, or of the family that was asked for."""
    from ligermodels.layers.rotary import ROPE_TYPES
    from ligermodels.models.auto import families

    known = families()
    if given.family is not None and given.family not in known:
        raise LigerError(
            f"families: there is no family {given.family!r}; known: {', '.join(known)}"
        )
    chosen = known.values() if given.family is None else [known[given.family]]
    found = {cls.config_class.model_type: facts(cls) for cls in chosen}
    if given.json:
        print(json.dumps({"families": found, "rope types": ROPE_TYPES}, indent=2))
        return
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * 16, break_on_hyphens=False)
    for family, entries in found.items():
        print(family)
        for name, value in entries.items():
            text = value if isinstance(value, str) else ", ".join(value) or "none"
            wrapper.initial_indent = f"  {name:<14}"
            print(wrapper.fill(text))
        print()
    print(f"rope types that every family supports: {', '.join(ROPE_TYPES)}")


def facts(cls: type[DecoderModel]) -> dict[str, str | list[str]]:
    """Return the names of a family, and the settings that a config.json may change."""
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
        "head": "tied" if config.tie_word_embeddings else "not tied",
        "own fields": [f"{name}={getattr(config, name)!r}" for name in own],
    }
