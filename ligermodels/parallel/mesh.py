"""The mesh of ranks: the names of its dimensions, and the ranks that FSDP2 works over.

dp_replicate    each rank has all parameters, and gradients are averaged (as DDP does)
dp_shard        each rank has a part of each parameter: FSDP2 (`fully_shard`)
both            HSDP: shards within dp_shard, copies across dp_replicate
cp              context parallelism: each rank computes a part of each row; parameters are
                sharded over it as over dp_shard
tp              tensor parallelism, with the sequence split between the blocks; alone or with
                the others
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ligermodels.errors import ConfigError
from ligermodels.layers.fusion import is_sharded
from ligermodels.parallel.layout import reshard

REPLICATE, SHARD, CONTEXT, TENSOR = "dp_replicate", "dp_shard", "cp", "tp"
DIMENSIONS = (REPLICATE, SHARD, CONTEXT, TENSOR)
NOT_SHARDED = "this model is not sharded; call ligermodels.shard(model) first"


def data_mesh_of(model: nn.Module) -> DeviceMesh:
    """Return the mesh of the ranks that gradients of a sharded model are averaged over."""
    reshard(model)  # after a forward without backward, no parameter may be a sharded one
    parameter = next(filter(is_sharded, model.parameters()), None)
    if parameter is None:
        raise ConfigError(NOT_SHARDED)
    return parameter.device_mesh  # type: ignore[attr-defined]


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh with names of its dimensions, after a check."""
    if not dist.is_initialized():
        raise ConfigError(
            "shard: torch.distributed is not initialised; start the program with torchrun, and "
            "call torch.distributed.init_process_group() first"
        )
    ranks = dist.get_world_size()
    if mesh is None:
        device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        return init_device_mesh(device, (ranks,), mesh_dim_names=(SHARD,))
    if mesh.size() != ranks:
        raise ConfigError(
            f"shard: the mesh has {mesh.size()} ranks, but {ranks} are running; make it of all"
        )
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim == 1:
        return DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=(SHARD,))
    if names is None or set(names) - set(DIMENSIONS):
        raise ConfigError(
            f"shard: the mesh has the dimensions {names}; name each of them, with names from "
            f"{', '.join(DIMENSIONS)}: init_device_mesh(..., mesh_dim_names=...)"
        )
    if {REPLICATE, SHARD} <= {*names} and names.index(SHARD) < names.index(REPLICATE):
        raise ConfigError(
            f"shard: the mesh has the dimensions {names}; put {REPLICATE} before {SHARD}, because "
            "the copies are the outer dimension"
        )
    return mesh


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for `fully_shard`: one dimension of shards, or copies and shards."""
    names = mesh.mesh_dim_names or ()
    if SHARD not in names or CONTEXT in names:
        # Without dp_shard, shards over a single rank are copies of the whole, averaged by the
        # engine of HSDP. The ranks of cp have other tokens, as those of dp_shard have.
        # A process group orders its ranks, so those of both stay in the order of the mesh.
        data = [name for name in names if name in (SHARD, CONTEXT)]
        order = [name for name in (REPLICATE, *data, TENSOR) if name in names]
        sizes = {name: mesh.size(names.index(name)) if name in names else 1 for name in DIMENSIONS}
        ranks = mesh.mesh.permute([*map(names.index, order)]).reshape(
            sizes[REPLICATE], sizes[SHARD] * sizes[CONTEXT], sizes[TENSOR]
        )
        mesh = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(REPLICATE, SHARD, TENSOR))
    return mesh[REPLICATE, SHARD] if REPLICATE in names else mesh[SHARD]


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
