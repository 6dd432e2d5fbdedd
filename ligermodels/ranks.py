"""Common steps of the ranks of a run: they gather tensors, raise errors and take turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from ligermodels.errors import LigerError, first_line

Result = TypeVar("Result")


def is_distributed() -> bool:
    """Return whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return the rank of this process, which is 0 if it is the only one."""
    return dist.get_rank() if is_distributed() else 0


def num_ranks() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def gathered(value: Result) -> list[Result]:
    """Return the values of all ranks, in their order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Result | None) -> Result:
    """Return rank 0's value on all ranks."""
    values = [value]
    if is_distributed():
        dist.broadcast_object_list(values, src=0)
    return values[0]  # type: ignore[return-value]


@contextmanager
def error_on_all_ranks(kind: type[LigerError] = LigerError) -> Iterator[None]:
    """End the context on all ranks together: if one of them raises, all raise.

    The work inside must not wait for other ranks, because a rank that has raised does not come.

    Raises: on a rank that did not raise itself, `kind` with the first line of the first error.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as fault:
        error = fault
    said = gathered(None if error is None else first_line(error))
    first = next((number for number, text in enumerate(said) if text is not None), None)
    if first is None:
        return
    if error is None:
        error = kind(said[first])
    if isinstance(error, LigerError):
        error.is_repeated = first != rank()
    raise error


class _Wanted(NamedTuple):
    """A message of rank 0: the name of the next tensor, or the end, and any error."""

    name: str | None = None
    error: str | None = None


def led_by_rank_0(
    work: Callable[[Callable[[str], Tensor]], None],
    gather: Callable[[str], Tensor | None],
    kind: type[LigerError],
) -> None:
    """Call `work(get)` on rank 0. For each tensor that it gets, all ranks call `gather(name)`.

    Only rank 0's result counts.

    Raises: what `work` raises; on the other ranks `kind`, with the first line of that error.
    """

    def get(name: str) -> Tensor:
        if is_distributed():
            from_rank_0(_Wanted(name))
        tensor = gather(name)
        assert tensor is not None, "rank 0 gets each tensor"
        return tensor

    if not is_distributed():
        return work(get)
    if rank():
        while (wanted := from_rank_0(_Wanted())).name is not None:
            gather(wanted.name)
        if wanted.error is not None:
            repeated = kind(wanted.error)
            repeated.is_repeated = True
            raise repeated
        return None

    error = None
    try:
        work(get)
    except BaseException as fault:
        error = first_line(fault)
        raise
    finally:
        from_rank_0(_Wanted(error=error))
