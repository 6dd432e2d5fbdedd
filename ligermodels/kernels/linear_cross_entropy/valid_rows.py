"""Leaving out the rows whose target is ignored: instruction tuning ignores most of them."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_count


def valid_rows(
    targets: Tensor, ignore_index: int, skip_ignored: bool, max_valid: int | None
) -> Tensor | None:
    """Positions of the targets that count, or None where all rows are to be taken.

    Args: targets (rows) int64; max_valid, an upper bound on how many count that the host knows.
    Returns: (valid) int64, found with one synchronisation; or (min(max_valid, rows)) without any,
        `rows` itself behind the valid ones. What a bound too small leaves out is NaN in `put_rows`.
    Raises:
        ValueError: max_valid is no count, has nothing to bound, or (on CPU in eager mode) is too
            small.
        RuntimeError: the count would have to be read back under torch.compile or graph capture.
    """
    if max_valid is not None:
        if not skip_ignored:
            raise ValueError(
                f"loss head: max_valid={max_valid} bounds the rows taken under skip_ignored; "
                "set skip_ignored=True"
            )
        max_valid = check_count("loss head", "max_valid", max_valid, 0)
    rows = len(targets)
    if not skip_ignored or rows == 0:
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


def take_targets(targets: Tensor, index: Tensor, ignore_index: int) -> Tensor:
    """The targets at these positions, ignore_index at the padding behind them."""
    rows = len(targets)
    taken = targets[index.clamp(max=rows - 1)]
    return torch.where(index < rows, taken, ignore_index)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of x at these positions; padding is zero, whatever the rows left out hold."""
    taken = x.index_select(0, index.clamp(max=len(x) - 1))
    return taken.masked_fill(index[:, None] == len(x), 0.0)


def put_rows(values: Tensor, index: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Values of the rows taken, back in the place of each; 0 where the target is ignored.

    Differentiable in values. A valid target that was left out gets NaN.
    """
    rows = values.new_zeros(len(targets) + 1)  # one to spare for the padding
    if values.is_floating_point():
        rows[:-1].masked_fill_(targets != ignore_index, float("nan"))
    return rows.index_copy(0, index, values)[:-1]
