"""Memory plans of a model: what each layer keeps for backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import ConfigError, short_repr
from ligermodels.float8 import Float8Linear
from ligermodels.kernels.checks import check_count
from ligermodels.kernels.dispatch import simulator_of
from ligermodels.layers import AttentionContext, LossHead
from ligermodels.layers.recompute import set_policy
from ligermodels.memory.fit import Planner
from ligermodels.memory.offload import Copies, Offloader
from ligermodels.memory.plan import LayerPlan, MemoryPlan


class PlannedModel(nn.Module):
    """A decoder that takes memory plans. A base class of `DecoderModel`, which runs its layers."""

    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    head: LossHead

    def __init__(self) -> None:
        super().__init__()
        self._memory_plan: MemoryPlan | None = None
        self._offloaders: dict[torch.device, Offloader] = {}

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Keep only the input of each block for backward, which computes the block again.

        The arguments are those of transformers. They become a memory plan: see `set_memory_plan`.

        Args:
            activation_checkpointing_kwargs: None or {"use_reentrant": False}.
            every_n_layers: backward recomputes the blocks whose index is a multiple of this.
            offload: whether the inputs of these blocks are kept in host memory.
        Raises:
            ValueError: an argument asks for something that is not implemented.
            ConfigError: offload is asked for where there is no pinned memory.
        """
        if (options := activation_checkpointing_kwargs) not in (None, {}, {"use_reentrant": False}):
            raise ValueError(
                f"activation checkpointing: the options are {options!r}; only use_reentrant=False "
                "is implemented, which computes the same gradients as True. What a layer keeps is "
                "chosen by a memory plan, such as "
                'model.set_memory_plan(MemoryPlan.uniform(num_layers, "attention"))'
            )
        every = check_count("activation checkpointing", "every_n_layers", every_n_layers, 1)
        recomputed, kept = LayerPlan("input", host=offload), LayerPlan()
        count = len(self.layers)
        self.set_memory_plan(
            MemoryPlan(tuple(kept if i % every else recomputed for i in range(count)))
        )

    def activation_checkpointing_disable(self) -> None:
        """Keep the activations of every block for backward."""
        self.set_memory_plan(None)

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether backward recomputes some blocks."""
        return self._memory_plan is not None and self._memory_plan.recomputes

    def set_memory_plan(self, plan: MemoryPlan | None) -> None:
        """Choose what each layer keeps for backward, from the next forward on.

        Args: plan: a plan for this number of layers. None means that every layer keeps all.
        Raises:
            ConfigError: what is given is no plan, it has another number of layers, it keeps tensors
                in host memory and the model's device has no pinned memory, or it keeps tensors in
                float8 and no linear of the model computes in float8.
        """
        if plan is not None:
            if not isinstance(plan, MemoryPlan):
                raise ConfigError(
                    f"memory plan: {short_repr(plan)} is no MemoryPlan; make one with "
                    "model.plan_memory(batch, seq, budget), MemoryPlan.uniform or MemoryPlan.of, "
                    "or read a stored one with MemoryPlan.from_dict"
                )
            _check_layers(plan, len(self.layers))
        device = self.embed_tokens.weight.device
        if plan is not None and plan.uses_host and device.type not in ("cuda", "meta"):
            raise ConfigError(
                f"memory plan: it keeps tensors in host memory, but the model is on {device}, "
                "which has no pinned memory to copy to; use a plan without host memory"
            )
        if plan is not None and any(x.float8 for x in plan.layers) and not self.has_float8:
            raise ConfigError(
                "memory plan: it keeps tensors in float8, but no linear of the model computes in "
                "float8; call ligermodels.float8.convert(model) first, or use a plan without float8"
            )
        if plan is None or not plan.uses_host:
            self._offloaders.clear()
        self.apply_memory_plan(plan)

    def apply_memory_plan(self, plan: MemoryPlan | None) -> None:
        """Do the work of `set_memory_plan` without its checks: the simulation needs no device."""
        self._memory_plan = plan
        for layer, choice in zip(self.layers, self._layer_plans()):
            set_policy(layer, choice.policy, choice.tile, choice.float8)
        if isinstance(self.head, LossHead):  # a classifier has another head
            self.head.planned_chunk_size = None if plan is None else plan.head_chunk

    def plan_memory(
        self,
        batch: int,
        seq: int,
        budget: int | str = "auto",
        host_budget: int | str = 0,
        **step: Any,
    ) -> MemoryPlan:
        """Return the fastest memory plan with which a training step fits a budget.

        `print(plan)` shows it, and `set_memory_plan(plan)` uses it. The arguments are those of
        `ligermodels.memory.fit.Planner`: the largest batch, bytes of GPU memory ("auto": all
        that is free) and of host memory, the optimizer's bytes, and what else a step consists of.

        Raises:
            ConfigError: the budget is too small; the message names the least bytes.
        """
        return Planner(self, budget, host_budget, **step).plan(batch, seq)

    def largest_batch(self, seq: int, budget: int | str = "auto", **step: Any) -> int:
        """Return the largest batch with which a training step fits, or 0; see `plan_memory`."""
        return Planner(self, budget, **step).largest_batch(seq)

    def largest_seq(self, batch: int, budget: int | str = "auto", **step: Any) -> int:
        """Return the longest rows with which a step fits, within 2%, or 0; see `plan_memory`."""
        return Planner(self, budget, **step).largest_seq(batch)

    @property
    def has_float8(self) -> bool:
        """Whether some linears compute in float8, so that a plan may keep tensors in float8."""
        return any(isinstance(module, Float8Linear) for module in self.modules())

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The plan in use, or None if every layer keeps all."""
        return self._memory_plan

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Call `activation_checkpointing_enable`; this is its older name in transformers."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    # Older transformers versions use these names.
    gradient_checkpointing_disable = activation_checkpointing_disable
    is_gradient_checkpointing = is_activation_checkpointing

    def meta_labels(self, batch: int, seq: int) -> Tensor:
        """Return labels without data, as forward takes them, for the simulation of a step."""
        return torch.empty(batch, seq, dtype=torch.int64, device="meta")

    def _layer_plans(self) -> Sequence[LayerPlan]:
        """Return what each layer keeps for backward."""
        if self._memory_plan is None:
            return [LayerPlan()] * len(self.layers)
        _check_layers(self._memory_plan, len(self.layers))
        return self._memory_plan.layers

    def _offloader(
        self, device: torch.device, contexts: Sequence[AttentionContext]
    ) -> Offloader | None:
        """Return the offloader of a device at the start of a forward.

        It is None if the plan keeps nothing in host memory, and without gradients.
        """
        plan = self._memory_plan
        if plan is None or not plan.uses_host or not torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling():
            raise ConfigError(
                "memory plan: a compiled model cannot keep tensors in host memory; compile its "
                "layers instead: for layer in model.layers: layer.compile()"
            )
        budget, simulator = plan.host_budget, simulator_of(device)
        store: Offloader | None
        if simulator is not None:
            store = Offloader(device, budget, Copies(simulator.copied))
        else:
            # Its pinned memory is used again in every step.
            store = self._offloaders.get(device)
            if store is None or store.host_budget != budget:
                store = self._offloaders[device] = Offloader(device, budget)
        shared = [
            x
            for context in contexts
            for x in (context.cos, context.sin, context.memory, context.layer_input)
            if x is not None
        ]
        store.forward_pass([*shared, *self.parameters(), *self.buffers()])
        return store


def _check_layers(plan: MemoryPlan, count: int) -> None:
    if len(plan.layers) != count:
        raise ConfigError(
            f"memory plan: it has {len(plan.layers)} layers, but the model has {count}; make a "
            "plan with model.plan_memory"
        )
