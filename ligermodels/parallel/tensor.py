"""Tensor parallelism with sequence parallelism between the blocks (arXiv:2205.05198).

Each rank has its own query, key and value heads, its own part of the MLP and of the vocabulary, as
plain parameters of the local shapes, on which the fused kernels run. Between those products, a
rank has its part of the sequence: the first product of a sub-layer gathers the sequence, and the
last one sums and scatters it. Norms work on that part, and their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.errors import ConfigError
from ligermodels.kernels.linear_cross_entropy.vocab_shard import (
    SumGradient,
    VocabShard,
    all_gather,
    reduce_scatter,
)
from ligermodels.layers import Attention, GatedMLP, LayerNorm, RMSNorm
from ligermodels.layers.fusion import is_plain
from ligermodels.models.base import DecoderModel
from ligermodels.models.parts import Run, TensorShard

Runs = tuple[tuple[Run, ...], ...]


def tensor_parallel(model: DecoderModel, mesh: DeviceMesh) -> None:
    """Cut a model's parameters for the ranks of a mesh with one dimension, in place.

    Raises:
        ConfigError: heads or sizes do not divide evenly, or a module is not one that can be cut.
    """
    ranks, group = mesh.size(), mesh.get_group()
    cutter = _Cutter(model, mesh)
    _check(model, ranks)
    for module in [*model.layers.modules()]:
        if isinstance(module, Attention):
            cutter.attention(module)
        elif isinstance(module, GatedMLP):
            cutter.mlp(module)
        elif isinstance(module, (RMSNorm, LayerNorm)):
            _replace_forward(module, _summing_gradients(module, group))
    cutter.vocabulary()
    norm = _summing_gradients(model.norm, group)

    def whole_sequence(*args: Any, **kwargs: Any) -> Any:
        out = norm(*args, **kwargs)
        if isinstance(out, Tensor):
            return _GatherSequence.apply(out, group)
        return _GatherSequence.apply(out[0], group), out[1]

    _replace_forward(model.norm, whole_sequence)
    parts = 1 if model.sequence_shard is None else model.sequence_shard.ranks
    model.register_forward_pre_hook(_refuse_inputs(ranks, parts), with_kwargs=True)
    model.tensor_shards = cutter.named()


class ColumnLinear(nn.Linear):
    """A linear whose outputs are split over ranks, and whose input is split along the sequence.

    `shared` (first row, rows, ranks): rows that so many neighbouring ranks have in common.
    """

    group: Any
    shared: tuple[int, int, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, outputs of this rank) for x (batch, seq / ranks, inputs)."""
        return _ColumnProduct.apply(x, self.weight, self.bias, self.group, self.shared)


class RowLinear(nn.Linear):
    """A linear whose inputs are split over ranks. Its output is split along the sequence."""

    group: Any

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq / ranks, outputs) for x (batch, seq, inputs of this rank)."""
        y = _ScatterSequence.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + SumGradient.apply(self.bias, self.group)


class _Cutter:
    """Cuts the modules of a model, and keeps how."""

    def __init__(self, model: DecoderModel, mesh: DeviceMesh) -> None:
        self.model, self.mesh = model, mesh
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        self.group = mesh.get_group()
        self.cuts: list[tuple[nn.Parameter, TensorShard]] = []

    def named(self) -> dict[str, TensorShard]:
        """Return how each parameter was cut, by name."""
        cuts = {id(parameter): cut for parameter, cut in self.cuts}
        parameters = self.model.named_parameters()
        return {name: cuts[id(p)] for name, p in parameters if id(p) in cuts}

    def attention(self, module: Attention) -> None:
        heads, own, size = module.num_heads, module._own_kv_heads, module.head_dim
        ranks, q = self.ranks, heads // self.ranks * size
        shares = max(1, ranks // module.num_kv_heads)  # ranks that have the same key head
        kv = max(1, module.num_kv_heads // ranks) if own else 0
        runs = []
        for rank in range(ranks):
            mine = [Run(rank * q, 0, q)]
            for part in range(2 if own else 0):
                first = (heads + part * own + rank // shares * kv) * size
                local = q + part * kv * size
                mine.append(Run(first, local, kv * size, is_copy=rank % shares > 0))
            runs.append(tuple(mine))
        qkv = self._linear(ColumnLinear, module.qkv_proj, tuple(runs), 0)
        if shares > 1 and own:
            qkv.shared = (q, 2 * kv * size, shares)
        columns = tuple((Run(rank * q, 0, q),) for rank in range(ranks))
        module.qkv_proj, module.o_proj = qkv, self._linear(RowLinear, module.o_proj, columns, 1)
        module.num_heads = heads // ranks
        module.num_kv_heads = max(1, module.num_kv_heads // ranks)
        module._own_kv_heads = kv

    def mlp(self, module: GatedMLP) -> None:
        size = module.down_proj.in_features
        part = size // self.ranks
        rows = tuple(
            (Run(rank * part, 0, part), Run(size + rank * part, part, part))
            for rank in range(self.ranks)
        )
        columns = tuple((Run(rank * part, 0, part),) for rank in range(self.ranks))
        module.gate_up_proj = self._linear(ColumnLinear, module.gate_up_proj, rows, 0)
        module.down_proj = self._linear(RowLinear, module.down_proj, columns, 1)

    def vocabulary(self) -> None:
        """Cut the embedding and the head."""
        model, head = self.model, self.model.head
        vocab = head.vocab_size
        part = -(-vocab // self.ranks)
        runs = tuple(
            (Run(rank * part, 0, min(part, vocab - rank * part)),) for rank in range(self.ranks)
        )
        first = self.rank * part
        embedding = model.embed_tokens
        embedding.weight = self._cut(embedding.weight, runs, 0)
        _replace_forward(embedding, _embedding_forward(embedding, first, self.group))
        if not head._tied:
            head.proj.weight = self._cut(head.proj.weight, runs, 0)
            head.proj.out_features = len(head.proj.weight)
            if head.proj.bias is not None:
                head.proj.bias = self._cut(head.proj.bias, runs, 0)
        head.vocab_shard = VocabShard(self.group, first, vocab)

    def _linear(self, kind: type[Any], linear: nn.Linear, runs: Runs, dim: int) -> Any:
        """Return a linear of a kind, with this rank's rows (dim 0) or columns of `linear`."""
        weight = self._cut(linear.weight, runs, dim)
        bias = linear.bias
        if bias is not None and dim == 0:
            bias = self._cut(bias, runs, 0)
        with torch.device("meta"):
            made = kind(weight.shape[1], weight.shape[0], bias=bias is not None)
        made.weight, made.bias, made.group = weight, bias, self.group
        return made

    def _cut(self, parameter: Tensor, runs: Runs, dim: int) -> nn.Parameter:
        whole, mine = parameter.detach(), runs[self.rank]
        pieces = [whole.narrow(dim, run.start, run.size) for run in mine]
        cut = nn.Parameter(torch.cat(pieces, dim), requires_grad=parameter.requires_grad)
        shard = TensorShard(tuple(whole.shape), dim, runs, self.mesh)
        self.cuts.append((cut, shard))
        return cut


def _check(model: DecoderModel, ranks: int) -> None:
    """Raise ConfigError before anything is changed, unless all sizes can be split evenly."""

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"tensor parallelism: {what} cannot be split over {ranks} ranks; use fewer (tp), and "
            "FSDP2 (dp_shard) for the others"
        )

    if model.head is None:
        raise ConfigError("tensor parallelism: a classifier cannot be split; use FSDP2 (dp_shard)")
    projections: set[nn.Module] = set()
    for name, module in model.layers.named_modules():
        if isinstance(module, Attention) and _computes_like(module, Attention):
            q_heads, kv_heads = module.num_heads, module.num_kv_heads
            if q_heads % ranks or (kv_heads % ranks and ranks % kv_heads):
                raise refuse(f"{q_heads} query heads and {kv_heads} key heads")
            linears = [module.qkv_proj, module.o_proj]
            for norm in (module.q_norm, module.k_norm):
                if norm is not None and any(len(p) != module.head_dim for p in norm.parameters()):
                    raise refuse("a norm over all heads together")
        elif isinstance(module, GatedMLP) and _computes_like(module, GatedMLP):
            linears = [module.gate_up_proj, module.down_proj]
            if module.down_proj.in_features % ranks:
                raise refuse(f"an MLP of width {module.down_proj.in_features}")
        elif isinstance(module, (RMSNorm, LayerNorm)) or module in projections:
            continue
        elif [*module.parameters(recurse=False)]:
            raise ConfigError(
                f"tensor parallelism: layers.{name} is a {type(module).__name__}, which cannot be "
                "cut; use FSDP2 alone (dp_shard)"
            )
        else:
            continue
        projections.update(linears)
        for linear in linears:
            if not is_plain(linear, nn.Linear):
                raise ConfigError(
                    f"tensor parallelism: a projection of layers.{name} is a "
                    f"{type(linear).__name__}, or has hooks; only a plain nn.Linear can be cut"
                )
    vocab = model.head.vocab_size
    if vocab <= -(-vocab // ranks) * (ranks - 1):
        raise refuse(f"a vocabulary of {vocab}")


def _computes_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module is of a kind, or of a subclass that computes in the same way."""
    names = ("forward", "_project", "_run")
    return all(getattr(type(module), n, None) is getattr(kind, n, None) for n in names)


def _refuse_inputs(ranks: int, parts: int) -> Callable[..., None]:
    """Return a hook that raises ValueError; context parallelism has cut rows into so many parts."""

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name in ("inputs_embeds", "cache"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} does not work with tensor parallelism: the embedding makes each "
                    "rank's part of the sequence from input_ids"
                )
        ids = args[0] if args else kwargs.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] % (ranks * parts):
            raise ValueError(
                f"input_ids has {ids.shape[1]} tokens in a row, which {ranks * parts} ranks of "
                f"tensor parallelism cannot split; pad the rows to a multiple of {ranks * parts}"
            )

    return check


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a layer call the module: a module whose forward was replaced is not fused."""
    module.forward = forward  # type: ignore[method-assign]


def _summing_gradients(module: nn.Module, group: Any) -> Callable[..., Any]:
    """Return the module's forward with parameters whose gradients are summed over the ranks."""
    original = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        try:
            for name, parameter in own.items():
                if parameter is not None and parameter.requires_grad:
                    module._parameters[name] = SumGradient.apply(parameter, group)
            return original(module, *args, **kwargs)
        finally:
            module._parameters.update(own)

    return forward


def _embedding_forward(embedding: nn.Embedding, first: int, group: Any) -> Callable[..., Any]:
    """Return a forward that looks up this rank's rows, and sums and scatters the sequence."""
    scale, padding = getattr(embedding, "scale", None), embedding.padding_idx

    def forward(ids: Tensor) -> Tensor:
        weight = embedding.weight
        here = ids - first
        mine = (here >= 0) & (here < len(weight))
        if padding is not None:
            # The padding token's embedding gets no gradient, as in nn.Embedding.
            trained = (mine & (ids != padding)).unsqueeze(-1)
        # On a GPU, the lookup of an id outside the whole vocabulary must fail, as in nn.Embedding.
        outside = (ids < 0) | (ids >= embedding.num_embeddings)
        rows = F.embedding(torch.where(mine, here, outside * len(weight)), weight)
        if padding is not None:
            rows = torch.where(trained, rows, rows.detach())
        rows = rows.masked_fill(~mine.unsqueeze(-1), 0.0)
        rows = _ScatterSequence.apply(rows, group)
        if scale is None:
            return rows
        return rows * torch.full((), scale, dtype=rows.dtype, device=rows.device)

    return forward


def _gather_sequence(x: Tensor, group: Any) -> Tensor:
    """Return (batch, seq, width) from each rank's (batch, seq / ranks, width).

    The batch may be missing: tiles of an MLP have none.
    """
    if x.dim() == 2:
        return _gather_sequence(x.unsqueeze(0), group)[0]
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    if x.shape[0] == 1:
        return out.view(1, -1, *x.shape[2:])
    return out.view(ranks, *x.shape).transpose(0, 1).flatten(1, 2)


def _scatter_sequence(x: Tensor, group: Any) -> Tensor:
    """Sum (batch, seq, width) over ranks; return this rank's (batch, seq / ranks, width)."""
    if x.dim() == 2:
        return _scatter_sequence(x.unsqueeze(0), group)[0]
    ranks = dist.get_world_size(group)
    batch, seq = x.shape[:2]
    parts = x.unflatten(1, (ranks, seq // ranks)).transpose(0, 1).contiguous()
    out = x.new_empty(batch, seq // ranks, *x.shape[2:])
    reduce_scatter(out, parts.flatten(0, 1), group=group)
    return out


class _ScatterSequence(torch.autograd.Function):
    """Sum over the ranks, and keep this rank's part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gather_sequence(grad, ctx.group), None


class _GatherSequence(torch.autograd.Function):
    """Gather the sequence for what all ranks compute alike: each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ranks, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(ranks, 1)[rank], None


class _ColumnProduct(torch.autograd.Function):
    """Gather the sequence and multiply. It saves this rank's part, and gathers it again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Any,
        shared: tuple[int, int, int] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.shared = group, shared
        return F.linear(_gather_sequence(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = _scatter_sequence(grad @ weight, ctx.group)
        rows = grad.flatten(0, -2)
        if needs_weight:
            grad_weight = rows.t() @ _gather_sequence(x, ctx.group).flatten(0, -2)
            _sum_shared(grad_weight, ctx.shared, ctx.group)
        if needs_bias:
            grad_bias = rows.sum(0)
            _sum_shared(grad_bias, ctx.shared, ctx.group)
        return grad_x, grad_weight, grad_bias, None, None


def _sum_shared(grad: Tensor, shared: tuple[int, int, int] | None, group: Any) -> None:
    """Sum the gradient of rows that neighbouring ranks have in common, in place."""
    if shared is None:
        return
    first, rows, ranks = shared
    own = grad[first : first + rows].contiguous()
    every = own.new_empty(dist.get_world_size(group) * rows, *own.shape[1:])
    all_gather(every, own, group=group)
    start = dist.get_rank(group) // ranks * ranks
    same = every.view(-1, *own.shape)[start : start + ranks]
    grad[first : first + rows] = same.sum(0)
