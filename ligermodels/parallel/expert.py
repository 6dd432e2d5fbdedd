"""Expert parallelism: each rank has some of the experts, and tokens travel to them and back.

Each rank has its own tokens, as in data parallelism, and a whole router. It sorts the pairs of a
token and one of its experts by expert, and so by rank, and sends each rank the tokens of its
experts. That rank computes them as a layer with one expert for each token, and the results, which
are weighted already, come back and are summed. Loads are uneven, so the ranks first tell each other
how many rows will come. For that the host waits once in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.errors import ConfigError
from ligermodels.kernels.dispatch import autocast_dtype, select
from ligermodels.kernels.linear_cross_entropy.vocab_shard import all_gather
from ligermodels.layers import Experts
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.layout import IndexRange, ModelLayout, TensorSplit


def expert_parallel(model: DecoderModel, mesh: DeviceMesh) -> None:
    """Leave each rank of a mesh with one dimension its own experts of each layer, in place.

    The first ranks have one expert more than the others if the experts cannot be shared out evenly.

    Raises:
        ConfigError: no layer has experts, one has fewer experts than ranks, or has parameters in
            other modules than its router.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    layers = {k: m for k, m in model.layers.named_modules() if isinstance(m, Experts)}
    if not layers:
        raise ConfigError(
            f"expert parallelism: no layer of {type(model).__name__} has experts; use FSDP2 "
            "(dp_shard)"
        )
    for name, layer in layers.items():
        if layer.num_experts < ranks:
            raise ConfigError(
                f"expert parallelism: {layer.num_experts} experts of layers.{name} cannot be split "
                f"over {ranks} ranks; use at most {layer.num_experts} (ep), and FSDP2 (dp_shard) "
                "for the others"
            )
        for part, module in layer.named_children():
            if module is not layer.router and [*module.parameters()]:
                raise ConfigError(
                    f"expert parallelism: layers.{name}.{part} is a {type(module).__name__}, which "
                    "cannot be split; use FSDP2 alone (dp_shard)"
                )
    layout = ModelLayout.of(model)
    for name, layer in layers.items():
        count = layer.num_experts
        sizes = [count // ranks + (each < count % ranks) for each in range(ranks)]
        firsts = [sum(sizes[:each]) for each in range(ranks)]
        for key, parameter in [*layer.named_parameters(recurse=False)]:
            each = len(parameter) // count  # the rows of an expert
            ranges = tuple((IndexRange(f * each, 0, n * each),) for f, n in zip(firsts, sizes))
            own = parameter.detach().narrow(0, firsts[rank] * each, sizes[rank] * each).clone()
            setattr(layer, key, nn.Parameter(own, requires_grad=parameter.requires_grad))
            split = TensorSplit(tuple(parameter.shape), 0, ranges, mesh)
            layout.tensors[f"layers.{name}.{key}"] = split
        layer.num_experts = sizes[rank]
        layer.exchange = Exchange(mesh.get_group(), sizes, rank)


@dataclass(frozen=True)
class Exchange:
    """The way of tokens to the experts of a layer and back; see `ExpertExchange`.

    Attributes:
        group: the ranks that have all experts together.
        sizes: how many experts each rank has.
        rank: this one's place among them.
    """

    group: Any
    sizes: list[int]
    rank: int

    def __call__(
        self, mlps: Callable[..., Tensor], x: Tensor, weights: Tensor, experts: Tensor
    ) -> Tensor:
        """Return the weighted sum of the MLPs of each token's experts, as `ExpertExchange` says."""
        x = x.to(autocast_dtype(x) or x.dtype)
        journey = self._plan(experts)
        rows, row_weights = _Send.apply(x, weights, journey)
        return _Return.apply(mlps(rows, row_weights[:, None], journey.expert[:, None]), journey)

    def _plan(self, experts: Tensor) -> _Journey:
        """Tell all ranks how many rows will come; experts (tokens, top_k) int32."""
        count, own = sum(self.sizes), self.sizes[self.rank]
        order, place, starts = select("routing", experts).sort_by_expert(experts, count)
        rows = len(order)
        if experts.is_meta:  # a simulation has one process; it takes the loads to be even
            split = [rows // len(self.sizes)] * len(self.sizes)
            split[0] += rows - sum(split)
            return _Journey(self.group, order, place, experts.new_empty(rows), split, split)
        mine = starts.diff()
        every = mine.new_empty(len(self.sizes) * count)
        all_gather(every, mine, group=self.group)
        first = sum(self.sizes[: self.rank])
        coming = every.view(-1, count)[:, first : first + own]
        sent = torch.stack([part.sum() for part in mine.split(self.sizes)])
        to, of = torch.stack([sent, coming.sum(1)]).tolist()
        number = torch.arange(own, dtype=torch.int32, device=experts.device)
        expert = number.repeat(len(self.sizes)).repeat_interleave(
            coming.flatten(), output_size=sum(of)
        )
        return _Journey(self.group, order, place, expert, to, of)


@dataclass(frozen=True)
class _Journey:
    """The rows of a layer that go to other ranks and come from them.

    Attributes:
        group: the ranks.
        order, place: of `sort_by_expert`, for the pairs of this rank's tokens.
        expert: (rows that come,) int32, the expert of each among those of this rank.
        sent, received: how many rows go to each rank, and come from it.
    """

    group: Any
    order: Tensor
    place: Tensor
    expert: Tensor
    sent: list[int]
    received: list[int]

    def there(self, x: Tensor) -> Tensor:
        """Send rows, sorted by expert; return those that came."""
        return self._exchange(x, self.sent, self.received)

    def back(self, x: Tensor) -> Tensor:
        """Send the rows that came back; return this rank's, sorted by expert."""
        return self._exchange(x, self.received, self.sent)

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        if not x.is_meta:
            dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out

    def of_tokens(self, rows: Tensor) -> Tensor:
        """Return the sum of the rows of each token."""
        summed: Tensor = select("expert_mlp", rows).expert_sum(rows, self.place, None, None, None)
        return summed

    @property
    def token(self) -> Tensor:
        """(rows that go,), the token of each."""
        return self.order // self.place.shape[1]


class _Send(torch.autograd.Function):
    """Send tokens and their weights to the ranks of their experts.

    Between here and `_Return`, gradients are divided by the number of ranks. An expert's parameters
    get the gradients of all these ranks' tokens as one sum, where other parameters get their mean.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, journey: _Journey) -> tuple[Tensor, Tensor]:
        ctx.journey = journey
        return (
            journey.there(x[journey.token]),
            journey.there(weights.flatten()[journey.order]),
        )

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_rows: Tensor, grad_weights: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        journey = ctx.journey
        ranks = len(journey.sent)
        grad_x = journey.of_tokens(journey.back(grad_rows)) * ranks
        return grad_x, journey.back(grad_weights)[journey.place] * ranks, None


class _Return(torch.autograd.Function):
    """Bring the results back to their tokens, and sum those of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.of_tokens(journey.back(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        journey = ctx.journey
        return journey.there((grad / len(journey.sent))[journey.token]), None
