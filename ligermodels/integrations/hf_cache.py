"""transformers' KV cache behind the interface of `ligermodels.KVCache`."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.layers.kv_cache import KVCache


class HFCache(KVCache):
    """A view of one of transformers' dynamic caches for one forward pass.

    Raises:
        ValueError: the cache has a fixed length.
    """

    def __init__(self, cache: Any) -> None:
        if getattr(cache, "is_compileable", False) or not hasattr(cache, "get_seq_length"):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; only dynamic caches work: leave out "
                "cache_implementation, or use 'dynamic', 'offloaded' or 'quantized'"
            )
        self.cache = cache
        self.length, self.uses = cache.get_seq_length(), 1
        self._found: dict[int, tuple[int, torch.device]] = {}

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (batch, kv heads, new, head_dim); return all that the cache has kept.

        Raises:
            ValueError: a layer is updated twice in the pass.
        """
        if layer_index in self._found:
            raise ValueError(
                f"past_key_values: layer {layer_index} was updated twice in one pass, and "
                "transformers' caches have one place for it; generate with the model of this "
                "library, or with use_cache=False"
            )
        keys, values = self.cache.update(k, v, layer_index)
        self._found[layer_index] = keys.shape[2], keys.device
        return keys, values

    def key_positions(self, layer_index: int, new: int) -> Tensor | None:
        """Return the positions of the keys, or None if they are all tokens so far."""
        count, device = self._found[layer_index]
        end = self.length + new
        return None if count == end else torch.arange(end - count, end, device=device)

    def advance(self, tokens: int) -> None:
        """Do nothing: the cache counts its tokens itself."""
