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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.errors import ConfigError
from ligermodels.kernels.linear_cross_entropy.vocab_shard import VocabShard
from ligermodels.layers import Attention, GatedMLP, LayerNorm, LossHead, RMSNorm
from ligermodels.layers.fusion import has_plain_call, is_plain
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import IndexRange, ModelLayout, Ranges, TensorSplit
from ligermodels.parallel.modules import ColumnLinear, RowLinear, VocabularyEmbedding, sequence_norm


def tensor_parallel(model: DecoderModel, mesh: DeviceMesh) -> None:
    """Cut a model's parameters for the ranks of a mesh with one dimension, in place.

    Raises:
        ConfigError: heads or sizes do not divide evenly, or a module is not one that can be cut.
    """
    ranks, group = mesh.size(), mesh.get_group()
    splitter = _Splitter(model, mesh)
    _check(model, ranks)
    for module in [*model.layers.modules()]:
        if isinstance(module, Attention):
            splitter.attention(module)
        elif isinstance(module, GatedMLP):
            splitter.mlp(module)
    norms: dict[nn.Module, nn.Module] = {}
    for name, module in [*model.layers.named_modules(remove_duplicate=False)]:
        if isinstance(module, (RMSNorm, LayerNorm)):
            if module not in norms:
                norms[module] = sequence_norm(module, group)
            model.layers.set_submodule(name, norms[module])
    model.norm = sequence_norm(model.norm, group, gathers=True)
    splitter.vocabulary()
    layout = ModelLayout.of(model)
    parts = 1 if layout.rows is None else layout.rows.ranks
    model.register_forward_pre_hook(_refuse_inputs(ranks, parts), with_kwargs=True)
    layout.tensors = splitter.named()


class _Splitter:
    """Splits the modules of a model over the ranks, and keeps how."""

    def __init__(self, model: DecoderModel, mesh: DeviceMesh) -> None:
        self.model, self.mesh = model, mesh
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        self.group = mesh.get_group()
        self.splits: list[tuple[nn.Parameter, TensorSplit]] = []

    def named(self) -> dict[str, TensorSplit]:
        """Return how each parameter was split, by name."""
        splits = {id(parameter): split for parameter, split in self.splits}
        parameters = self.model.named_parameters()
        return {name: splits[id(p)] for name, p in parameters if id(p) in splits}

    def attention(self, module: Attention) -> None:
        heads, own, size = module.num_heads, module._own_kv_heads, module.head_dim
        ranks, q = self.ranks, heads // self.ranks * size
        wide = 2 if module.output_gate else 1  # the gate of a head follows its query
        shares = max(1, ranks // module.num_kv_heads)  # ranks that have the same key head
        kv = max(1, module.num_kv_heads // ranks) if own else 0
        ranges = []
        for rank in range(ranks):
            mine = [IndexRange(rank * wide * q, 0, wide * q)]
            for part in range(2 if own else 0):
                first = (wide * heads + part * own + rank // shares * kv) * size
                local = wide * q + part * kv * size
                mine.append(IndexRange(first, local, kv * size, is_copy=rank % shares > 0))
            ranges.append(tuple(mine))
        qkv = self._linear(ColumnLinear, module.qkv_proj, tuple(ranges), 0)
        if shares > 1 and own:
            qkv.shared = (wide * q, 2 * kv * size, shares)
        columns = tuple((IndexRange(rank * q, 0, q),) for rank in range(ranks))
        module.qkv_proj, module.o_proj = qkv, self._linear(RowLinear, module.o_proj, columns, 1)
        if module.sinks is not None:
            rows = tuple((IndexRange(r * heads // ranks, 0, heads // ranks),) for r in range(ranks))
            module.sinks = self.split(module.sinks, rows, 0)
        module.num_heads = heads // ranks
        module.num_kv_heads = max(1, module.num_kv_heads // ranks)
        module._own_kv_heads = kv

    def mlp(self, module: GatedMLP) -> None:
        size = module.down_proj.in_features
        part = size // self.ranks
        rows = tuple(
            (IndexRange(rank * part, 0, part), IndexRange(size + rank * part, part, part))
            for rank in range(self.ranks)
        )
        columns = tuple((IndexRange(rank * part, 0, part),) for rank in range(self.ranks))
        module.gate_up_proj = self._linear(ColumnLinear, module.gate_up_proj, rows, 0)
        module.down_proj = self._linear(RowLinear, module.down_proj, columns, 1)

    def vocabulary(self) -> None:
        """Split the embedding and the head; the loss of its classes is that of a `VocabShard`."""
        head, vocab = self.model.head, self.model.head.vocab_size
        part = -(-vocab // self.ranks)
        ranges = tuple(
            (IndexRange(rank * part, 0, min(part, vocab - rank * part)),)
            for rank in range(self.ranks)
        )
        first, embedding = self.rank * part, self.model.embed_tokens
        weight = self.split(embedding.weight, ranges, 0)
        self.model.embed_tokens = VocabularyEmbedding(embedding, weight, first, self.group)
        if head.is_tied:
            head.tie(self.model.embed_tokens)
        else:
            head.proj.weight = self.split(head.proj.weight, ranges, 0)
            head.proj.out_features = len(head.proj.weight)
            if head.proj.bias is not None:
                head.proj.bias = self.split(head.proj.bias, ranges, 0)
        head.vocab_shard = VocabShard(self.group, first, vocab)

    def _linear(self, kind: type[Any], linear: nn.Linear, ranges: Ranges, dim: int) -> Any:
        """Return a linear of a kind, with this rank's rows (dim 0) or columns of `linear`."""
        weight = self.split(linear.weight, ranges, dim)
        bias = linear.bias
        if bias is not None and dim == 0:
            bias = self.split(bias, ranges, 0)
        with torch.device("meta"):
            made = kind(weight.shape[1], weight.shape[0], bias=bias is not None)
        made.weight, made.bias, made.group = weight, bias, self.group
        return made

    def split(self, parameter: Tensor, ranges: Ranges, dim: int) -> nn.Parameter:
        whole, mine = parameter.detach(), ranges[self.rank]
        pieces = [whole.narrow(dim, each.start, each.size) for each in mine]
        own = nn.Parameter(torch.cat(pieces, dim), requires_grad=parameter.requires_grad)
        self.splits.append((own, TensorSplit(tuple(whole.shape), dim, ranges, self.mesh)))
        return own


def _check(model: DecoderModel, ranks: int) -> None:
    """Raise ConfigError before anything is changed, unless all sizes can be split evenly."""

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"tensor parallelism: {what} cannot be split over {ranks} ranks; use fewer (tp), and "
            "FSDP2 (dp_shard) for the others"
        )

    if not isinstance(model.head, LossHead):
        raise ConfigError("tensor parallelism: a classifier cannot be split; use FSDP2 (dp_shard)")
    if not _is_norm(model.norm):
        raise _cannot_be_cut("norm", model.norm)
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
        elif _is_norm(module) or module in projections:
            continue
        elif [*module.parameters(recurse=False)]:
            raise _cannot_be_cut(f"layers.{name}", module)
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


def _is_norm(module: nn.Module) -> bool:
    return has_plain_call(module, RMSNorm) or has_plain_call(module, LayerNorm)


def _cannot_be_cut(name: str, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"tensor parallelism: {name} ({type(module).__name__}) cannot be cut; use FSDP2 alone "
        "(dp_shard)"
    )


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
