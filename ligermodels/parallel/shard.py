"""Spread a model over GPUs: `shard(model, mesh)`. The names of the mesh's dimensions say how.

The engine is PyTorch's own. This module says which modules it is applied to, and with what options.
The dimensions are:

dp_replicate    each rank has all parameters, and gradients are averaged (as DDP does)
dp_shard        each rank has a part of each parameter: FSDP2 (`fully_shard`)
both            HSDP: shards within dp_shard, copies across dp_replicate
cp              context parallelism: each rank computes a part of each row; parameters are
                sharded over it as over dp_shard
tp              tensor parallelism, with the sequence split between the blocks; alone or with
                the others
ep              expert parallelism: each rank has its own rows and some of the experts; other
                parameters are sharded over it as over dp_shard
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.layers import Experts
from ligermodels.layers.fusion import is_sharded, local_tensor
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import ModelLayout, local_slices, reshard, splits_of
from ligermodels.parallel.context import context_parallel
from ligermodels.parallel.expert import expert_parallel
from ligermodels.parallel.state import give_whole_state
from ligermodels.parallel.tensor import tensor_parallel
from ligermodels.progress import track
from ligermodels.ranks import error_on_all_ranks, num_ranks, rank

REPLICATE, SHARD, CONTEXT, TENSOR = "dp_replicate", "dp_shard", "cp", "tp"
EXPERT = "ep"
DIMENSIONS = (REPLICATE, SHARD, CONTEXT, EXPERT, TENSOR)


def data_mesh_of(model: DecoderModel) -> DeviceMesh:
    """Return the mesh of the ranks that gradients of a sharded model are averaged over.

    Raises:
        ConfigError: the model is not sharded.
    """
    reshard(model)  # after a forward without backward, no parameter may be a sharded one
    data: DeviceMesh | None = ModelLayout.of(model).data
    if data is None:
        raise ConfigError("this model is not sharded; call ligermodels.shard(model) first")
    return data


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh with names of its dimensions. None becomes a mesh of all ranks.

    Raises:
        ConfigError: torch.distributed is not initialised, or the mesh has not all ranks, or lacks
            names that `shard` knows.
    """
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
    if {EXPERT, TENSOR} <= {*names}:
        raise ConfigError(
            f"shard: the mesh has the dimensions {names}; use either {EXPERT} or {TENSOR}, because "
            "tensor parallelism cannot cut experts"
        )
    return mesh


def fsdp_mesh(mesh: DeviceMesh, *, of_experts: bool = False) -> DeviceMesh:
    """Return the mesh for `fully_shard`: one dimension of shards, or copies and shards.

    Args: of_experts: whether it is that of the experts, of which the ranks of ep have others.
    """
    names = mesh.mesh_dim_names or ()
    if SHARD not in names or CONTEXT in names or EXPERT in names:
        # Without dp_shard, shards over a single rank are copies of the whole, averaged by the
        # engine of HSDP. The ranks of cp have other tokens, as those of dp_shard have, and so have
        # those of ep.
        # A process group orders its ranks, so those of all stay in the order of the mesh.
        apart = EXPERT if of_experts else TENSOR
        data = [name for name in names if name not in (REPLICATE, apart)]
        order = [name for name in (REPLICATE, *data, apart) if name in names]
        sizes = {name: mesh.size(names.index(name)) if name in names else 1 for name in DIMENSIONS}
        shards = math.prod(sizes[name] for name in data)
        ranks = mesh.mesh.permute([*map(names.index, order)]).reshape(
            sizes[REPLICATE], shards, sizes[apart]
        )
        mesh = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(REPLICATE, SHARD, apart))
    return mesh[REPLICATE, SHARD] if REPLICATE in names else mesh[SHARD]


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


# Models whose gathered weights take less than this keep them from forward to backward, and save
# the second gathering. 2 GiB are 1e9 parameters in bfloat16.
KEEP_GATHERED_BYTES = 2 * 2**30


def shard(
    model: DecoderModel,
    mesh: DeviceMesh | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | None = None,
) -> DecoderModel:
    """Spread a model over the ranks of a mesh, in place, and return it.

    Call it on every rank, before the optimizer is made. A model that
    `from_hf(path, device="meta")` has made is read now: each rank reads only its part. Train
    through `model(input_ids, labels=labels)`, where each rank has its own rows. Gradients are
    averaged over the ranks, so the normalizer of the loss is the average number of targets:
    `normalizer=mean_over_ranks(model, num_targets)`. The ranks of a tp or a cp group get the same
    rows, whole ones, and return the same loss and hidden states. Clip gradients with
    `ligermodels.clip_grad_norm_`. Memory plans, `save_hf` and `layer.compile()` (before this call,
    for each layer) work with the result.

    Args:
        model: of any family. Its weights keep their dtype, in which the optimizer updates them.
        mesh: of all ranks. Its dimensions have names from the list in `ligermodels.parallel.shard`;
            one dimension without a name is dp_shard. By default, one such dimension of all ranks.
        compute_dtype: in which weights are gathered and the model computes; by default, that of the
            weights. On GPUs, float32 weights are usually trained with torch.bfloat16 here.
        reduce_dtype: in which gradients are averaged; by default float32, or float64 if a weight
            is.
        reshard_after_forward: whether backward gathers the weights of a layer again. By default it
            does if all weights take 2 GiB or more in compute_dtype.
    Raises:
        ConfigError: the mesh has other dimensions or does not have all ranks, sizes of the model
            cannot be split over the ranks of tp or ep, trained parameters of a layer have several
            dtypes, a layer mixes tokens in a way that cp does
            not know, torch.distributed is not initialised, the model is sharded already, or is a
            model on the meta device that no checkpoint belongs to.
        CheckpointError: the values of the checkpoint cannot be read.
    """
    # These take half a second to import.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = checked_mesh(mesh)
    if any(map(is_sharded, model.parameters())) or isinstance(model, FSDPModule):
        raise ConfigError(f"shard: this {type(model).__name__} is sharded already")
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta and model.source.unread is None:
        raise ConfigError(
            "shard: the model is on the meta device, and no checkpoint belongs to it; load it "
            'with from_hf(path, device="meta"), or make it on another device'
        )
    check_dtypes(model)
    data_mesh = ModelLayout.of(model).data = fsdp_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    if CONTEXT in names:
        context_parallel(model, mesh[CONTEXT])
    if TENSOR in names:
        tensor_parallel(model, mesh[TENSOR])
        give_whole_state(model)
    if EXPERT in names:
        expert_parallel(model, mesh[EXPERT])
        give_whole_state(model)
    if reduce_dtype is None:
        wide = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        reduce_dtype = torch.float64 if wide else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        # Rounding arguments would round a normalizer of the loss, too.
        cast_forward_inputs=False,
    )
    if reshard_after_forward is None:
        total = sum(p.numel() * (compute_dtype or p.dtype).itemsize for p in model.parameters())
        reshard_after_forward = total >= KEEP_GATHERED_BYTES
    options: dict[str, Any] = {"mesh": data_mesh, "mp_policy": policy}
    if EXPERT in names:
        apart = options | {"mesh": fsdp_mesh(mesh, of_experts=True)}
        for module in [*model.layers.modules()]:
            if isinstance(module, Experts):
                fully_shard(module.router, reshard_after_forward=reshard_after_forward, **options)
                fully_shard(module, reshard_after_forward=reshard_after_forward, **apart)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
    if any(True for _ in model.head.parameters()):
        # Backward needs the head first, so it is kept. A tied head's weight is the embedding's.
        fully_shard(model.head, reshard_after_forward=False, **options)
    # The embedding and the last norm belong to the model itself.
    fully_shard(model, **options)
    if on_meta:
        model.to_empty(device=device_of(mesh))
        read_slices(model)
    return model


def check_dtypes(model: DecoderModel) -> None:
    """Raise ConfigError unless the trained parameters of each layer have one dtype."""
    for index, layer in enumerate(model.layers):
        dtypes = sorted({str(p.dtype) for p in layer.parameters() if p.requires_grad})
        if len(dtypes) > 1:
            raise ConfigError(
                f"shard: parameters of layers.{index} are in {' and '.join(dtypes)}, as in "
                "published checkpoints of Qwen3.5, but FSDP2 takes one dtype; load the model with "
                "from_hf(..., dtype=torch.float32), and pass compute_dtype=torch.bfloat16"
            )


@torch.no_grad()
def clip_grad_norm_(model: DecoderModel, max_norm: float) -> Tensor:
    """Scale the gradients of a sharded model so that their norm is at most max_norm.

    `torch.nn.utils.clip_grad_norm_` does not know of parameters that tensor parallelism has cut.

    Returns: the norm of all gradients before, a scalar, the same on all ranks.
    """
    device = device_of(data_mesh_of(model))
    # The sums of squares by the groups of ranks that have parts of the same parameters.
    squares: dict[tuple[Any, ...], Tensor] = {}
    grads, splits = [], splits_of(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        grads.append(local_tensor(parameter.grad))
        split, mesh = splits.get(name), parameter.device_mesh  # type: ignore[attr-defined]
        last = mesh.get_group(mesh.ndim - 1)
        groups = (last,) if split is None else (last, split.mesh.get_group())
        own = [each for each in local_slices(parameter.grad, split) if not each.is_copy]
        found = squares.get(groups, torch.zeros((), device=device))
        squares[groups] = found + sum(each.values.float().square().sum() for each in own)
    total = torch.zeros((), device=device)
    for sharing, square in squares.items():
        for group in sharing:
            dist.all_reduce(square, group=group)
        total += square
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return norm


def mean_over_ranks(model: DecoderModel, count: int | Tensor) -> float:
    """Return the average of a number over the ranks that gradients are averaged over.

    With the number of targets of a step's rows as `count`, this is the `normalizer` with which the
    averaged gradients are those of one process that sees the rows of all ranks.
    """
    mesh = data_mesh_of(model)
    total = torch.as_tensor(count, dtype=torch.float64).to(mesh.device_type)
    for name in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(name))
    return total.item() / mesh.size()


def read_slices(model: DecoderModel) -> None:
    """Read this rank's slices of the parameters of a model that `from_hf(device="meta")` made.

    Every rank must call it, after it has allocated the parameters.

    Raises:
        CheckpointError: on any rank, a value is NaN or infinite, a file was changed after its
            header was read, or a tied head differs from the embedding. All ranks raise.
    """
    checkpoint, model.source.unread = model.source.unread, None
    assert checkpoint is not None, "from_hf was not called with device='meta'"
    weight_map, weights = model.weight_map(model.built_from), dict(model.named_parameters())
    splits, shows = splits_of(model), False if rank() else None
    with error_on_all_ranks(CheckpointError):
        checkpoint.check_aliases(weight_map, share=(rank(), num_ranks()))
        entries = weight_map.entries
        for entry in track(entries, "loading weights", len(entries), shows):
            for each in local_slices(weights[entry.name], splits.get(entry.name)):
                checkpoint.read(entry, each.values, each.row, each.column)
    model.compute_buffers()
