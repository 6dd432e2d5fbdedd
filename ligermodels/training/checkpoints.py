"""The checkpoints of a run: the trained weights and the optimizer's state, after a step.

A checkpoint is a folder `step-00000100` that torch.distributed.checkpoint writes, for one process
and for many: each rank writes the parts of the tensors that it holds, so that any number of ranks,
in any layout, can read what another wrote. Besides, `facts.json` holds the step, a hash that tells
the run from others, and the SHA-256 of each file. A flipped bit, a renamed folder or a checkpoint
of another run is therefore found before anything is computed with it.

A checkpoint holds `model.NAME` for each trained weight, and `optimizer.KEY.NAME` for what the
optimizer keeps for it. Frozen weights are not in it, because a resumed run loads them from the
model that it began with. Nor is the count of steps, which is the folder's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ligermodels.converters.files import (
    names_if_present,
    read_json,
    sync_file,
    sync_folder,
)
from ligermodels.errors import CheckpointError, LigerError, SaveError, first_line
from ligermodels.layers.fusion import is_sharded
from ligermodels.parallel.layout import local_slices, local_tensor, splits_of
from ligermodels.parallel.ranks import (
    error_on_all_ranks,
    from_rank_0,
    gathered,
    is_distributed,
    num_ranks,
    rank,
)
from ligermodels.parallel.state import SlicedTensor
from ligermodels.training.optimizers import allocate_state, state_of
from ligermodels.training.run_dir import PART, file_hash, writing

FACTS = "facts.json"
_NAME = re.compile(r"step-(\d{8,18})")
_WEIGHTS = "model."
_METADATA = ".metadata"  # the name that torch.distributed.checkpoint gives it
# What the pickle of a folder of tensors names. A pickle can call whatever it names.
_PICKLED = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # since Python 3.13
    "torch": {
        "Size",
        *(str(each)[6:] for each in vars(torch).values() if type(each) is torch.dtype),
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
}


class Checkpoints:
    """The checkpoints in a folder. `run` is a hash that tells the run from others."""

    def __init__(self, folder: Path, run: str = "") -> None:
        self.folder = folder
        self.run = run

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

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write the state after `step` steps. Every rank must call it.

        The folder has its name only when it is whole.

        Raises:
            LigerError: a value is not finite, so that nobody could go on from this state.
            SaveError: on any rank, it cannot be written. All ranks raise.
        """
        state = ((f"{kind}.{name}", x) for kind, name, x in _state(model, optimizer))
        if name := first_not_finite(state):
            raise LigerError(
                f"step {step}: the update makes {name} infinite or NaN, so no checkpoint is "
                "written; try a lower learning rate or a longer warm-up"
            )
        folder = self.folder / f"step-{step:08d}"
        aside = folder.with_name(folder.name + PART)
        with error_on_all_ranks(SaveError), writing(folder):
            if rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        with _quiet(SaveError, f"{folder}: cannot be written"):
            dcp.save(
                _stored(model, optimizer),
                storage_writer=dcp.FileSystemWriter(aside, sync_files=False),
                no_dist=not is_distributed(),
            )
        with error_on_all_ranks(SaveError), writing(folder):
            own = (f"__{rank()}_",) if rank() else ("__0_", ".")
            mine = [name for name in sorted(os.listdir(aside)) if name.startswith(own)]
            # torch flushes its index before the last bytes have left Python's buffer.
            for name in mine:
                sync_file(aside / name)
            hashes = {name: file_hash(aside / name) for name in mine}
        files = {name: value for each in gathered(hashes) for name, value in each.items()}
        with error_on_all_ranks(SaveError), writing(folder):
            if rank() == 0:
                text = json.dumps({"step": step, "run": self.run, "files": files}, indent=2)
                (aside / FACTS).write_text(text, encoding="utf-8")
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

        Without an optimizer, copy only the weights, which may be of any run. Every rank must call
        it.

        Raises:
            CheckpointError: on any rank, a file is missing or damaged, or it belongs to another
                model, step or run. All ranks raise, and nothing was changed.
        """
        folder = from_rank_0(self.folders()[step] if rank() == 0 else None)
        if optimizer is not None:
            allocate_state(optimizer, step)
        try:
            with error_on_all_ranks(CheckpointError):
                facts = facts_of(folder)
                if facts.get("step") != step:
                    raise CheckpointError(
                        f"{folder}: the name says step {step}, but the folder holds step "
                        f"{facts.get('step')!r}"
                    )
                if optimizer is not None and facts.get("run") != self.run:
                    raise CheckpointError(
                        f"{folder}: it belongs to a run with another model, other data or options"
                    )
            _read(folder, _stored(model, optimizer), prefix="" if optimizer else _WEIGHTS)
        except CheckpointError as error:
            raise CheckpointError(
                f"{first_line(error)}; remove the folder {folder} to resume from an earlier "
                "checkpoint"
            ) from None

    def prune(self, keep: int) -> None:
        """Remove all except the newest `keep` checkpoints, and folders that a kill cut short."""
        whole = list(self.folders().values())
        kept = whole[max(0, len(whole) - keep) :]
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


def _state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the kind, the parameter's name and the tensor of all that resuming needs."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield "model", name, parameter.detach()
            for key, value in () if optimizer is None else state_of(optimizer, parameter):
                yield f"optimizer.{key}", name, value


def first_not_finite(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> str | None:
    """Return the first name whose tensor has a value that is not finite (in `dtype`), or None.

    This takes no memory for a mask: NaN and infinite values show in the extremes. Reads the device
    once; some optimizers keep their step on the CPU. Each of several ranks looks at its shards, and
    all return the first name of any.
    """
    names, ends = [], []
    for name, tensor in tensors:
        tensor = local_tensor(tensor)
        if not tensor.numel():
            continue
        low, high = tensor.aminmax()
        names.append(name)
        ends.append(torch.stack([low, high]).to(dtype or tensor.dtype).isfinite().all())
    devices = sorted((end.device for end in ends), key=lambda device: device.type == "cpu")
    finite = torch.stack([end.to(devices[0]) for end in ends]).tolist() if ends else []
    first = next((name for name, fine in zip(names, finite) if not fine), None)
    return next((name for name in gathered(first) if name is not None), None)


def digests(names: Iterable[str], read: Callable[[str], Iterable[Tensor]]) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each tensor, by name, computed by several threads.

    Args: read yields the parts of the tensor of a name.
    """

    def digest(name: str) -> str:
        found = hashlib.sha256()
        for part in read(name):
            found.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, names)))


def _stored(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, SlicedTensor]:
    """Return whole tensors of which this rank holds parts, views of weights and state, by name."""
    splits, found = splits_of(model), {}
    for kind, name, tensor in _state(model, optimizer):
        if kind != "optimizer.step":
            split = splits.get(name)
            shape = tuple(tensor.shape) if split is None else split.shape
            parts = local_slices(tensor, split)
            if rank() and split is None and not is_sharded(tensor):  # rank 0 stores it
                parts = [replace(part, is_copy=True) for part in parts]
            found[f"{kind}.{name}"] = SlicedTensor(shape, tensor.dtype, parts)
    return found


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
        allocate_state(optimizer, 0)
    state: dict[str, Tensor] = {**_stored(model, optimizer)}
    for kind, name, tensor in _state(model, optimizer):
        if kind == "optimizer.step":
            state[f"{kind}.{name}"] = tensor
    return state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _PICKLED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensors need")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reads a folder, and runs no code that its files name.

    PyTorch's reader takes any pickle, and reads whichever files the pickle names.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / _METADATA
        try:
            with open(file, "rb") as opened:
                found = _Unpickler(opened).load()
            places = {info.relative_path for info in found.storage_data.values()}
            found.storage_meta = found.storage_meta or StorageMeta()
        except Exception as error:  # a pickle can raise anything
            raise CheckpointError(
                f"{file}: the file cannot be read: {first_line(error)}"
            ) from error
        if odd := sorted(places - facts_of(Path(self.path))["files"].keys()):
            raise CheckpointError(f"{file}: it names {odd[0]!r}, which is no file of this folder")
        found.storage_meta.load_id = self.load_id
        return found


def _read(folder: Path, tensors: Mapping[str, SlicedTensor], prefix: str) -> None:
    """Copy the values of a folder into tensors. Only names with the prefix must be theirs."""
    with error_on_all_ranks(CheckpointError):
        for number, (name, digest) in enumerate(facts_of(folder)["files"].items()):
            if number % num_ranks() == rank():
                if file_hash(folder / name, CheckpointError) != digest:
                    raise CheckpointError(
                        f"{folder / name}: the content does not match its checksum"
                    )
        held = _Reader(folder).read_metadata().state_dict_metadata
        names = {name for name in held if name.startswith(prefix)}
        for name in sorted(names ^ tensors.keys()):
            what = "is missing" if name in tensors else "is no tensor of this model"
            raise CheckpointError(f"{folder}: {name!r} {what}: it belongs to another model")
        for name, wanted in tensors.items():
            found = held[name]
            dtype = found.properties.dtype if isinstance(found, TensorStorageMetadata) else None
            if dtype != wanted.dtype or tuple(found.size) != tuple(wanted.shape):  # type: ignore[union-attr]
                raise CheckpointError(
                    f"{folder}: {name!r} is {dtype} of another shape or dtype than the model's "
                    f"{wanted.dtype} of shape {list(wanted.shape)}: it belongs to another model"
                )
    with _quiet(CheckpointError, f"{folder}: cannot be read"):
        dcp.load({**tensors}, storage_reader=_Reader(folder), no_dist=not is_distributed())


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the JSON values that were written with a folder, and the hash of each of its files.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    found = read_json(folder / FACTS, CheckpointError)
    files = found.get("files")
    if not isinstance(files, dict) or not all("/" not in name for name in files):
        raise CheckpointError(f"{folder / FACTS}: 'files' is not what a run writes")
    return found


@contextlib.contextmanager
def _quiet(kind: type[LigerError], what: str) -> Iterator[None]:
    """Turn an error of torch.distributed.checkpoint, which has it on all ranks, into ours."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except (dcp.CheckpointException, OSError, RuntimeError, ValueError) as error:
        failures = getattr(error, "failures", {})
        first = next((each[0] for each in failures.values()), error)
        found = kind(f"{what}: {first_line(first)}")
        found.is_repeated = rank() != 0
        raise found from error
