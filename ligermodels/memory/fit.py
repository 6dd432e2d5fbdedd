"""Plan a model's memory: measure the device, simulate, search, and agree among ranks."""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch import nn

from ligermodels.errors import ConfigError, short_repr
from ligermodels.kernels.linear_cross_entropy.chunk_plan import Sizes, smaller_chunk
from ligermodels.layers.experts import Experts
from ligermodels.layers.loss_head import LossHead
from ligermodels.memory.byte_sizes import parse_bytes
from ligermodels.memory.optimizer import adam_bytes, memory_of
from ligermodels.memory.plan import NO_LIMIT, MemoryPlan, check_choice, checked_integer
from ligermodels.memory.planner import Budget, Space, find_plan, largest
from ligermodels.memory.rates import Rates, rates_of
from ligermodels.memory.simulate import LONGEST, Simulation, Step, simulate
from ligermodels.memory.torch_private import Sharding
from ligermodels.ranks import Result, from_rank_0, gathered, rank

# The part of a budget that is not planned for. Predictions of reserved bytes err by up to 1%, and
# by up to 1.3% where FSDP2 gathers parameters on its own streams. One row that was measured without
# expandable segments, which the command line turns on, reserved 1.7% more.
RESERVE, SHARDED_RESERVE = 0.01, 0.02
_PARTS = (4, 8)  # into which the tokens are divided where MLPs are tiled
_SMALLEST_TILE = 1024  # tokens


class Planner:
    """Plans training steps of a model.

    Call it on every rank of a distributed run. Rank 0 measures the device, the smallest budget of
    all ranks counts, also of host memory, and every rank gets the same answers.

    Args:
        model: a model that takes memory plans; its parameters and frozen parts count as they are.
        budget: bytes of GPU memory for everything in this process, as an int or a text such as
            "40GiB"; "auto" is the memory that is free, and what this process already holds.
        host_budget: bytes of pinned host memory, for this rank.
        count: "reserved" if the bytes that PyTorch's allocator reserves must fit the budget, or
            "allocated" if only those that tensors take must.
        reserve: the part of the budget that is left free. By default it is 0.01, and 0.02 for
            sharded parameters. Where reserved bytes count, at least as many bytes are left free as
            the largest tensor of a layer takes, unless the allocator's segments are expandable.
        rates: the device's rates. By default they are measured, or come from a data sheet if the
            device is not a GPU of this machine.
        device: the device to plan for; an integer is the number of a GPU. By default it is that of
            the parameters, and for a model on the meta device a GPU.
        optimizer_bytes: bytes of the optimizer's states, or the optimizer itself, which need not
            have made a step: see `memory_of`. Then what a step allocates counts, too. By default
            they are twice the bytes of the parameters that need gradients, as for a fused AdamW.
        step: what else a step consists of, the fields of `ligermodels.memory.simulate.Step`:
            autocast, packed, max_seqlen, head_options, gradients, step_module.
    Raises:
        ConfigError: a number of bytes cannot be read, "auto" is asked for without a GPU, an
            argument has a value or a type that is not named above or in `Step`, or parameters are
            sharded in another way than by `fully_shard`.
    """

    def __init__(
        self,
        model: Any,
        budget: int | str = "auto",
        host_budget: int | str = 0,
        *,
        count: Literal["reserved", "allocated"] = "reserved",
        reserve: float | None = None,
        rates: Rates | None = None,
        device: torch.device | str | int | None = None,
        optimizer_bytes: int | str | torch.optim.Optimizer | None = None,
        **step: Any,
    ) -> None:
        if isinstance(optimizer_bytes, torch.optim.Optimizer):
            optimizer_bytes, step["step_bytes"] = memory_of(optimizer_bytes)
        options = Step(**step)
        called = options.called(model)
        if optimizer_bytes is None:
            optimizer_bytes = adam_bytes(called)
        sharding = Sharding(model, called)  # it refuses shards that are not simulated
        if reserve is None:
            reserve = SHARDED_RESERVE if sharding.groups else RESERVE
        if not 0 <= reserve < 1:
            raise ConfigError(
                f"memory plan: reserve={short_repr(reserve)}; expected a number in [0, 1)"
            )
        check_choice("count", count, "reserved", "allocated")
        self.model, self.reserve, self._reserved = model, reserve, count == "reserved"
        self.device = _device(model, device)
        own = _budget(budget, self.device), min(parse_bytes(host_budget, "host_budget"), NO_LIMIT)
        self.budget, self.host_budget = map(min, zip(*gathered(own)))
        self.optimizer_bytes = parse_bytes(optimizer_bytes, "optimizer_bytes")
        dtypes = [parameter.gathered_dtype for parameter in sharding.parameters.values()]
        self._dtype = options.autocast or (dtypes or [next(model.parameters()).dtype])[0]
        self._given_rates, self._head_options, self._step = rates, options.head_options, step
        self._spaces = cache(self._new_spaces)

    @cached_property
    def rates(self) -> Rates:
        """The rates of the device."""
        if self._given_rates is not None:
            return self._given_rates
        return rates_of(self.device, self._dtype)

    @property
    def _whole_budget(self) -> Budget:
        return Budget(self.budget, self.optimizer_bytes, self.reserve)

    def plan(self, batch: int, seq: int, *, times: bool = True) -> MemoryPlan:
        """Return the fastest plan that fits the budget.

        Args:
            batch, seq: the shape of the largest batch; smaller ones, evaluation among them, need
                less.
            times: whether to predict the seconds of a step also if every layer keeps all and the
                loss head has its default chunk. Such a plan needs no rates of the GPU otherwise.
        Raises:
            ConfigError: the budget is too small; the message names the least bytes.
        """
        batch, seq = _length("batch", batch), _length("seq", seq)
        return _by_rank_0(
            lambda: find_plan(
                *self._spaces(batch, seq),
                budget=self._whole_budget,
                batch=batch,
                seq=seq,
                times=times,
            )
        )

    def least_bytes(self, batch: int, seq: int) -> int:
        """Return the smallest budget with which the step fits."""
        batch, seq = _length("batch", batch), _length("seq", seq)

        def least() -> int:
            spaces = self._spaces(batch, seq)
            return min(space.least_budget(self._whole_budget) for space in spaces)

        return _by_rank_0(least)

    def largest_batch(self, seq: int) -> int:
        """Return the largest batch that fits, within 2%, or 0."""
        seq = _length("seq", seq)
        return self._largest(lambda batch: (batch, seq), start=8)

    def largest_seq(self, batch: int) -> int:
        """Return the longest rows that fit, within 2%, or 0."""
        batch = _length("batch", batch)
        return self._largest(lambda seq: (batch, seq), start=1024)

    def _largest(self, shape: Callable[[int], tuple[int, int]], start: int) -> int:
        budget = self._whole_budget

        def needed(number: int) -> int:
            space = self._spaces(*shape(number))[-1]
            return space.peak(space.smallest, budget.slack)

        return _by_rank_0(lambda: largest(needed, budget.usable, start))

    def _new_spaces(self, batch: int, seq: int) -> list[Space]:
        """Return the plans with each chunk of the loss head, from the largest to the smallest."""
        tiles = [-(-batch * seq // parts) for parts in _PARTS]
        if all(any(isinstance(m, Experts) for m in x.modules()) for x in self.model.layers):
            tiles = []  # experts compute all tokens at once
        return [
            Space(
                partial(self._simulated, batch, seq),
                len(self.model.layers),
                lambda: self.rates,
                self.host_budget,
                [tile for tile in tiles if tile >= _SMALLEST_TILE],
                reserved=self._reserved,
                head_chunk=head_chunk,
                float8=self.model.has_float8,
            )
            for head_chunk in self._head_chunks(batch * seq)
        ]

    def _head_chunks(self, tokens: int) -> list[int | None]:
        """Return the head's default, and a smaller chunk if the default is all tokens at once."""
        head = getattr(self.model, "head", None)
        if not isinstance(head, LossHead):
            return [None]
        options = {**head.loss_options, **self._head_options}
        if any(options.get(name) is not None for name in ("chunk_size", "max_scratch_bytes")):
            return [None]
        accumulator = 4 * head.weight.numel() if head.weight.requires_grad else 0
        sizes = Sizes(tokens, head.vocab_size, self._dtype.itemsize, accumulator_bytes=accumulator)
        chunk = smaller_chunk(sizes)
        return [None] if chunk is None else [None, chunk]

    def _simulated(self, batch: int, seq: int, plan: MemoryPlan) -> Simulation:
        """Simulate a step under a plan, and give the model its own plan back."""
        before = self.model.memory_plan
        self.model.apply_memory_plan(plan)
        try:
            # A training step has gradients, also if it is planned where there are none. This
            # leaves torch.no_grad, too.
            with torch.inference_mode(False):
                return simulate(self.model, batch, seq, device=self.device, **self._step)
        finally:
            self.model.apply_memory_plan(before)


def _device(model: nn.Module, device: torch.device | str | int | None) -> torch.device:
    """Return the device to plan for; a model without data is planned for a GPU."""
    if device is None:
        device = next(model.parameters()).device
    # torch takes an integer only where there is a GPU.
    found = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    return torch.device("cuda") if found.type == "meta" else found


def _budget(budget: int | str, device: torch.device) -> int:
    if budget != "auto":
        return parse_bytes(budget, "budget")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            f'memory: the budget "auto" is what is free on a GPU, and there is none to ask for '
            f'{device}; give the bytes of the GPU that you plan for, such as "80GiB"'
        )
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def _length(name: str, value: int) -> int:
    return checked_integer(name, value, 1, LONGEST)


def _by_rank_0(compute: Callable[[], Result]) -> Result:
    """Return what rank 0 computes, or raise its error on every rank."""
    made: Any = None
    fault: BaseException | None = None
    if rank() == 0:
        try:
            made = compute()
        except BaseException as error:  # Ctrl-C, too: the other ranks wait for an answer
            fault = error
    made, fault = from_rank_0((made, fault))
    if fault is not None:
        raise fault
    return made
