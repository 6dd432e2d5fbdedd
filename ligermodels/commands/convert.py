"""`ligermodels convert`."""

from __future__ import annotations

import argparse
from typing import Any

from ligermodels.arguments import byte_size, loading_arguments, loading_options
from ligermodels.errors import LigerError

HELP = "write a checkpoint anew, or verify its round trip"


def arguments(command: argparse.ArgumentParser) -> None:
    """From where to where, and what to change or compare."""
    command.description = (
        "Load the checkpoint SOURCE and write it to the folder TARGET, in another dtype or other "
        "shards if asked. With --verify every tensor is compared bit for bit: TARGET's with "
        "SOURCE's, or without TARGET, those of a copy that went into the native layout and back. "
        "A difference gives exit code 1."
    )
    add = command.add_argument
    add("source", metavar="SOURCE", help="hub id or folder of a checkpoint")
    add("target", metavar="TARGET", nargs="?", help="the folder to write")
    add("--verify", action="store_true", help="compare every tensor, config key and file")
    add(
        "--max-shard-size",
        type=byte_size,
        default="5GB",
        metavar="SIZE",
        help="most bytes in a file",
    )
    add("--overwrite", action="store_true", help="replace the checkpoint that TARGET holds")
    loading_arguments(command)


def run(given: argparse.Namespace) -> None:
    """Load, write, compare."""
    from pathlib import Path

    from ligermodels.auto import AutoLiger, family_of
    from ligermodels.converters.hub import resolve

    if given.target is None and not given.verify:
        raise LigerError("convert: give TARGET, --verify, or both")
    if given.target is None and given.dtype:
        raise LigerError("convert: --dtype needs TARGET")
    if given.target is not None:
        held = Path(given.target) / "config.json"
        if held.exists() and not given.overwrite:
            raise LigerError(f"{given.target}: holds a checkpoint; replace it with --overwrite")
    source = resolve(given.source, revision=given.revision)
    config_class = family_of(source).config_class
    if given.target is None:
        from ligermodels.converters.verify import verify

        report = verify(source, config_class, max_shard_size=given.max_shard_size)
        print(report)
        if not report.ok:
            raise SystemExit(1)
        return
    target = Path(given.target)
    if given.verify and target.exists() and target.samefile(source):
        raise LigerError("convert: --verify cannot compare a checkpoint with what replaces it")
    model = AutoLiger.from_hf(source, **loading_options(given))
    model.save_hf(target, max_shard_size=given.max_shard_size)
    print(f"written to {target}")
    if given.verify:
        _compare(source, target, config_class)


def _compare(source: Any, target: Any, config_class: Any) -> None:
    """Every tensor of an export against its source, cast where the dtype was changed."""
    from ligermodels.converters.config import fields_from_hf, read_config
    from ligermodels.converters.reader import Checkpoint, same_bits
    from ligermodels.converters.table import table_for

    config = config_class(**fields_from_hf(read_config(source), config_class, str(source)))
    names = list(table_for(config).source_shapes())
    before, after = Checkpoint(source), Checkpoint(target)
    wrong = []
    for name in names:
        found = after.tensor(name)
        if not same_bits(before.tensor(name).to(found.dtype), found):
            wrong.append(name)
    if wrong:
        print(f"{len(wrong)} of {len(names)} tensors differ, the first is {wrong[0]}")
        raise SystemExit(1)
    print(f"bitwise equal: {len(names)} tensors")
