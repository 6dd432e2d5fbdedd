"""The types of the tables, random inputs, and the peers that are installed."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Sizes = dict[str, Any]


class Absent(Exception):
    """The peer is not installed, or this PyTorch does not have it."""


class _AbsentModule:
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        raise Absent(self.reason)


def peer(name: str) -> Any:
    """Import a module; if it is missing, return an object whose attributes all raise Absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return _AbsentModule(str(error))


liger = peer("liger_kernel.transformers.functional")
liger_ops = peer("liger_kernel.ops")
cce = peer("cut_cross_entropy")


@dataclasses.dataclass
class Implementation:
    """A function, with its own inputs and bytes if they differ from those of the case."""

    function: Function
    inputs: Callable[[], list[Tensor]] | None = None
    bytes: tuple[int, int] | None = None


@dataclasses.dataclass
class Case:
    """One op at one size.

    inputs: makes the leaf tensors for every implementation that has no inputs of its own.
    bytes: the fewest bytes, forward and forward + backward; None if matrix products are the floor.
    products: rows, in_features and out_features of a linear's three matrix products. For a head,
        out_features is the vocabulary.
    forward_products: how often the logits are computed. A head that does not keep them computes
        them more than once.
    """

    inputs: Callable[[], list[Tensor]]
    implementations: dict[str, Function | Implementation]
    bytes: tuple[int, int] | None = None
    products: tuple[int, int, int] | None = None
    forward_products: int = 1

    def implementation(self, name: str) -> Implementation:
        """Return the implementation of that name, with its inputs and bytes filled in."""
        entry = self.implementations[name]
        if not isinstance(entry, Implementation):
            entry = Implementation(entry)
        return Implementation(
            entry.function, entry.inputs or self.inputs, entry.bytes or self.bytes
        )


class Random:
    """Random inputs from their own generator: a failed capture breaks the default generator."""

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return a normally distributed leaf tensor that requires a gradient."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return tensor.normal_(0, scale, generator=self.generator).requires_grad_()

    def targets(self, rows: int, vocab: int, ignored: float = 0.0) -> Tensor:
        """Return token ids. At random places, the share `ignored` of them is -100."""
        targets = torch.randint(
            vocab, (rows,), device=self.device, generator=self.generator, dtype=torch.int64
        )
        order = torch.randperm(rows, device=self.device, generator=self.generator)
        targets[order[: round(rows * ignored)]] = -100
        return targets

    def angles(self, seq: int, half: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (1, seq, half), float32."""
        angles = 6 * torch.rand(1, seq, half, device=self.device, generator=self.generator)
        return angles.cos(), angles.sin()


@dataclasses.dataclass
class Op:
    """An op of the table: how to build its case, and at which sizes to measure it.

    label: the name in the tables.
    small: the size for host times and tests, so small that the host never waits for the device.
    table: the sizes of the tables.
    sweep: the additional sizes of the plots.
    rounds: how often device times are measured, in alternating order; the best time counts.
    host: whether host times are measured.
    scratch: whether the scratch table has this op.
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
    """Return one dictionary of sizes for each tuple of values."""
    return [dict(zip(names.split(), value, strict=True)) for value in values]


def compiled(function: Function) -> Function:
    """Compile a function as a user does, for one shape."""
    return torch.compile(function, dynamic=False)
