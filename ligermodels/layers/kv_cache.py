"""Keys and values of the tokens so far: all of them, or a layer's window of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Keys and values of the tokens so far, one pair of buffers per layer.

    A layer with a window W keeps the last W tokens: its buffers are min(W, max_length) long, and
    the token at position p of the row lies in slot p % W. Other layers' are max_length long.

    Args:
        config: gives sliding_windows.
        batch: rows.
        max_length: tokens per row that fit.
        dtype, device: of the buffers; by default those of the first keys that come, which under
            autocast are not the parameters'.
        sliding_windows: instead of config.sliding_windows; one per layer, None keeps everything.

    `length` is the number of tokens that all layers have; `update` writes behind them, and
    `advance` counts the written ones once every layer has them. After a forward pass that failed
    halfway some layers may have lost tokens to others: `reset`.
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        sliding_windows: Sequence[int | None] | None = None,
    ) -> None:
        self.batch = batch
        self.max_length = max_length
        self.dtype, self.device = dtype, device
        self.length = 0
        if sliding_windows is None:
            sliding_windows = config.sliding_windows
        # How many tokens each layer keeps.
        self.sizes = [max_length if w is None else min(w, max_length) for w in sliding_windows]
        self.keys: list[Tensor | None] = [None] * len(self.sizes)
        self.values: list[Tensor | None] = [None] * len(self.sizes)
        self._written = [0] * len(self.sizes)
        # Layers of one window hold keys of the same positions.
        self._key_positions: dict[tuple[int, int], Tensor] = {}

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, kv heads, new, head_dim); return what the new tokens may attend to.

        Of the tokens before them that is all, or for a layer with a window what it still has of
        them, at least the last W - 1. Same layout; `key_positions` says which tokens they are.

        Raises:
            ValueError: the new tokens do not fit, their batch is not the cache's, or a layer
                comes twice in one pass.
        """
        new = k.shape[2]
        end = self.length + new
        if end > self.max_length:
            raise ValueError(f"KVCache: {end} tokens in a cache made for {self.max_length}")
        if k.shape[0] != self.batch:
            raise ValueError(f"KVCache: batch {k.shape[0]} in a cache made for {self.batch}")
        if self._written[layer_index] > self.length:
            raise ValueError(
                f"KVCache: layer {layer_index} comes twice in one pass; give every Attention a "
                "layer_index of its own, and call reset() after a pass that failed"
            )
        self._written[layer_index] = end
        return self._append(self.keys, layer_index, k), self._append(self.values, layer_index, v)

    def key_positions(self, layer_index: int, new: int) -> Tensor | None:
        """Positions in the row of the keys that `update` has just returned.

        Call it between `update` and `advance`.

        Args: new, how many tokens were appended.
        Returns: (keys,) int64 in the keys' order, or None where they are all so far, in order.
        """
        size, end = self.sizes[layer_index], self.length + new
        first = self.length - min(self.length, size - 1)
        if end <= size or (new > 1 and first == 0):
            return None
        if (size, new) not in self._key_positions:
            keys = self.keys[layer_index]
            assert keys is not None, "key_positions follow update"
            if new > 1:
                found = torch.arange(first, end, device=keys.device)
            else:
                slots = torch.arange(size, device=keys.device)
                found = end - 1 - (end - 1 - slots) % size
            self._key_positions[size, new] = found
        return self._key_positions[size, new]

    def advance(self, tokens: int) -> None:
        """Count tokens that every layer has written; once per forward."""
        self.length += tokens
        self._key_positions.clear()

    def reset(self) -> None:
        """Forget the tokens, keep the buffers."""
        self.length = 0
        self._written = [0] * len(self.sizes)
        self._key_positions.clear()

    def _append(self, buffers: list[Tensor | None], index: int, x: Tensor) -> Tensor:
        """Write x behind the tokens there; return the past that x may see, and x."""
        size, new, length = self.sizes[index], x.shape[2], self.length
        buffer = buffers[index]
        if buffer is None:
            shape = (self.batch, x.shape[1], size, x.shape[3])
            buffer = torch.empty(shape, dtype=self.dtype or x.dtype, device=self.device or x.device)
            buffers[index] = buffer
        end = length + new
        if end <= size:
            buffer[:, :, length:end] = x
            return buffer[:, :, :end]
        if new == 1:
            buffer[:, :, length % size] = x[:, :, 0]
            return buffer
        # Several tokens may overwrite what the first of them still see: give out a copy.
        x = x.to(buffer)
        past = torch.arange(length - min(length, size - 1), length, device=buffer.device)
        seen = torch.cat([buffer[:, :, past % size], x], dim=2) if length else x
        kept = torch.arange(max(length, end - size), end, device=buffer.device)
        buffer[:, :, kept % size] = x[:, :, kept - length]
        return seen
