"""The checkpoints of a run: the trained weights and the optimizer's state, under a checksum.

Frozen weights are not in them, because a resumed run loads them from the model that it began with.

One process writes a file, and several write a folder: see `sharded_checkpoints`. Any number of
processes resumes from either. The header of a file holds the step, a hash that tells the run from
others, and a SHA-256 of these two and of all tensors. A flipped bit, a renamed file or a file of
another run is therefore found before anything is computed with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ligermodels.converters.files import in_threads, names_if_present, parse_json
from ligermodels.converters.safetensors_file import READABLE, SafetensorsFile
from ligermodels.errors import CheckpointError, LigerError, listing, short_repr
from ligermodels.layers.fusion import is_sharded
from ligermodels.parallel.layout import TensorSlice, local_slices, local_tensor, splits_of
from ligermodels.parallel.ranks import (
    error_on_all_ranks,
    from_rank_0,
    gathered,
    is_distributed,
    rank,
)
from ligermodels.parallel.state import SlicedTensor
from ligermodels.training import sharded_checkpoints
from ligermodels.training.files import PART, atomic_write, writing
from ligermodels.training.optimizers import allocate_state, state_of

_FACTS = "ligermodels"  # the key of the file's metadata
_NAME = re.compile(r"step-(\d{8,18})(\.safetensors)?")


class Checkpoints:
    """The checkpoints in a folder. `run` is a hash that tells the run from others."""

    def __init__(self, folder: Path, run: str = "") -> None:
        self.folder = folder
        self.run = run

    def files(self) -> dict[int, Path]:
        """Return the file of each step, in the order of the steps.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        found = {}
        for name in names_if_present(self.folder, CheckpointError) or ():
            path = self.folder / name
            match = _NAME.fullmatch(name)
            if match and (match[2] or sharded_checkpoints.is_whole(path)):
                found[int(match[1])] = path
        return dict(sorted(found.items()))

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint, or None if there is none."""
        return max(self.files(), default=None)

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write the state after `step` steps. Every rank must call it.

        Raises:
            LigerError: a value is not finite, so that nobody could go on from this state.
            SaveError: the file cannot be written.
        """
        if name := first_not_finite(named_state(model, optimizer)):
            raise LigerError(
                f"step {step}: the update makes {name} infinite or NaN, so no checkpoint is "
                "written; try a lower learning rate or a longer warm-up"
            )
        facts = {"step": step, "run": self.run}
        if is_distributed():
            folder = self.folder / f"step-{step:08d}"
            sharded_checkpoints.write(folder, _stored(model, optimizer), facts)
            return folder
        file = self.folder / f"step-{step:08d}.safetensors"
        tensors = {name: tensor.cpu() for name, tensor in named_state(model, optimizer)}
        facts["sha256"] = _seal(facts, digests(tensors, lambda name: [tensors[name]]))
        # safetensors writes several keys in an order that changes from process to process.
        metadata = {_FACTS: json.dumps(facts)}
        with writing(file):
            self.folder.mkdir(exist_ok=True)
        atomic_write(file, lambda path: save_file(tensors, path, metadata))
        return file

    def load(
        self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Copy the state after `step` steps into the model and a fresh optimizer.

        Without an optimizer, copy only the weights, which may be of any run.

        Every rank must call it.

        Raises:
            CheckpointError: the file is damaged, or belongs to another model, step or run. Nothing
                was changed, unless the file was changed while it was read.
        """
        path = from_rank_0(self.files()[step] if rank() == 0 else None)
        if optimizer is not None:
            allocate_state(optimizer, step)
        try:
            if path.suffix:
                with error_on_all_ranks(CheckpointError):
                    self._load(step, path, model, optimizer)
            else:
                self._load_folder(step, path, model, optimizer)
        except CheckpointError as error:
            first, *rest = str(error).split("\n")
            first += f"; {way_out(path)}"
            raise CheckpointError("\n".join([first, *rest])) from None

    def _load(
        self, step: int, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        file = SafetensorsFile(path)
        _match(file, _expected(model, optimizer), "" if optimizer else _WEIGHTS)
        text = file.metadata.get(_FACTS, "{}").encode(errors="surrogatepass")
        facts = parse_json(text, f"{path} (header)", CheckpointError)
        if facts.pop("sha256", None) != _seal(facts, digests(file.tensors, file.read)):
            raise CheckpointError(f"{path}: the content does not match its checksum")
        counts = {_value(file, name).item() for name in file.tensors if name.startswith(_COUNT)}
        if facts.get("step") != step or counts - {step}:
            raise CheckpointError(
                f"{path}: the name says step {step}, but the file holds step "
                f"{short_repr(facts.get('step'))}"
            )
        if optimizer is not None:
            self._check_run(path, facts)
        for name, stored in _stored(model, optimizer).items():
            for part in stored.parts:
                _copy(file, name, part, stored.shape)
        file.close()

    def _load_folder(
        self, step: int, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        with error_on_all_ranks(CheckpointError):
            facts = sharded_checkpoints.facts_of(path)
            if facts.get("step") != step:
                raise CheckpointError(
                    f"{path}: the name says step {step}, but the folder holds step "
                    f"{short_repr(facts.get('step'))}"
                )
            if optimizer is not None:
                self._check_run(path, facts)
        prefix = "" if optimizer else _WEIGHTS
        sharded_checkpoints.read(path, _stored(model, optimizer), prefix=prefix)

    def _check_run(self, path: Path, facts: Mapping[str, Any]) -> None:
        if facts.get("run") != self.run:
            raise CheckpointError(
                f"{path}: the file belongs to a run with another model, other data or options"
            )

    def prune(self, keep: int) -> None:
        """Remove all except the newest `keep` checkpoints, and files that a kill cut short."""
        files = list(self.files().values())
        for old in files[: max(0, len(files) - keep)]:
            _remove(old)
        for name in names_if_present(self.folder, CheckpointError) or ():
            path = self.folder / name
            match = _NAME.fullmatch(name.removesuffix(PART))
            whole = not name.endswith(PART) and (
                match is None or match[2] is not None or sharded_checkpoints.is_whole(path)
            )
            if match and not whole:
                _remove(path)

    def clear(self) -> None:
        """Remove all checkpoints, and the folder if nothing else is in it."""
        self.prune(0)
        with contextlib.suppress(OSError):  # It is absent, or something else is in it.
            self.folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        sharded_checkpoints.remove(path)
    else:
        with writing(path):
            path.unlink()


def named_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that resuming needs: trained weights and optimizer's state, by name."""
    for name, parameter in _trained(model):
        yield f"{_WEIGHTS}{name}", parameter.detach()
        for key, value in () if optimizer is None else state_of(optimizer, parameter):
            yield f"optimizer.{key}.{name}", value


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, x) for name, x in model.named_parameters() if x.requires_grad)


def way_out(path: Path) -> str:
    """Return what to do about a checkpoint that cannot be resumed from: a file, or a folder."""
    what = "the file" if path.suffix else f"the folder {path}"
    return f"remove {what} to resume from an earlier checkpoint"


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
    return dict(zip(names, in_threads(digest, names)))


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _seal(facts: Mapping[str, Any], tensors: Mapping[str, str]) -> str:
    return fingerprint({"facts": dict(facts), "tensors": dict(tensors)})


_WEIGHTS = "model."
_COUNT = "optimizer.step."


def _stored(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, sharded_checkpoints.Stored]:
    """Return this rank's parts of the weights and of the optimizer's state, by name."""
    splits, found = splits_of(model), {}
    for name, parameter in _trained(model):
        split = splits.get(name)
        tensors = {"model": parameter.detach()}
        if optimizer is not None:
            tensors |= {f"optimizer.{key}": each for key, each in state_of(optimizer, parameter)}
        for kind, tensor in tensors.items():
            if kind != "optimizer.step":
                shape = tuple(tensor.shape) if split is None else split.shape
                parts = local_slices(tensor, split)
                if rank() and split is None and not is_sharded(tensor):  # rank 0 stores it
                    parts = [replace(part, is_copy=True) for part in parts]
                found[f"{kind}.{name}"] = sharded_checkpoints.Stored(shape, tensor.dtype, parts)
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
    state: dict[str, Tensor] = {
        name: SlicedTensor(each.shape, each.dtype, each.parts)
        for name, each in _stored(model, optimizer).items()
    }
    if optimizer is not None:
        for name, parameter in _trained(model):
            counts = {key: each for key, each in state_of(optimizer, parameter) if key == "step"}
            state |= {f"{_COUNT}{name}": each for each in counts.values()}
    return state


def _expected(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and the shape of each tensor of a checkpoint."""
    found = {name: (each.dtype, each.shape) for name, each in _stored(model, optimizer).items()}
    counts = (name for name, _ in named_state(model, optimizer) if name.startswith(_COUNT))
    return found | dict.fromkeys(counts, (torch.float32, ()))


def _match(
    file: SafetensorsFile,
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    prefix: str,
) -> None:
    """Raise CheckpointError unless a file has exactly the expected tensors with that prefix."""
    held = {
        name: (READABLE.get(info.dtype), info.shape)
        for name, info in file.tensors.items()
        if name.startswith(prefix)
    }
    names = sorted(held.keys() | expected.keys())
    wrong = [name for name in names if held.get(name) != expected.get(name)]
    if not wrong:
        return
    first = wrong[0]
    if first not in held:
        what = "is missing"
    elif first not in expected:
        what = "is no tensor of this model"
    else:
        (dtype, shape), info = expected[first], file.tensors[first]
        what = f"is {info.dtype} of shape {[*info.shape]}, expected {dtype} of shape {[*shape]}"
    raise CheckpointError(
        f"{file.path}: {short_repr(first)} {what}: the checkpoint is damaged or belongs to another "
        f"model\n{listing(wrong)}"
    )


def _value(file: SafetensorsFile, name: str) -> Tensor:
    """Return a tensor of shape ()."""
    (part,) = file.read(name)
    return part.reshape(()).clone()


def _copy(file: SafetensorsFile, name: str, part: TensorSlice, shape: tuple[int, ...]) -> None:
    rows, at = part.values.view(part.values.shape or (1,)), 0
    last = part.row + len(rows)
    if rows.shape[1:] == shape[1:]:
        pieces = file.read(name, part.row, last)
    else:
        columns = part.column, part.column + rows.shape[1]
        pieces = file.read_columns(name, part.row, last, columns)
    for piece in pieces:
        rows[at : at + len(piece)].copy_(piece)
        at += len(piece)
