"""The parts of a parameter that this rank holds, however the model is sharded.

FSDP2 cuts a parameter into blocks of rows. Tensor parallelism gives a rank the rows of its own
heads, which are several runs of rows in a packed projection, or a run of columns. Both at once are
blocks of rows of what tensor parallelism leaves. From the parts derive sharded loads and saves.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ligermodels.layers.fusion import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Parameters are sent in blocks of this size, because a copy of a block may exist meanwhile.
_SENT_BYTES = 2**26


@dataclass(frozen=True)
class Part:
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
        """Where it begins in each dimension of the whole parameter."""
        return (self.row, self.column, *(0 for _ in self.values.shape[2:]))[: self.values.dim()]

    def place_in(self, whole: Tensor) -> Tensor:
        """Return its place in a whole parameter, a view."""
        ends = map(sum, zip(self.offsets, self.values.shape))
        return whole[tuple(map(slice, self.offsets, ends))]


@dataclass(frozen=True)
class Run:
    """Neighbouring rows (or columns) `start` to `start + size` of a whole parameter.

    In the rank's tensor they begin at `local`. See `Part` for is_copy.
    """

    start: int
    local: int
    size: int
    is_copy: bool = False


@dataclass(frozen=True)
class TensorShard:
    """How tensor parallelism cuts a parameter.

    Attributes:
        shape: of the whole parameter.
        dim: 0 if it is cut into rows, 1 if into columns.
        runs: the runs that each rank of the group holds.
        mesh: of the tensor-parallel group, with one dimension.
    """

    shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[Run, ...], ...]
    mesh: "DeviceMesh"

    @property
    def mine(self) -> tuple[Run, ...]:
        """The runs of this rank."""
        return self.runs[self.mesh.get_local_rank()]

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole parameter, made of the tensors of all ranks of the group.

        The ranks send their runs in turn, straight into the result; columns go block by block.
        """
        group, out = self.mesh.get_group(), local.new_empty(self.shape)
        for rank, runs in enumerate(self.runs):
            source = dist.get_global_rank(group, rank)
            for run in runs:
                if run.is_copy:
                    continue
                here = out.narrow(self.dim, run.start, run.size)
                if rank == self.mesh.get_local_rank():
                    here.copy_(local.narrow(self.dim, run.local, run.size))
                for block in here.split(_rows_to_send(here)):
                    piece = block.contiguous()  # rows already are
                    dist.broadcast(piece, source, group=group)
                    if not block.is_contiguous():
                        block.copy_(piece)
        return out


def _rows_to_send(tensor: Tensor) -> int:
    """Return how many rows of a tensor are sent at once."""
    return max(1, _SENT_BYTES // max(1, tensor[:1].numel() * tensor.itemsize))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's values of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_parts(tensor: Tensor, cut: TensorShard | None = None) -> list[Part]:
    """Return the parts of a parameter, or of a tensor that is sharded like it, on this rank.

    Args: cut: how tensor parallelism has cut the parameter, or None.
    """
    values, first = local_tensor(tensor).detach(), _first_row(tensor)
    if not values.numel():
        return []
    if cut is None:
        return [Part(values, first)]
    if cut.dim:
        (run,) = cut.mine
        return [Part(values, first, run.start, run.is_copy)]
    parts = []
    for run in cut.mine:
        begin = max(first, run.local)
        end = min(first + len(values), run.local + run.size)
        if begin < end:
            here = values[begin - first : end - first]
            parts.append(Part(here, run.start + begin - run.local, is_copy=run.is_copy))
    return parts


def whole_tensor(tensor: Tensor, cut: TensorShard | None = None) -> Tensor:
    """Return a whole parameter on this rank. Every rank must call it."""
    whole: Any = tensor.detach()
    if is_sharded(whole):
        # A mesh of one rank has nothing to gather, and full_tensor would copy.
        whole = whole.to_local() if whole.device_mesh.size() == 1 else whole.full_tensor()
    return whole if cut is None else cut.whole(whole)


def whole_on_rank_0(tensor: Tensor, cut: TensorShard | None = None) -> Tensor | None:
    """Return a whole parameter on rank 0, and None or the same on others. Every rank must call it.

    `gathers_to_rank_0` must be true of it on every rank.
    """
    own = _rows_on_first_rank(tensor) if is_sharded(tensor) else tensor.detach()
    return own if own is None or cut is None else cut.whole(own)


def gathers_to_rank_0(tensor: Any, cut: TensorShard | None = None) -> bool:
    """Return whether a parameter is cut into rows, so that rank 0 can gather it.

    Rank 0 itself must also be the first of the parameter's mesh.
    """
    if not is_sharded(tensor):
        return True
    from torch.distributed.tensor import Shard

    # A subclass of Shard may put the rows in another order.
    kinds = [kind for kind in tensor.placements if not kind.is_replicate()]
    in_rows = len(kinds) <= 1 and all(type(kind) is Shard and kind.dim == 0 for kind in kinds)
    is_first = not any(tensor.device_mesh.get_coordinate() or (1,))
    if cut is not None:
        is_first = is_first and cut.mesh.get_local_rank() == 0
    return in_rows and (is_first or dist.get_rank() != 0)


def _rows_on_first_rank(tensor: Any) -> Tensor | None:
    """Return all rows of a DTensor on the first rank of its mesh, and None on the others."""
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    cut = next((d for d, kind in enumerate(tensor.placements) if not kind.is_replicate()), None)
    place = mesh.get_coordinate()
    if any(place[:cut] if cut is not None else place):
        return None  # The copies are the outer dimension, and the first one is enough.
    if cut is None or mesh.size(cut) == 1:
        return local
    group, ranks, is_first = mesh.get_group(cut), mesh.size(cut), place[cut] == 0
    rows = -(-tensor.shape[0] // ranks)
    part = local.contiguous()
    if len(part) < rows:
        part = local.new_zeros(rows, *local.shape[1:])
        part[: len(local)] = local
    every = local.new_empty(ranks * rows, *local.shape[1:]) if is_first else None
    # Gloo gathers into its own tensor, and copies from there.
    step = _rows_to_send(part) // ranks or 1
    for start in range(0, rows, step):
        piece = part[start : start + step].view(torch.uint8)
        received = None
        if every is not None:
            received = [x[start : start + step].view(torch.uint8) for x in every.chunk(ranks)]
        dist.gather(piece, received, dist.get_global_rank(group, 0), group)
    return None if every is None else every[: tensor.shape[0]]


def reshard(model: nn.Module) -> None:
    """Let a model have its sharded parameters again.

    After a forward without backward, FSDP2 still has gathered ones in their place.
    """
    for module in model.modules():
        if callable(own := getattr(module, "reshard", None)):  # FSDPModule has it
            own()


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
