"""Measure the memory that autograd saves for backward."""

from __future__ import annotations

import torch
from torch import Tensor


class SavedBytes:
    """Counts the bytes of the storages that are saved for backward while this is active.

    What exists anyway, such as parameters, does not count. A storage counts once and as a whole,
    even if several views of it are saved.

    Args: given: tensors that do not count, and modules whose parameters do not.
    """

    def __init__(self, *given: torch.nn.Module | Tensor) -> None:
        known = [[x] if isinstance(x, Tensor) else x.parameters() for x in given]
        self.known = {x.untyped_storage().data_ptr() for tensors in known for x in tensors}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage
        return tensor

    def __enter__(self) -> SavedBytes:
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hooks.__exit__(*exception)

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())
