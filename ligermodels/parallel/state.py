"""Whole parameters in the state dict of a model that tensor parallelism has cut.

A rank holds the rows of its own heads, which no placement of a DTensor describes. In a state dict
it gives them as parts of a whole tensor, which torch.distributed.checkpoint writes and reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligermodels.models.base import DecoderModel
from ligermodels.models.parts import Part, local_parts, reshard


class PartsTensor(Tensor):
    """A whole tensor of which this rank holds parts, as views of its own memory.

    `full_tensor()` returns the values if every rank calls it. The special methods are the protocol
    of torch.distributed.checkpoint. Other operations raise NotImplementedError.
    """

    parts: list[Part]
    gathered: Callable[[], Tensor] | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: list[Part],
        gathered: Callable[[], Tensor] | None = None,
    ) -> PartsTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.parts, made.gathered = parts, gathered
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(
            f"{func} needs the values of a tensor of which each rank holds parts; call "
            "full_tensor() on every rank"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartsTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.parts)} here)"

    def full_tensor(self) -> Tensor:
        """Return the values on this rank. Every rank must call it."""
        assert self.gathered is not None, "only the tensors of a state dict can be gathered"
        return self.gathered()

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(part.values),
                    size=torch.Size(self.shape),
                ),
            )
            for part, chunk in zip(self.parts, self.__create_chunk_list__())
            if not part.is_copy
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(part.offsets), part.values.shape) for part in self.parts
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for part in self.parts:
            if torch.Size(part.offsets) == index.offset:
                return part.values
        raise ValueError(f"{index} is not on this rank")


def give_whole_state(model: DecoderModel) -> None:
    """Let `state_dict` and `load_state_dict` of a cut model speak of whole parameters."""
    model.register_state_dict_post_hook(_with_whole_parameters)
    model.register_load_state_dict_pre_hook(_take_own_parts)


def _with_whole_parameters(
    model: DecoderModel, state: dict[str, Any], prefix: str, _: object
) -> None:
    reshard(model)
    for name, cut in model.tensor_shards.items():
        if prefix + name in state:
            parameter = model.get_parameter(name)
            state[prefix + name] = PartsTensor(
                cut.shape,
                parameter.dtype,
                local_parts(parameter, cut),
                partial(model.whole_parameter, name),
            )


def _take_own_parts(model: DecoderModel, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Copy this rank's parts of whole parameters, and leave nothing of them to be loaded."""
    reshard(model)
    for name, cut in model.tensor_shards.items():
        given = state.get(prefix + name)
        if not isinstance(given, Tensor) or tuple(given.shape) != cut.shape:
            continue  # the model itself says what is wrong
        parameter = model.get_parameter(name)
        parts = local_parts(parameter, cut)
        if isinstance(given, PartsTensor):
            theirs = {part.offsets: part.values for part in given.parts}
            values = [theirs[part.offsets] for part in parts]
        else:
            whole = given.detach()
            values = [part.place_in(whole) for part in parts]
        for part, value in zip(parts, values):
            part.values.copy_(value)
        state[prefix + name] = parameter.detach()
