"""Expert parallelism: each rank has some of the experts, and tokens travel to them and back.

Each rank has its own tokens, as in data parallelism, and a whole router. It sends each rank those
tokens that have experts there, once, however many these are. That rank computes the pairs of a
token and one of its experts as a layer with one expert for each row, and sums those of each token,
with their weights. The sums come back and are summed. Loads are uneven, so the ranks first tell
each other how many rows will come. For that the host waits once in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.errors import ConfigError
from ligermodels.kernels.dispatch import autocast_dtype, select
from ligermodels.kernels.linear_cross_entropy.vocab_shard import all_gather, exchanged
from ligermodels.layers import Experts
from ligermodels.layers.experts import STACKS
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import IndexRange, ModelLayout, TensorSplit


def expert_parallel(model: DecoderModel, mesh: DeviceMesh) -> None:
    """Leave each rank of a mesh with one dimension its own experts of each layer, in place.

    The first ranks have one expert more than the others if the experts cannot be shared out evenly.
    Their weights may be of few bits, and have adapters.

    Raises:
        ConfigError: no layer has experts, one has fewer experts than ranks, or has parameters in
            other modules than its router and those in the place of its weights.
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
            if part not in ("router", *STACKS) and [*module.parameters()]:
                raise ConfigError(
                    f"expert parallelism: layers.{name}.{part} ({type(module).__name__}) cannot "
                    "be split; use FSDP2 alone (dp_shard)"
                )
    layout = ModelLayout.of(model)
    for name, layer in layers.items():
        count = layer.num_experts
        sizes = [count // ranks + (each < count % ranks) for each in range(ranks)]
        firsts = [sum(sizes[:each]) for each in range(ranks)]
        cut: dict[str, Tensor] = dict(layer.named_parameters())
        cut |= {key: x for key, x in layer.named_buffers() if key.endswith(("codes", "scales"))}
        for key, whole in cut.items():
            if key.startswith("router."):
                continue
            each = len(whole) // count  # the rows of an expert
            own = whole.detach().narrow(0, firsts[rank] * each, sizes[rank] * each).clone()
            place, _, last = key.rpartition(".")
            if isinstance(whole, nn.Parameter):
                own = nn.Parameter(own, requires_grad=whole.requires_grad)
                ranges = tuple((IndexRange(f * each, 0, n * each),) for f, n in zip(firsts, sizes))
                split = TensorSplit(tuple(whole.shape), 0, ranges, mesh)
                layout.tensors[f"layers.{name}.{key}"] = split
            setattr(layer.get_submodule(place), last, own)
        layer.num_experts = sizes[rank]
        layer.exchange = Exchange(mesh.get_group(), sizes, rank)


@dataclass(frozen=True)
class Exchange:
    """The way of tokens to the experts of a layer and back; see `Experts.exchange`.

    Attributes:
        group: the ranks that have all experts together.
        sizes: how many experts each rank has.
        rank: this one's place among them.
    """

    group: Any
    sizes: list[int]
    rank: int

    # The host reads how many rows come, and no shape is known before. torch.compiler.disable would
    # import the compiler now.
    @_disable_dynamo
    def __call__(
        self, mlps: Callable[..., Tensor], x: Tensor, weights: Tensor, experts: Tensor
    ) -> Tensor:
        """Return the weighted sum of the MLPs of each token's experts, as `Experts` says."""
        x = x.to(autocast_dtype(x) or x.dtype)
        journey, expert, weight = self._plan(weights.detach(), experts)
        rows, weight = _Send.apply(x, weights, weight, journey)
        pairs = mlps(rows, weight[:, None], expert[:, None])
        return exchanged(pairs, journey.back, lambda grad: journey.there(grad / len(self.sizes)))

    def _plan(self, weights: Tensor, experts: Tensor) -> tuple[_Journey, Tensor, Tensor]:
        """Tell all ranks which tokens come to which of their experts, and with which weights.

        Args: weights (tokens, top_k) in 32 or 64 bit; experts (tokens, top_k) int32.
        Returns: the way, the expert of each pair that comes, and all weights of the rows that come.
        """
        ranks, (tokens, top_k) = len(self.sizes), experts.shape
        if experts.is_meta:  # a simulation has one process; it takes the loads to be even
            rows, pair = tokens * min(ranks, top_k), experts.new_empty(experts.numel())
            split = [rows // ranks + (each < rows % ranks) for each in range(ranks)]
            places = experts.new_empty(tokens, ranks), experts.new_empty(rows, top_k)
            token = experts.new_empty(rows)
            journey = _Journey(self.group, token, places[0], pair, places[1], split, split)
            return journey, pair, weights.new_empty(rows, top_k)
        rank = torch.arange(ranks + 1, dtype=torch.int32, device=experts.device)
        count = sum(self.sizes)
        starts = rank * (count // ranks) + rank.clamp(max=count % ranks)
        to = torch.bucketize(experts, starts[1:], out_int32=True, right=True)
        here = to == rank[:-1, None, None]
        goes = here.any(2)
        mine = torch.stack([goes.sum(1), here.sum((1, 2))])
        every = mine.new_empty(ranks * mine.numel())
        all_gather(every, mine.flatten(), group=self.group)
        coming = every.view(ranks, 2, ranks)[:, :, self.rank]
        numbers = torch.cat([mine[0], coming[:, 0], coming[:, 1].sum(0, True)]).tolist()
        sent, received = numbers[:ranks], numbers[ranks : 2 * ranks]
        goal, token = goes.nonzero_static(size=sum(sent)).unbind(1)
        own = torch.where(to[token] == goal[:, None], (experts - starts[to])[token], -1)
        told = torch.cat([own, weights[token].view(torch.int32)], 1)  # one exchange for both
        told = exchange(told, sent, received, self.group)
        expert, weight = told[:, :top_k], told[:, top_k:].contiguous().view(weights.dtype)
        is_own = expert >= 0
        pair = is_own.flatten().nonzero_static(size=numbers[-1])[:, 0]
        places = _places(goes).mT.contiguous(), _places(is_own)
        journey = _Journey(self.group, token, places[0], pair, places[1], sent, received)
        return journey, expert.flatten()[pair], weight


def _places(chosen: Tensor) -> Tensor:
    """Return the number of each True among all of them, and -1 for each False; int32."""
    numbers = chosen.flatten().cumsum(0, dtype=torch.int32).view(chosen.shape) - 1
    return numbers.masked_fill(~chosen, -1)


def exchange(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send rows, those to the first rank first, and return those that come, in the same order."""
    out = x.new_empty(sum(received), *x.shape[1:])
    if not x.is_meta:
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


@dataclass(frozen=True)
class _Journey:
    """The way of a layer's tokens to other ranks and back. A token goes to a rank once.

    Attributes:
        group: the ranks.
        token: (rows that go,), the token of each.
        place: (tokens, ranks) int32, the row that goes to the rank, or -1.
        pair: (pairs that come,), those of the rows that come with the experts of this rank; their
            numbers in (rows, top_k).
        pair_place: (rows that come, top_k) int32, the number of the pair, or -1.
        sent, received: how many rows go to each rank, and come from it.
    """

    group: Any
    token: Tensor
    place: Tensor
    pair: Tensor
    pair_place: Tensor
    sent: list[int]
    received: list[int]

    def there(self, x: Tensor) -> Tensor:
        """Send tokens (tokens, ...), and return the token of each pair that comes."""
        rows = exchange(x[self.token], self.sent, self.received, self.group)
        return rows[self.pair // self.pair_place.shape[1]]

    def back(self, pairs: Tensor) -> Tensor:
        """Send the sums of the pairs of each row back, and return their sums for each token."""
        return self._to_tokens(_sums(pairs, self.pair_place))

    def weights_back(self, pairs: Tensor) -> Tensor:
        """Return the numbers of the pairs (pairs that come,) to where their weights came from."""
        rows = pairs.new_zeros(self.pair_place.shape)
        return self._to_tokens(rows.flatten().index_copy(0, self.pair, pairs).view(rows.shape))

    def _to_tokens(self, rows: Tensor) -> Tensor:
        return _sums(exchange(rows, self.received, self.sent, self.group), self.place)


def _sums(rows: Tensor, place: Tensor) -> Tensor:
    summed: Tensor = select("expert_mlp", rows).expert_sum(rows, place, None, None, None)
    return summed


class _Send(torch.autograd.Function):
    """Send tokens to the ranks of their experts; their weights, `come`, have arrived already.

    From here until the results are back, gradients are divided by the number of ranks. An expert's
    parameters get the gradients of all these ranks' tokens as one sum, where other parameters get
    their mean.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, come: Tensor, journey: _Journey
    ) -> tuple[Tensor, Tensor]:
        ctx.journey = journey
        return journey.there(x), come.flatten()[journey.pair]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_rows: Tensor, grad_weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        journey, ranks = ctx.journey, len(ctx.journey.sent)
        grad_x = journey.back(grad_rows) * ranks
        return grad_x, journey.weights_back(grad_weights) * ranks, None, None
