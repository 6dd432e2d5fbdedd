"""Hashes of what a run reads: a resumed run must find the same model and the same data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ligermodels.converters.checkpoint_files import CONFIG_NAME, copied_files, is_adapter
from ligermodels.errors import CheckpointError
from ligermodels.layers.fusion import is_sharded
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.ranks import from_rank_0, rank
from ligermodels.training.checkpoints import digests, fingerprint
from ligermodels.training.data import file_hash


def file_hashes(source: Path) -> dict[str, str]:
    """Return the SHA-256 of the config and of each tokenizer file of a checkpoint, by name.

    Raises:
        CheckpointError: a file cannot be read, or the folder holds an adapter instead of a model.
    """
    if is_adapter(source):
        raise CheckpointError(
            f"{source}: this is an adapter; make a whole checkpoint of it first ('ligermodels "
            "convert'), or train on with --resume and the folder of its run"
        )
    names = [CONFIG_NAME, *copied_files(source)]
    return {name: file_hash(source / name) for name in names}


def check_unchanged(source: Path, files: dict[str, str]) -> None:
    """Raise CheckpointError if files of the model were changed since they were hashed."""
    if found := changed(files, file_hashes(source)):
        raise CheckpointError(
            f"{source / found[0]}: the file was changed while the run was using it; restore it "
            "and resume the run"
        )


def weights_hash(model: nn.Module) -> str:
    """Return a SHA-256 of all weights, which does not depend on the number of ranks."""
    state = model.state_dict()
    if not any(map(is_sharded, state.values())):
        own = digests(state, lambda name: [state[name].detach()]) if rank() == 0 else {}
        return from_rank_0(fingerprint(own))
    found: dict[str, str] = {}
    assert isinstance(model, DecoderModel)
    for name, _ in model.named_parameters():
        whole = [model.whole_parameter(name)]  # every rank helps to gather it
        if rank() == 0:
            found |= digests([name], lambda _, whole=whole: whole)  # type: ignore[misc]
    return from_rank_0(fingerprint(found))


def changed(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the names whose values differ, also by being absent."""
    return sorted(name for name in {**then, **now} if then.get(name) != now.get(name))


def difference(then: dict[str, str], files: Sequence[str | Path]) -> str:
    """Say which training files differ. Hashes decide, because files may have been renamed."""
    now = {os.path.realpath(file): file_hash(file) for file in files}
    if new := [file for file, digest in now.items() if digest not in then.values()]:
        return f"{', '.join(new)} changed or is new"
    if gone := [file for file, digest in then.items() if digest not in now.values()]:
        return f"{', '.join(gone)} is left out"
    return (
        "the files are the same, but their order, the evaluation files (--eval-files), the part "
        "that is held out (--eval-fraction) or the tokenizer changed"
    )
