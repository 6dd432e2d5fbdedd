"""The command line of the examples that train a checkpoint: a model, a folder and options."""

import argparse
from collections.abc import Callable
from pathlib import Path


def call(main: Callable[..., object], description: str | None, **options: float | str) -> None:
    """Call an example's main with the model, the output folder and options of the command line.

    Args: description, the example's docstring; options, by their names in main, with defaults.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("model", help="hub id or local folder")
    parser.add_argument("--output-dir", type=Path, required=True)
    for name, default in options.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(default), default=default, help=f"default {default}")
    main(**vars(parser.parse_args()))
