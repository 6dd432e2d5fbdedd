"""Context parallelism: each rank computes a part of each row."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ligermodels.errors import ConfigError
from ligermodels.layers import Attention, GatedDeltaNet
from ligermodels.layers.kv_cache import CachedLayer
from ligermodels.layers.sequence_shard import SequenceShard
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import ModelLayout


def context_parallel(model: DecoderModel, mesh: DeviceMesh) -> None:
    """Let a model compute this rank's part of each row; the mesh has one dimension.

    Raises:
        ConfigError: a layer mixes tokens in another way than by attention.
    """
    for name, module in model.layers.named_modules():
        mixes = isinstance(module, (Attention, CachedLayer, GatedDeltaNet))
        if mixes and getattr(type(module), "forward", None) is not Attention.forward:
            raise ConfigError(
                f"context parallelism: layers.{name} is a {type(module).__name__}, which mixes "
                "the tokens of a row in another way than attention; use FSDP2 alone (dp_shard)"
            )
    shard = SequenceShard(mesh.get_group(), mesh.size(), mesh.get_local_rank())
    ModelLayout.of(model).rows = shard
