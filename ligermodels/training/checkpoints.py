"""The checkpoints of a run: the trained weights and the optimizer's state, after a step.

A checkpoint is a folder `step-00000100` of safetensors files that torch.distributed.checkpoint
writes, for one process and for many: each rank writes the parts of the tensors that it holds, so
that any number of ranks, in any layout, can read what another wrote. Besides, `facts.json` holds
the id of the run and the names of the files. It is written last.

A checkpoint holds `model.NAME` for each trained weight, `optimizer.KEY.NAME` for what the optimizer
keeps for it, and `float8.NAME` for the delayed scales of a linear. Frozen weights are not in it,
because a resumed run loads them from the model that it began with.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.converters.files import names_if_present, read_json
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.converters.save_dir import sync_file, sync_folder
from ligermodels.errors import CheckpointError, LigerError, SaveError, first_line
from ligermodels.float8 import load_scales, scales
from ligermodels.layers.fusion import is_sharded, local_tensor
from ligermodels.models.layout import local_slices, splits_of
from ligermodels.parallel.state import SlicedTensor
from ligermodels.ranks import error_on_all_ranks, gathered, is_distributed, rank
from ligermodels.training.optimizers import allocate_state, state_of
from ligermodels.training.run_dir import PART, writing

FACTS = "facts.json"
_NAME = re.compile(r"step-(\d{8,18})")
_SCALES = "float8."
# The size of the tensors in a file, of all ranks together: a file is made in the host's memory.
_FILE_BYTES = 2**31


class Checkpoints:
    """The checkpoints in a folder, all of the run with this id."""

    def __init__(self, folder: Path, run_id: str = "") -> None:
        self.folder, self.run_id = folder, run_id

    def folders(self) -> dict[int, Path]:
        """Return the folder of each step that was written to its end, in the order of the steps.

        Raises:
            CheckpointError: they cannot be listed.
        """
        found = {}
        for name in names_if_present(self.folder, CheckpointError) or ():
            match = _NAME.fullmatch(name)
            if match and (self.folder / name / FACTS).is_file():
                found[int(match[1])] = self.folder / name
        return dict(sorted(found.items()))

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint, or None if there is none."""
        return max(self.folders(), default=None)

    def said_latest(self) -> str:
        """Say which is the newest checkpoint."""
        if (step := self.latest()) is None:
            return "no checkpoint was written before"
        return f"{self.folders()[step]} has the weights after step {step}"

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write the state after `step` steps. Every rank must call it.

        The folder has its name only when it is whole.

        Raises:
            LigerError: a value is not finite, so that nobody could go on from this state.
            SaveError: on any rank, it cannot be written. All ranks raise.
        """
        if name := first_not_finite((key, x) for key, _, x in _state(model, optimizer)):
            raise LigerError(
                f"step {step}: the update makes {name} infinite or NaN, so no checkpoint is "
                f"written; {self.said_latest()}; try a lower learning rate or a longer warm-up"
            )
        folder = self.folder / f"step-{step:08d}"
        aside = folder.with_name(folder.name + PART)
        with error_on_all_ranks(SaveError), writing(folder):
            if rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        with _quiet(SaveError, f"{folder}: cannot be written") as dcp:
            state = sharded_state(model, optimizer)
            ends = accumulate(tensor.nbytes for tensor in state.values())
            numbers = {name: 1 + end // _FILE_BYTES for name, end in zip(state, ends)}
            writer = dcp.HuggingFaceStorageWriter(str(aside), numbers, save_distributed=True)
            dcp.save(state, storage_writer=writer, no_dist=not is_distributed())
        with error_on_all_ranks(SaveError), writing(folder):
            own = f"shard-{rank() + 1:05d}-"
            mine = [name for name in sorted(os.listdir(aside)) if name.startswith(own)]
            # torch flushes a file before the last bytes have left Python's buffer.
            for name in mine:
                sync_file(aside / name)
        files = [name for each in gathered(mine) for name in each]
        with error_on_all_ranks(SaveError), writing(folder):
            if rank() == 0:
                facts = {"run": self.run_id, "files": files}
                (aside / FACTS).write_text(json.dumps(facts, indent=2))
                sync_file(aside / FACTS)
                sync_folder(aside)
                if folder.exists():
                    _remove(folder)
                os.replace(aside, folder)
                sync_folder(self.folder)
        return folder

    def load(
        self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Copy the state after `step` steps into the model and a fresh optimizer.

        Without an optimizer, copy only the weights. Every rank must call it.

        Raises:
            CheckpointError: on any rank, a file is missing, damaged or foreign, or the
                checkpoint is that of another run. All ranks raise.
        """
        folder = self.folder / f"step-{step:08d}"
        try:
            with error_on_all_ranks(CheckpointError):
                facts = read_json(folder / FACTS, CheckpointError)
                if facts.get("run") != self.run_id:
                    raise CheckpointError(
                        f"{folder}: this is a checkpoint of another run: the base model, the data "
                        "or the options are not those of this run"
                    )
                # The reader takes the tensors of every file of the folder.
                found = {path.name for path in folder.glob("*.safetensors")}
                if odd := found ^ {*facts.get("files", ())}:
                    name = folder / min(odd)
                    raise CheckpointError(f"{name}: it is missing, or no run has written it")
                for each in sorted(found):  # torch would log a traceback before its error
                    SafetensorsFile(folder / each)
            with _quiet(CheckpointError, f"{folder}: cannot be read") as dcp:
                reader, alone = dcp.HuggingFaceStorageReader(str(folder)), not is_distributed()
                state = sharded_state(model, optimizer)
                dcp.load(state, storage_reader=reader, no_dist=alone)
            load_scales(model, {name: state[_SCALES + name] for name in scales(model)})
        except CheckpointError as error:
            way_out = f"remove the folder {folder} to resume from an earlier checkpoint"
            error.args = (f"{first_line(error)}; {way_out}",)
            raise

    def prune(self, keep: int, best: int | None = None) -> None:
        """Remove all except the newest `keep` checkpoints, and folders that a kill cut short.

        Args: best: the step of one that is kept besides.
        """
        whole = list(self.folders().values())
        kept = whole[max(0, len(whole) - keep) :]
        kept += [self.folders()[best]] if best in self.folders() else []
        for name in names_if_present(self.folder, CheckpointError) or ():
            if _NAME.fullmatch(name.removesuffix(PART)) and self.folder / name not in kept:
                _remove(self.folder / name)

    def clear(self) -> None:
        """Remove all checkpoints, and the folder if nothing else is in it."""
        self.prune(0)
        with contextlib.suppress(OSError):  # It is absent, or something else is in it.
            self.folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a checkpoint. If that is cut short, what remains is not whole."""
    with writing(folder):
        (folder / FACTS).unlink(missing_ok=True)
        shutil.rmtree(folder)


def first_not_finite(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> str | None:
    """Return the first name whose tensor has a value that is not finite (in `dtype`), or None.

    This takes no memory for a mask: NaN and infinite values show in the extremes. Each of several
    ranks looks at its shards, and all return the first name of any.
    """
    first = next((name for name, x in tensors if not _is_finite(local_tensor(x), dtype)), None)
    return next((name for name in gathered(first) if name is not None), None)


def _is_finite(tensor: Tensor, dtype: torch.dtype | None) -> bool:
    if not tensor.numel():
        return True
    extremes = torch.stack(tensor.aminmax())
    return bool(extremes.to(dtype or tensor.dtype).isfinite().all())


def _state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the key, the parameter's name and the tensor of all that resuming needs."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield f"model.{name}", name, parameter.detach()
            for key, value in () if optimizer is None else state_of(optimizer, parameter):
                yield f"optimizer.{key}.{name}", name, value


def sharded_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Return what resuming needs, for `torch.distributed.checkpoint.save` and `load`.

    The tensors are whole ones, of which each rank holds parts in the memory of the model and the
    optimizer: `load` fills these. Another number of ranks, or another layout, can read them.

    Args:
        model: sharded in any layout, or not at all. Only parameters that are trained are returned.
        optimizer: of this model. If it has not made a step, it gets its state here.
    """
    if optimizer is not None and not optimizer.state:
        allocate_state(optimizer)
    state: dict[str, Tensor] = {}
    splits = splits_of(model)
    for key, name, tensor in _state(model, optimizer):
        if not tensor.ndim:  # a count of steps
            state[key] = tensor
            continue
        split = splits.get(name)
        shape = tuple(tensor.shape) if split is None else split.shape
        parts = local_slices(tensor, split)
        if rank() and split is None and not is_sharded(tensor):  # rank 0 stores it
            parts = [replace(part, is_copy=True) for part in parts]
        state[key] = SlicedTensor(shape, tensor.dtype, parts)
    return state | {_SCALES + name: rows for name, rows in scales(model).items()}


@contextlib.contextmanager
def _quiet(kind: type[LigerError], what: str) -> Iterator[Any]:
    """Yield torch.distributed.checkpoint, whose errors, which all ranks have, become ours.

    Its import takes a third of what a process takes to start, which may only tell a mistake.
    """
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield dcp
    except (dcp.CheckpointException, OSError, RuntimeError, ValueError) as error:
        failures = getattr(error, "failures", {})
        first = next((each[0] for each in failures.values()), error)
        if isinstance(first, KeyboardInterrupt):
            raise first from None
        found = kind(f"{what}: {first_line(first)}")
        found.is_repeated = rank() != 0
        raise found from error
