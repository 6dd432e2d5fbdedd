"""The families of examples/families, which tests import and register as a user would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ligermodels import DecoderModel, register
from ligermodels.cli.options import import_modules

FOLDER = Path(__file__).parent.parent / "examples" / "families"
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if "@lm.register" in p.read_text())


def family(name: str) -> Any:
    """Register a family, whose file has this name, and return its model class.

    Use the fixture `registry`, which removes it after the test.
    """
    if name not in sys.modules:
        import_modules([str(FOLDER / f"{name}.py")])
    (found,) = (
        each
        for each in vars(sys.modules[name]).values()
        if isinstance(each, type) and issubclass(each, DecoderModel) and each.__module__ == name
    )
    return register(found)
