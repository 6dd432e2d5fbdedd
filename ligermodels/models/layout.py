"""The interface of loading and saving to a model that is divided over ranks."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from ligermodels.layers.fusion import is_sharded
from ligermodels.layers.row_shard import RowShard


class Layout(Protocol):
    """The division of a model over ranks; `ligermodels.parallel.layout` makes it.

    Attributes: rows: the part of each row that this rank computes, or None if it computes all.
    """

    rows: RowShard | None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shapes of the parameters whose own shapes are those of this rank."""
        ...

    def reshard(self, model: nn.Module) -> None:
        """Let the model have this rank's parameters again, if a forward has left whole ones."""

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole parameter on this rank. Every rank must call it."""
        ...

    def save(
        self,
        weights: Mapping[str, Tensor],
        write: Callable[[Callable[[str], Tensor]], None],
    ) -> None:
        """Call `write(get)` on one rank, where `get(name)` returns a whole parameter.

        Every rank must call it, and it raises on all ranks or on none.
        """


def layout_of(model: Any) -> Layout | None:
    """Return how a model is divided over ranks, or None if this rank has all of it.

    PyTorch's own `fully_shard` leaves no layout, only sharded parameters.
    """
    found: Layout | None = model.layout
    if found is None and (
        any(map(is_sharded, model.parameters()))
        or any(hasattr(module, "reshard") for module in model.modules())
    ):
        from ligermodels.parallel.layout import ModelLayout

        found = ModelLayout()
    return found
