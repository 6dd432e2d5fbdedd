"""Context parallelism: each rank computes a part of each row.

Keys and values of all ranks are gathered in each layer, which grouped heads make small, and the
queries stay. `ligermodels.layers.sequence_shard` says which part a rank has.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ligermodels.errors import ConfigError
from ligermodels.layers import Attention
from ligermodels.layers.kv_cache import CachedLayer
from ligermodels.layers.sequence_shard import SequenceShard
from ligermodels.models.base import DecoderModel


def context_parallel(model: DecoderModel, mesh: DeviceMesh) -> None:
    """Let a model compute this rank's part of each row; the mesh has one dimension.

    Raises:
        ConfigError: a layer mixes tokens in another way than by attention.
    """
    for name, module in model.layers.named_modules():
        mixes = isinstance(module, (Attention, CachedLayer))
        if mixes and getattr(type(module), "forward", None) is not Attention.forward:
            raise ConfigError(
                f"context parallelism: layers.{name} is a {type(module).__name__}, which mixes "
                "the tokens of a row in another way than attention; use FSDP2 alone (dp_shard)"
            )
    model.sequence_shard = SequenceShard(mesh.get_group(), mesh.size(), mesh.get_local_rank())
