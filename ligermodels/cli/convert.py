"""`ligermodels convert`."""

from __future__ import annotations

import argparse

from ligermodels.cli.options import byte_size, loading_arguments, loading_options
from ligermodels.errors import LigerError

HELP = "write a checkpoint anew, or verify its round trip"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """From where to where, and what to change or compare."""
    command.description = (
        "Load the checkpoint SOURCE and write it to the folder TARGET, in another dtype or other "
        "shards if asked. With --verify every tensor is compared bit for bit: TARGET's with "
        "SOURCE's (cast, if --dtype is given), or without TARGET, those of a copy that went into "
        "the native layout and back. A difference gives exit code 1."
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

    from ligermodels.converters.hub import resolve
    from ligermodels.converters.verify import compare, verify
    from ligermodels.models.auto import AutoLiger, family_of

    target = None if given.target is None else Path(given.target)
    if target is None and not given.verify:
        raise LigerError("convert: give TARGET, --verify, or both")
    if target is None and given.dtype:
        raise LigerError("convert: --dtype needs TARGET")
    if target is not None and (target / "config.json").exists() and not given.overwrite:
        raise LigerError(f"{given.target}: holds a checkpoint; replace it with --overwrite")
    source = resolve(given.source, revision=given.revision)
    family = family_of(source)
    if target is None:
        report = verify(
            source,
            family,
            max_shard_size=given.max_shard_size,
            allow_nonfinite=given.allow_nonfinite,
        )
    else:
        if given.verify and target.exists() and target.samefile(source):
            raise LigerError("convert: --verify cannot compare a checkpoint with what replaces it")
        loading = loading_options(given)
        AutoLiger.from_hf(source, **loading).save_hf(target, max_shard_size=given.max_shard_size)
        print(f"written to {target}")
        if not given.verify:
            return
        report = compare(source, target, family, dtype=loading["dtype"])
    print(report)
    if not report.ok:
        raise SystemExit(1)
