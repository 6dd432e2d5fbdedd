"""The memory plan: what each layer of a model keeps for backward, and where it keeps it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import Self

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import KEEPS, Keep


@dataclass(frozen=True)
class LayerPlan:
    """What one layer keeps for backward.

    Attributes:
        keep: the level; the table in `ligermodels.layers.recompute` says what each one keeps.
        host: whether the kept tensors are in pinned host memory until backward.
    """

    keep: Keep = "all"
    host: bool = False

    def __post_init__(self) -> None:
        if self.keep not in KEEPS:
            raise ConfigError(f"memory plan: keep={self.keep!r}; expected one of {KEEPS}")

    def __str__(self) -> str:
        return f"{self.keep}, in host memory" if self.host else self.keep


@dataclass(frozen=True)
class MemoryPlan:
    """What each layer keeps for backward.

    No plan changes a gradient, except that `mlp_tile` changes the order of the sums in the weight
    gradients of the MLPs.

    Attributes:
        layers: one `LayerPlan` for each layer.
        mlp_tile: the tokens that the MLP of a layer handles at once. None means all.
        host_budget: the most bytes of pinned host memory.
    """

    layers: tuple[LayerPlan, ...]
    mlp_tile: int | None = None
    host_budget: int = 0

    @classmethod
    def uniform(cls, num_layers: int, keep: Keep, *, host: bool = False, **options: Any) -> Self:
        """Return the plan in which all layers have the same level."""
        return cls((LayerPlan(keep, host),) * num_layers, **options)

    @classmethod
    def of(cls, keeps: Iterable[Keep | LayerPlan], **options: Any) -> Self:
        """Return a plan from the levels, or the plans, of the layers."""
        layers = (k if isinstance(k, LayerPlan) else LayerPlan(k) for k in keeps)
        return cls(tuple(layers), **options)

    @property
    def recomputes(self) -> bool:
        """Whether backward computes some layers again."""
        return any(layer.keep != "all" for layer in self.layers)

    @property
    def uses_host(self) -> bool:
        """Whether some layers keep their tensors in host memory."""
        return any(layer.host for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values. `from_dict` reads them."""
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the plan that `to_dict` has written.

        Raises:
            ConfigError: the values are not those of a plan.
        """
        try:
            layers = tuple(LayerPlan(**layer) for layer in values["layers"])
            return cls(**(values | {"layers": layers}))
        except (KeyError, TypeError) as fault:
            raise ConfigError(f"memory plan: not the values of a plan: {fault}") from None
