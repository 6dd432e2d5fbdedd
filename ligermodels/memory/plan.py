"""The memory plan: what each layer of a model keeps for backward, and where it keeps it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import Self

from ligermodels.errors import ConfigError, short_repr
from ligermodels.layers.recompute import POLICIES, CheckpointingPolicy
from ligermodels.memory.byte_sizes import integer
from ligermodels.pictures import ORDER, picture

NO_LIMIT = 2**62  # bytes


@dataclass(frozen=True)
class LayerPlan:
    """The tensors that one layer keeps for backward.

    Attributes:
        policy: the checkpointing policy; `ligermodels.layers.recompute` has a table of them.
        host: whether the kept tensors are in pinned host memory until backward.
        tile: the tokens that the MLP handles at once. None means all.
        float8: whether some kept tensors are in float8, which rounds them, in a layer whose linears
            compute in float8.
    """

    policy: CheckpointingPolicy = "all"
    host: bool = False
    tile: int | None = None
    float8: bool = False

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, *POLICIES)
        check_choice("host", self.host, True, False)
        check_choice("float8", self.float8, True, False)
        if self.tile is not None:
            _set(self, tile=checked_integer("tile", self.tile, 1))

    def __str__(self) -> str:
        rounded = ", in float8" if self.float8 else ""
        where = ", in host memory" if self.host else ""
        tiles = f", MLP in tiles of {self.tile} tokens" if self.tile else ""
        return f"{self.policy}{rounded}{where}{tiles}"


@dataclass(frozen=True)
class Prediction:
    """The planner's prediction for a plan.

    Attributes:
        batch, seq: the shape of the batch.
        budget: bytes on the GPU.
        peak_bytes: the most bytes at any time of a step, those of
            `torch.cuda.max_memory_allocated`.
        reserved_bytes: the most bytes that PyTorch's allocator reserves for them, those of
            `torch.cuda.max_memory_reserved`. If segments were expandable when the plan was made,
            they are those of expandable segments, which are fewer.
        weight_bytes, grad_bytes, optimizer_bytes: the part of parameters and buffers, of all
            gradients, and of the optimizer's states.
        reserve_bytes: the part of the budget that is left free.
        host_bytes: bytes in pinned host memory.
        seconds: of forward and backward. None in a run whose layers keep everything, which does not
            measure the GPU.
        gains: (further bytes, seconds) for larger budgets that make the step faster.
        layer_bytes: what each layer keeps, on the GPU or in host memory.
    """

    batch: int
    seq: int
    budget: int
    peak_bytes: int
    reserved_bytes: int
    weight_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    reserve_bytes: int
    host_bytes: int
    seconds: float | None
    gains: tuple[tuple[int, float], ...] = ()
    layer_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """The tensors that each layer keeps for backward.

    No plan changes a gradient, but the order of two sums may change: with tiles, that of the weight
    gradients of a layer's MLP and of the norm before it; with a smaller chunk of the head, that of
    the head's weight gradient. A layer that keeps tensors in float8 rounds what it keeps.

    Attributes:
        layers: one `LayerPlan` for each layer.
        host_budget: the most bytes of pinned host memory. By default there is no limit.
        head_chunk: the tokens that the loss head handles at once, unless its chunk_size or its
            max_scratch_bytes is given. None means the head's own default.
        prediction: the planner's prediction, or None if the plan was written by hand.
    """

    layers: tuple[LayerPlan, ...]
    host_budget: int = NO_LIMIT
    head_chunk: int | None = None
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        if wrong := [layer for layer in layers if not isinstance(layer, LayerPlan)]:
            raise ConfigError(f"memory plan: layer {short_repr(wrong[0])}; expected a LayerPlan")
        host_budget = checked_integer("host_budget", self.host_budget, 0)
        _set(self, layers=layers, host_budget=host_budget)
        if self.head_chunk is not None:
            _set(self, head_chunk=checked_integer("head_chunk", self.head_chunk, 1))

    @classmethod
    def uniform(
        cls, num_layers: int, layer: CheckpointingPolicy | LayerPlan, **options: Any
    ) -> Self:
        """Return the plan in which all layers have the same checkpointing policy, or plan."""
        return cls.of([layer] * checked_integer("num_layers", num_layers, 0), **options)

    @classmethod
    def of(cls, layers: Iterable[CheckpointingPolicy | LayerPlan], **options: Any) -> Self:
        """Return a plan from the checkpointing policies, or the plans, of the layers.

        Args: options: `host_budget` and `head_chunk`.
        """
        return cls(
            tuple(x if isinstance(x, LayerPlan) else LayerPlan(x) for x in layers), **options
        )

    @property
    def recomputes(self) -> bool:
        """Whether backward computes parts of some layers again."""
        return any(layer.policy != "all" or layer.tile is not None for layer in self.layers)

    @property
    def uses_host(self) -> bool:
        """Whether some layers keep their tensors in host memory."""
        return any(layer.host for layer in self.layers)

    def __str__(self) -> str:
        """Return a table of the layers by their plans, then the prediction."""
        groups: dict[LayerPlan, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault(layer, []).append(index)
        lines = [f"{len(at):4} {keeping(len(at))} {x}: {ranges(at)}" for x, at in groups.items()]
        if self.recomputes or self.uses_host:
            lines.append(f"what each layer keeps: {self.bars()}")
        if self.head_chunk is not None:
            lines.append(f"the loss head handles {self.head_chunk} tokens at once")
        if (said := self.prediction) is not None:
            gib = 2**30
            lines += [
                f"batch {said.batch} x seq {said.seq}: predicted peak {said.peak_bytes / gib:.2f} "
                f"GiB, reserved {said.reserved_bytes / gib:.2f} GiB, budget "
                f"{said.budget / gib:.2f} GiB",
                f"  of them weights {said.weight_bytes / gib:.2f}, gradients "
                f"{said.grad_bytes / gib:.2f}, optimizer {said.optimizer_bytes / gib:.2f} GiB; "
                f"host memory {said.host_bytes / gib:.2f} GiB",
            ]
            if said.seconds is not None:
                lines.append(f"predicted time of forward and backward: {said.seconds * 1e3:.0f} ms")
            lines += [
                f"  with {more / gib:.0f} GiB more: {seconds * 1e3:.0f} ms"
                for more, seconds in said.gains
            ]
        return "\n".join(lines)

    def bars(self) -> str:
        """Return a bar for each layer, as high as what it keeps; ▒ is in host memory."""
        sizes = self._sizes()
        top = max(sizes, default=0) or 1
        bars = ("▁▂▃▄▅▆▇█"[round(7 * size / top)] for size in sizes)
        return "".join("▒" if layer.host else bar for layer, bar in zip(self.layers, bars))

    def plot(self) -> Any:
        """Return a figure of matplotlib: what each layer keeps, in the colour of its plan.

        `figure.savefig("plan.png")` writes it. A plan without a prediction has no bytes, and shows
        the place of its policies from the one that keeps least to the one that keeps all.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        said, names = self.prediction, list(dict.fromkeys(map(str, self.layers)))
        sizes = [size / 2**30 if said else size for size in self._sizes()]
        with picture(8, 3.4) as figure:
            axes = figure.add_subplot()
            for number, name in enumerate(names):
                at = [i for i, layer in enumerate(self.layers) if str(layer) == name]
                label = f"{name} ({len(at)})"
                heights = [sizes[i] for i in at]
                axes.bar(at, heights, color=ORDER[number % len(ORDER)], label=label)
            axes.set(xlabel="layer", ylabel="GiB kept for backward" if said else "policy")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.margins(x=0.01)
            if said is not None:
                axes.set_title(
                    f"{said.batch} x {said.seq} tokens: predicted peak "
                    f"{said.peak_bytes / 2**30:.1f} of {said.budget / 2**30:.1f} GiB"
                )
            figure.legend(loc="outside lower center", ncols=2)
        return figure

    def _sizes(self) -> tuple[int, ...]:
        """Return what each layer keeps, in bytes, or without a prediction as a rank."""
        if self.prediction is not None and self.prediction.layer_bytes:
            return self.prediction.layer_bytes
        return tuple(len(POLICIES) - POLICIES.index(layer.policy) for layer in self.layers)

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
            prediction = values.get("prediction")
            if prediction is not None:
                gains = tuple(map(tuple, prediction["gains"]))
                kept = tuple(prediction.get("layer_bytes", ()))
                prediction = Prediction(**(prediction | {"gains": gains, "layer_bytes": kept}))
            return cls(**(values | {"layers": layers, "prediction": prediction}))
        except (AttributeError, KeyError, TypeError, ValueError) as fault:
            raise ConfigError(f"memory plan: not the values of a plan: {fault}") from None


def checked_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a Python or numpy integer as an int; raise ConfigError for other values."""
    number = integer(value)
    if number is None or number < least or (most is not None and number > most):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        raise ConfigError(
            f"memory plan: {name}={short_repr(value)}; expected an integer of {limits}"
        )
    return number


def check_choice(name: str, value: Any, *choices: object) -> None:
    """Raise ConfigError unless a value is one of the choices."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        *others, last = map(repr, choices)
        expected = f"{', '.join(others)} or {last}"
        raise ConfigError(f"memory plan: {name}={short_repr(value)}; expected {expected}")


def _set(plan: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass that is being made."""
    for name, value in values.items():
        object.__setattr__(plan, name, value)


def keeping(count: int) -> str:
    """Return the subject and the verb of what a number of layers keep."""
    return "layer keeps" if count == 1 else "layers keep"


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text, such as "0-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
