"""List the supported model families and sizes.

List the model families: the model_type in a checkpoint's config.json, the class, and the presets
(the names of the published sizes).
"""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass
from typing import Any

from ligermodels.cli.options import CommonOptions


@dataclass(kw_only=True)
class Arguments(CommonOptions):
    """`families` has no options of its own."""


def run(given: Arguments) -> None:
    """Print each family with its sizes."""
    from ligermodels.models.auto import families

    names: dict[Any, list[str]] = {}
    for name, cls in families().items():
        names.setdefault(cls, []).append(name)
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(width, initial_indent="    ", subsequent_indent="    ")
    wrapper.break_on_hyphens = False
    for cls, known in names.items():
        sizes = ", ".join(cls.config_class.presets) or "no size has a name"
        print(f"{', '.join(known)}: {cls.__name__}")
        print(wrapper.fill(sizes))
