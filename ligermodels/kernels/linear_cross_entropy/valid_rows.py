"""Leaving out the rows whose target is ignored: instruction tuning ignores most of them."""

import torch
from torch import Tensor

from ligermodels.kernels.loss_options import ChunkOptions


def valid_rows(targets: Tensor, ignore_index: int, chunking: ChunkOptions) -> Tensor | None:
    """The positions of the targets that are not ignored, or None where all rows are taken.

    Args: targets (rows) int64; chunking.max_valid, an upper bound on how many are not ignored.
    Returns: int64 (valid), found with one host synchronisation; with max_valid (min(max_valid,
        rows)) without any, padded with `rows` behind the valid ones. Values of the rows that too
        small a bound leaves out are NaN in `scatter`.
    Raises:
        ValueError: max_valid is too small, found on CPU in eager mode alone.
        RuntimeError: the count would have to be read back under torch.compile or graph capture.
    """
    rows, max_valid = len(targets), chunking.max_valid
    if not chunking.skip_ignored or rows == 0:
        return None
    valid = targets != ignore_index
    compiling = torch.compiler.is_compiling()
    if max_valid is None:
        if compiling or (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(
                "loss head: skip_ignored counts the valid targets on the host, which "
                "torch.compile and CUDA graph capture cannot do; pass max_valid, an upper bound"
            )
        return valid.nonzero().squeeze(1)
    if targets.device.type == "cpu" and not compiling and int(valid.sum()) > max_valid:
        raise ValueError(
            f"loss head: max_valid={max_valid}, but {int(valid.sum())} targets are not "
            f"ignore_index={ignore_index}"
        )
    return torch.nonzero_static(valid, size=min(max_valid, rows), fill_value=rows).squeeze(1)


def gather_targets(targets: Tensor, index: Tensor | None, ignore_index: int) -> Tensor:
    """The targets (rows) at these positions, or all; ignore_index at the padding behind them."""
    if index is None:
        return targets
    rows = len(targets)
    gathered = targets[index.clamp(max=rows - 1)]
    return torch.where(index < rows, gathered, ignore_index)


def gather(x: Tensor, index: Tensor | None) -> Tensor:
    """The rows of x at these positions, or all; padding is zero, whatever the rest of x holds."""
    if index is None:
        return x
    gathered = x.index_select(0, index.clamp(max=len(x) - 1))
    return gathered.masked_fill(index[:, None] == len(x), 0.0)


def scatter(values: Tensor, index: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    """The values of gathered rows, back in the place of each, in the shape of the targets (...).

    Differentiable in values. A row that was not gathered is 0 where its target is ignored, and NaN
    where it is not.
    """
    if index is None:
        return values.view(targets.shape)
    flat = targets.flatten()
    rows = values.new_zeros(len(flat) + 1)  # one to spare for the padding
    if values.is_floating_point():
        rows[:-1].masked_fill_(flat != ignore_index, float("nan"))
    return rows.index_copy(0, index, values)[:-1].view(targets.shape)


def zeros_to_scatter_into(hidden: Tensor) -> Tensor:
    """Zeros of hidden's shape for the gradients of gathered rows, and a row for the padding."""
    return hidden.new_zeros(len(hidden) + 1, hidden.shape[1])
