"""The division of a model over ranks, and its whole parameters again.

FSDP2 cuts a parameter into blocks of rows. Tensor parallelism gives a rank the rows of its own
heads, which are several ranges of rows in a packed projection, or a range of columns. Both at once
are blocks of rows of what tensor parallelism leaves. Sharded loads and saves read and write the
slices that a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from ligermodels.errors import SaveError
from ligermodels.layers.fusion import is_sharded, local_tensor
from ligermodels.layers.sequence_shard import SequenceShard
from ligermodels.ranks import led_by_rank_0

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TensorSlice:
    """A rectangle of a whole parameter.

    Attributes:
        values: its place in this rank's tensor, a view.
        row, column: where it begins in the whole parameter.
        is_copy: whether another rank of the tensor-parallel group holds it, too, and writes it.
    """

    values: Tensor
    row: int
    column: int = 0
    is_copy: bool = False

    @property
    def offsets(self) -> tuple[int, ...]:
        """Its first index in each dimension of the whole parameter."""
        return (self.row, self.column, *(0 for _ in self.values.shape[2:]))[: self.values.dim()]

    def place_in(self, whole: Tensor) -> Tensor:
        """Return its place in a whole parameter, a view."""
        ends = map(sum, zip(self.offsets, self.values.shape))
        return whole[tuple(map(slice, self.offsets, ends))]


@dataclass(frozen=True)
class IndexRange:
    """Neighbouring rows (or columns) `start` to `start + size` of a whole parameter.

    In the rank's tensor they begin at `local`. See `TensorSlice` for is_copy.
    """

    start: int
    local: int
    size: int
    is_copy: bool = False


Ranges = tuple[tuple[IndexRange, ...], ...]  # those that each rank of a group holds


@dataclass(frozen=True)
class TensorSplit:
    """The cut of a parameter by tensor parallelism.

    Attributes:
        shape: of the whole parameter.
        dim: 0 if it is cut into rows, 1 if into columns.
        ranges: the ranges that each rank of the group holds.
        mesh: of the tensor-parallel group, with one dimension.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: Ranges
    mesh: DeviceMesh

    @property
    def mine(self) -> tuple[IndexRange, ...]:
        """The ranges of this rank."""
        return self.ranges[self.mesh.get_local_rank()]

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole parameter, made of the tensors of all ranks of the group.

        The ranks send their ranges in turn; rows go straight into the result.
        """
        group, out = self.mesh.get_group(), local.new_empty(self.shape)
        for rank, ranges in enumerate(self.ranges):
            source = dist.get_global_rank(group, rank)
            for each in ranges:
                if each.is_copy:
                    continue
                here = out.narrow(self.dim, each.start, each.size)
                if rank == self.mesh.get_local_rank():
                    here.copy_(local.narrow(self.dim, each.local, each.size))
                piece = here.contiguous()  # rows already are
                dist.broadcast(piece, source, group=group)
                here.copy_(piece)
        return out


def local_slices(tensor: Tensor, split: TensorSplit | None = None) -> list[TensorSlice]:
    """Return what this rank holds of a parameter, or of a tensor that is sharded like it.

    Args: split: how tensor parallelism has cut the parameter, or None.
    """
    values, first = local_tensor(tensor).detach(), _first_row(tensor)
    if not values.numel():
        return []
    if split is None:
        return [TensorSlice(values, first)]
    if split.dim:
        (columns,) = split.mine
        return [TensorSlice(values, first, columns.start, columns.is_copy)]
    slices = []
    for rows in split.mine:
        begin = max(first, rows.local)
        end = min(first + len(values), rows.local + rows.size)
        if begin < end:
            here = values[begin - first : end - first]
            row = rows.start + begin - rows.local
            slices.append(TensorSlice(here, row, is_copy=rows.is_copy))
    return slices


def whole_tensor(tensor: Tensor, split: TensorSplit | None = None) -> Tensor:
    """Return a whole parameter on this rank. Every rank must call it."""
    whole: Any = tensor.detach()
    if is_sharded(whole):
        # A mesh of one rank has nothing to gather, and full_tensor would copy.
        whole = whole.to_local() if whole.device_mesh.size() == 1 else whole.full_tensor()
    return whole if split is None else split.whole(whole)


def reshard(model: nn.Module) -> None:
    """Let a model have its sharded parameters again.

    After a forward without backward, FSDP2 still has gathered ones in their place.
    """
    for module in model.modules():
        if callable(own := getattr(module, "reshard", None)):  # FSDPModule has it
            own()


@dataclass
class ModelLayout:
    """The division of one model over ranks; it is the model's `layout`.

    Attributes:
        tensors: how tensor parallelism has cut parameters, by name; {} without it.
        rows: the part of each row that this rank computes under context parallelism, or None.
        data: the mesh of the ranks that gradients are averaged over, or None.
    """

    tensors: dict[str, TensorSplit] = field(default_factory=dict)
    rows: SequenceShard | None = None
    data: DeviceMesh | None = None

    @staticmethod
    def of(model: Any) -> ModelLayout:
        """Return the layout of a model, which gets an empty one if it has none."""
        if model.layout is None:
            model.layout = ModelLayout()
        layout: ModelLayout = model.layout
        return layout

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shapes of the parameters whose own shapes are those of this rank."""
        return {name: split.shape for name, split in self.tensors.items()}

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of a tensor over the ranks that gradients are averaged over, float32."""
        x = x.float()
        if self.data is None or x.is_meta:  # a simulation has one process
            return x
        x = x / self.data.size()
        for dim in range(self.data.ndim):
            dist.all_reduce(x, group=self.data.get_group(dim))
        return x

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole parameter on this rank. Every rank must call it."""
        return whole_tensor(tensor, self.tensors.get(name))

    def save(
        self, weights: Mapping[str, Tensor], write: Callable[[Callable[[str], Tensor]], None]
    ) -> None:
        """Call `write(get)` on rank 0, where `get(name)` returns a whole parameter.

        Every rank must call it.

        Raises: what `write` raises; on the other ranks SaveError, with the first line of that.
        """
        led_by_rank_0(write, lambda name: self.whole(name, weights[name]), SaveError)


def layout_of(model: Any) -> ModelLayout | None:
    """Return how a model is divided over ranks, or None if this rank has all of it.

    PyTorch's own `fully_shard` leaves no layout, only sharded parameters.
    """
    found: ModelLayout | None = model.layout
    if found is None and (
        any(map(is_sharded, model.parameters()))
        or any(hasattr(module, "reshard") for module in model.modules())
    ):
        return ModelLayout()
    return found


def splits_of(model: nn.Module) -> dict[str, TensorSplit]:
    """Return how tensor parallelism has cut the parameters of a model, by name; {} without it."""
    layout = getattr(model, "layout", None)
    return {} if layout is None else layout.tensors


def _first_row(tensor: Any) -> int:
    """Return the place of this rank's first row in a tensor that FSDP2 may have sharded."""
    if not is_sharded(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    assert not any(offsets[1:]), "FSDP2 shards rows"
    return offsets[0]
