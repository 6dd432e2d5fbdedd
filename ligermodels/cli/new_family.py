"""Begin the file of a new family from a checkpoint.

Write NAME.py with the config, the weight map, the block and the model of a family that is not here
yet. Everything that config.json and the headers of the weights tell is in it. What they do not tell
stands in its docstring as questions, and 'ligermodels check-family' then compares it with
transformers.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from ligermodels.cli.options import CommonOptions, import_modules
from ligermodels.errors import LigerError, first_line
from ligermodels.training.options import option


@dataclass(kw_only=True)
class Arguments(CommonOptions):
    """The options of `new-family`.

    Attributes:
        name: name of the file and of its classes, such as olmo2
        source: local folder of a checkpoint of the family
        overwrite: replace NAME.py
    """

    name: str = option(MISSING, positional=True)
    source: str = option(MISSING, flag="from", metavar="FOLDER")
    overwrite: bool = option(False)


def run(given: Arguments) -> None:
    """Write the file, and say whether every tensor of the checkpoint has its place."""
    from pathlib import Path

    from ligermodels.checks.new_family import skeleton
    from ligermodels.converters.checkpoint import Checkpoint
    from ligermodels.converters.hf_config import read_config
    from ligermodels.models.auto import families, family_of

    folder, file = Path(given.source), Path(f"{given.name}.py")
    if not file.stem.isidentifier():
        raise LigerError(f"new-family: {given.name!r} must be a name in Python, such as olmo2")
    model_type = read_config(folder).get("model_type")
    if model_type in families():
        raise LigerError(
            f"new-family: {model_type} is supported by {families()[model_type].__name__}"
        )
    if file.exists() and not given.overwrite:
        raise LigerError(f"{file}: the file exists; replace it with --overwrite")
    file.write_text(skeleton(given.name, folder), "utf-8")
    print(f"wrote {file}; its docstring has what was read and what is open")
    try:
        import_modules([str(file)])
        config = family_of(folder).config_class.from_hf(folder)
        checkpoint = Checkpoint(folder)
        checkpoint.plan(family_of(folder).weight_map(config))
        print(f"all {len(checkpoint.tensors)} tensors of {folder} have their place")
    except LigerError as error:
        print(f"not yet: {first_line(error)}")
    print(f"next: ligermodels check-family {folder} --import {file}")
