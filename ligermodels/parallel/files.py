"""Read the slices of a checkpoint that belong to this rank of a sharded model."""

from __future__ import annotations

from tqdm import tqdm

from ligermodels.errors import CheckpointError
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.layout import local_slices, splits_of
from ligermodels.parallel.ranks import error_on_all_ranks, num_ranks, rank


def read_slices(model: DecoderModel) -> None:
    """Read this rank's slices of the parameters of a model that `from_hf(device="meta")` made.

    Every rank must call it, after it has allocated the parameters.

    Raises:
        CheckpointError: on any rank, a value is NaN or infinite, a file was changed after its
            header was read, or a tied head differs from the embedding. All ranks raise.
    """
    checkpoint, model.source.unread = model.source.unread, None
    assert checkpoint is not None, "from_hf was not called with device='meta'"
    weight_map, weights = model.weight_map(model.built_from), dict(model.named_parameters())
    splits, silent = splits_of(model), True if rank() else None
    with error_on_all_ranks(CheckpointError):
        checkpoint.check_aliases(weight_map, share=(rank(), num_ranks()))
        for entry in tqdm(weight_map.entries, "Loading weights", disable=silent):
            for each in local_slices(weights[entry.name], splits.get(entry.name)):
                checkpoint.read(entry, each.values, each.row, each.column)
    model.compute_buffers()
