"""What an entry of the table and a case are, random inputs, and peers, if they are installed."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Sizes = dict[str, Any]


class Absent(Exception):
    """A peer that is not installed here, or that this PyTorch does not have."""


class _AbsentModule:
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        raise Absent(self.reason)


def peer(name: str) -> Any:
    """The module, or a stand-in whose every attribute raises Absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return _AbsentModule(str(error))


liger = peer("liger_kernel.transformers.functional")
liger_ops = peer("liger_kernel.ops")
cce = peer("cut_cross_entropy")


@dataclasses.dataclass
class Implementation:
    """A function, and what differs from the case where it takes other inputs."""

    function: Function
    inputs: Callable[[], list[Tensor]] | None = None
    bytes: tuple[int, int] | None = None


@dataclasses.dataclass
class Case:
    """One op at one size.

    inputs: makes the leaves that every implementation without inputs of its own takes.
    bytes: the fewest, forward and forward + backward; None where matrix products are the floor.
    products: rows, in and out of a linear's three matrix products; a head's out is the vocabulary.
    forward_products: how often the first is needed, more than once by a head that keeps no logits.
    """

    inputs: Callable[[], list[Tensor]]
    implementations: dict[str, Function | Implementation]
    bytes: tuple[int, int] | None = None
    products: tuple[int, int, int] | None = None
    forward_products: int = 1

    def implementation(self, name: str) -> Implementation:
        """The implementation of that name, its inputs and bytes filled in."""
        entry = self.implementations[name]
        if not isinstance(entry, Implementation):
            entry = Implementation(entry)
        return Implementation(
            entry.function, entry.inputs or self.inputs, entry.bytes or self.bytes
        )


class Random:
    """Inputs from a generator of its own: a capture that fails leaves the default one unusable."""

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """A leaf that requires a gradient."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return tensor.normal_(0, scale, generator=self.generator).requires_grad_()

    def targets(self, rows: int, vocab: int, ignored: float = 0.0) -> Tensor:
        """Token ids, the given share of them -100 at random places."""
        targets = torch.randint(
            vocab, (rows,), device=self.device, generator=self.generator, dtype=torch.int64
        )
        order = torch.randperm(rows, device=self.device, generator=self.generator)
        targets[order[: round(rows * ignored)]] = -100
        return targets

    def angles(self, seq: int, half: int) -> tuple[Tensor, Tensor]:
        """cos and sin (1, seq, half), float32."""
        angles = 6 * torch.rand(1, seq, half, device=self.device, generator=self.generator)
        return angles.cos(), angles.sin()


@dataclasses.dataclass
class Op:
    """An op of the table: how to build its case, and at which sizes to measure it.

    label: its name in the tables. small: a size at which the device is never what is waited for,
    that of the host times and of the tests. table: the sizes of the tables. sweep: those of the
    plots, on top. rounds: how often to measure on the device, there and back; of each time the best
    counts. host: whether to measure host times. scratch: whether its scratch memory has a table.
    """

    label: str
    build: Callable[..., Case]
    small: Sizes
    table: list[Sizes]
    sweep: list[Sizes]
    rounds: int = 1
    host: bool = True
    scratch: bool = False


def sizes(names: str, *values: tuple[Any, ...]) -> list[Sizes]:
    """Sizes of these names, one for each tuple of values."""
    return [dict(zip(names.split(), value, strict=True)) for value in values]


def compiled(function: Function) -> Function:
    """As a user compiles it, for this very shape."""
    return torch.compile(function, dynamic=False)
