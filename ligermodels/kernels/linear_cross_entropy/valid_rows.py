"""Skip rows whose target is ignored. In instruction tuning these are often most of the rows."""

import torch
from torch import Tensor

from ligermodels.kernels.loss_options import ChunkOptions


def valid_rows(targets: Tensor, ignore_index: int, chunking: ChunkOptions) -> Tensor | None:
    """Return the positions of the targets that are not ignored, or None to take all rows.

    Args: targets: (rows) int64; chunking: its max_valid is an upper bound on the number of targets
        that are not ignored.
    Returns: without max_valid, int64 (valid), found with one host synchronisation. With max_valid,
        int64 (min(max_valid, rows)) without host synchronisation, padded at the end with the value
        `rows`. If the bound is too small, `scatter` gives NaN for the rows that do not fit.
    Raises:
        ValueError: max_valid is too small. Only CPU eager mode checks this.
        RuntimeError: max_valid is missing under torch.compile or CUDA graph capture.
    """
    rows, max_valid = len(targets), chunking.max_valid
    if not chunking.skip_ignored or rows == 0:
        return None
    valid = targets != ignore_index
    compiling = torch.compiler.is_compiling()
    if max_valid is None:
        if compiling or (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(
                "loss head: skip_ignored counts the targets on the host, and torch.compile and "
                "CUDA graph capture do not allow that; pass max_valid, an upper bound on the "
                "number of targets that are not ignored"
            )
        return valid.nonzero().squeeze(1)
    if targets.device.type == "cpu" and not compiling and int(valid.sum()) > max_valid:
        raise ValueError(
            f"loss head: max_valid={max_valid}, but {int(valid.sum())} targets differ from "
            f"ignore_index={ignore_index}; pass a larger max_valid"
        )
    return torch.nonzero_static(valid, size=min(max_valid, rows), fill_value=rows).squeeze(1)


def gather_targets(targets: Tensor, index: Tensor | None, ignore_index: int) -> Tensor:
    """Return the targets (rows) at these positions; padding gets ignore_index. None takes all."""
    if index is None:
        return targets
    rows = len(targets)
    gathered = targets[index.clamp(max=rows - 1)]
    return torch.where(index < rows, gathered, ignore_index)


def gather(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the rows of x at these positions; padding is exactly zero. None takes all rows."""
    if index is None:
        return x
    gathered = x.index_select(0, index.clamp(max=len(x) - 1))
    return gathered.masked_fill(index[:, None] == len(x), 0.0)


def scatter(values: Tensor, index: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    """Put the values (rows) or (rows, k) of gathered rows back: (...) or (..., k) as the targets.

    This is differentiable with respect to values. A row that was not gathered gets 0 if its target
    is ignored, and NaN otherwise.
    """
    shape = targets.shape + values.shape[1:]
    if index is not None:
        flat = targets.flatten()
        rows = values.new_zeros(len(flat) + 1, *values.shape[1:])  # one more for the padding
        if values.is_floating_point():
            wanted = (flat != ignore_index).view(-1, *[1] * (values.dim() - 1))
            rows[:-1].masked_fill_(wanted, float("nan"))
        values = rows.index_copy(0, index, values)[:-1]
    # FSDP2 warns of outputs of a model that are views. A few numbers of each token are soon copied.
    return values.view(shape).clone()


def zeros_to_scatter_into(hidden: Tensor) -> Tensor:
    """Return zeros for the gradients of gathered rows: hidden's shape and a row for padding."""
    return hidden.new_zeros(len(hidden) + 1, hidden.shape[1])
