"""Whole parameters in the state dict of a model that tensor parallelism has cut.

A rank holds the rows of its own heads, which no placement of a DTensor describes. In a state dict
it gives them as slices of a whole tensor, which torch.distributed.checkpoint writes and reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import TensorSlice, local_slices, reshard, splits_of


class SlicedTensor(Tensor):
    """A whole tensor of which this rank holds slices, as views of its own memory.

    `full_tensor()` returns the values if every rank calls it. The special methods are the protocol
    of torch.distributed.checkpoint. Other operations raise NotImplementedError.
    """

    slices: list[TensorSlice]
    gathered: Callable[[], Tensor] | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        slices: list[TensorSlice],
        gathered: Callable[[], Tensor] | None = None,
    ) -> SlicedTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.slices, made.gathered = slices, gathered
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(
            f"{func} needs the values of a tensor of which each rank holds slices; call "
            "full_tensor() on every rank"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"SlicedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.slices)} here)"
        )

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
                    properties=TensorProperties.create_from_tensor(each.values),
                    size=torch.Size(self.shape),
                ),
            )
            for each, chunk in zip(self.slices, self.__create_chunk_list__())
            if not each.is_copy
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(each.offsets), each.values.shape)
            for each in self.slices
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for each in self.slices:
            if torch.Size(each.offsets) == index.offset:
                return each.values
        raise ValueError(f"{index} is not on this rank")


def give_whole_state(model: DecoderModel) -> None:
    """Let `state_dict` and `load_state_dict` of a cut model speak of whole parameters."""
    model.register_state_dict_post_hook(_with_whole_parameters)
    model.register_load_state_dict_pre_hook(_take_own_slices)


def _with_whole_parameters(
    model: DecoderModel, state: dict[str, Any], prefix: str, _: object
) -> None:
    reshard(model)
    for name, split in splits_of(model).items():
        if prefix + name in state:
            parameter = model.get_parameter(name)
            state[prefix + name] = SlicedTensor(
                split.shape,
                parameter.dtype,
                local_slices(parameter, split),
                partial(model.whole_parameter, name),
            )


def _take_own_slices(model: DecoderModel, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Copy this rank's slices of whole parameters, and leave nothing of them to be loaded."""
    reshard(model)
    for name, split in splits_of(model).items():
        given = state.get(prefix + name)
        if not isinstance(given, Tensor) or tuple(given.shape) != split.shape:
            continue  # the model itself says what is wrong
        parameter = model.get_parameter(name)
        slices = local_slices(parameter, split)
        if isinstance(given, SlicedTensor):
            theirs = {each.offsets: each.values for each in given.slices}
            values = [theirs[each.offsets] for each in slices]
        else:
            whole = given.detach()
            values = [each.place_in(whole) for each in slices]
        for each, value in zip(slices, values):
            each.values.copy_(value)
        state[prefix + name] = parameter.detach()
