"""The KV cache: keys and values of the tokens so far, or only of those in the window of a layer."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self


class CachedLayer:
    """A module that appends keys and values to a cache, or takes those of another layer.

    Attributes:
        layer_index: the number of its buffers in the cache.
        sliding_window: how many tokens it needs there, or None for all.
        kv_from: the layer_index of the layer whose keys and values it takes, or None if it has its
            own.
        shares_kv: whether other layers take its keys and values.
        causal: whether it uses a cache at all.
        recurrent: whether it keeps a state of a fixed size in the cache, in the place of keys.
    """

    layer_index: int
    sliding_window: int | None
    kv_from: int | None = None
    shares_kv: bool = False
    causal: bool = True
    recurrent: bool = False


class DecodeStep(NamedTuple):
    """Where the new tokens of each row stand in a step of decoding.

    These numbers are on the device, so the same launches serve every step.
    """

    ends: Tensor  # (batch,) int64, how many tokens each row has, the new ones among them
    firsts: Tensor | None = None  # (batch,) int64, how many of them are padding on the left


class KVCache:
    """Keys and values of the tokens so far, in one pair of buffers per layer.

    A layer with a window W keeps the last W tokens. Its buffers are min(W, max_length) long, and
    the token at position p of the row is in slot p % W. The buffers of other layers are max_length
    long. A recurrent layer has a state in the place of both: see `state`.

    Args:
        config: a config whose sliding_windows the cache reads.
        batch: number of rows.
        max_length: the largest number of tokens per row.
        dtype, device: dtype and device of the buffers. By default they are those of the first keys
            appended; under autocast, these may differ from the parameters'.
        sliding_windows: the window of each layer, used instead of config.sliding_windows. A layer
            whose window is None keeps all tokens.
        uses: how often a pass runs the same layer. Each time has its own keys and values.

    `length` is the number of tokens that all layers have. `update` writes new tokens after them,
    and `advance` adds the new tokens to `length` when every layer has written them. If a forward
    pass fails halfway, call `reset`: some layers may have overwritten tokens that other layers
    still have.

    Attributes:
        use: how often this pass has run the layer that runs next. The model sets it if `uses` is
            more than 1.
        step: during a step of decoding, where its tokens stand; otherwise None. Layers then write
            into `buffers` instead of calling `update`, and `advance` does nothing.
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
        uses: int = 1,
    ) -> None:
        self.batch = batch
        self.max_length = max_length
        self.dtype, self.device = dtype, device
        self.length = 0
        self.step: DecodeStep | None = None
        if sliding_windows is None:
            sliding_windows = config.sliding_windows
        # The number of tokens that each layer keeps.
        self.sizes = [max_length if w is None else min(w, max_length) for w in sliding_windows]
        self.uses, self.use, self._layers = uses, 0, len(self.sizes)
        self.sizes *= uses
        self.keys: list[Tensor | None] = [None] * len(self.sizes)
        self.values: list[Tensor | None] = [None] * len(self.sizes)
        self.states: list[tuple[Tensor, ...] | None] = [None] * len(self.sizes)
        self._written = [0] * len(self.sizes)
        # Layers with the same window hold the same positions, so they share one tensor.
        self._key_positions: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        extra: int = 0,
    ) -> Self:
        """Return a cache for the layers that a model has, whatever its config says.

        The windows are those of the causal `Attention` layers in it. A layer whose keys and values
        others take keeps as many as the widest window of them. Every layer with a window keeps
        `extra` tokens more, so that `truncate` may remove as many of the last ones, or a step of
        decoding write one more than as many. A layer that
        is several times in `model.layers` has buffers for each time.

        Raises:
            ValueError: two layers have the same layer_index, or the model has a recurrent layer,
                whose state cannot be truncated, and `extra` is not 0.
        """
        owners: dict[int, str] = {}
        needs: dict[int, list[int | None]] = {}  # windows of the layers that read these buffers
        for name, module in model.named_modules():
            if not isinstance(module, CachedLayer) or not module.causal:
                continue
            index = module.layer_index if module.kv_from is None else module.kv_from
            if module.recurrent and extra:
                raise ValueError(
                    f"KVCache: {name} is a {type(module).__name__}, which keeps a state of all "
                    "tokens so far, from which wrong drafts cannot be removed; generate without "
                    "drafts"
                )
            if module.kv_from is None and owners.setdefault(index, name) != name:
                raise ValueError(
                    f"KVCache: {owners[index]} and {name} both have layer_index={index}; give "
                    "every Attention its own layer_index"
                )
            needs.setdefault(index, []).append(module.sliding_window)
        times = Counter(map(id, getattr(model, "layers", ())))
        count = max([len(times), *(index + 1 for index in needs)])
        windows = [
            max(w + extra for w in each if w is not None) if None not in each else None
            for each in (needs.get(index, [None]) for index in range(count))
        ]
        uses = max(times.values(), default=1)
        return cls(None, batch, max_length, dtype, device, sliding_windows=windows, uses=uses)

    def _like(self, whole: "KVCache", batch: int) -> None:
        """Become an empty cache of so many rows for the layers of another one."""
        windows, options = whole.sizes[: whole._layers], (whole.dtype, whole.device)
        KVCache.__init__(
            self,
            *(None, batch, whole.max_length, *options),
            sliding_windows=windows,
            uses=whole.uses,
        )

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v and return the keys and values that the new tokens may attend to.

        The result contains the new tokens and all earlier ones. A layer with a window W returns
        only the earlier tokens that it still has, which are at least the last W - 1.
        `key_positions` returns their positions.

        Args: k, v (batch, kv heads, new, head_dim).
        Returns: keys and values (batch, kv heads, keys, head_dim).
        Raises:
            ValueError: the new tokens do not fit, their batch differs from the cache's, or a layer
                is updated twice in one pass.
        """
        if self.step is not None:
            raise ValueError(
                "KVCache: layers of another class than ligermodels.layers.Attention append keys in "
                "a step of decoding; generate without drafts"
            )
        end = self.end_of(k.shape[2])
        self._check_rows("keys", k)
        slot = layer_index + self.use * self._layers
        if slot >= len(self.sizes) or self._written[slot] > self.length:
            raise ValueError(
                f"KVCache: layer {layer_index} was updated twice in one pass; give every "
                "Attention its own layer_index. A layer that runs several times must be so many "
                "times in model.layers, and the cache be made with KVCache.of(model, ...). After a "
                "failed pass, call reset()"
            )
        self._written[slot] = end
        return self._append(self.keys, slot, k), self._append(self.values, slot, v)

    def _check_rows(self, what: str, x: Tensor) -> None:
        if len(x) != self.batch:
            raise ValueError(
                f"KVCache: cannot put {what} of batch {len(x)} in a cache made for {self.batch} "
                "rows"
            )

    def state(self, layer_index: int) -> tuple[Tensor, ...] | None:
        """Return the state of a recurrent layer after the tokens so far; None if there are none.

        Its tensors have the rows as their first dimension. A step of decoding overwrites them.
        """
        slot = layer_index + self.use * self._layers
        return self.states[slot] if self.length or self.step is not None else None

    def keep_state(self, layer_index: int, state: tuple[Tensor, ...]) -> None:
        """Copy the state after the new tokens into buffers, which stay where they are.

        Raises: ValueError if its rows are not those of the cache.
        """
        self._check_rows("states", state[0])
        slot = layer_index + self.use * self._layers
        for buffer, x in zip(self._state_buffers(slot, state), state, strict=True):
            buffer.copy_(x.detach())

    def _state_buffers(self, slot: int, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return a layer's buffers, which are made for the first state."""
        buffers = self.states[slot]
        if buffers is None:
            buffers = tuple(x.new_zeros(self.batch, *x.shape[1:]) for x in state)
            self.states[slot] = buffers
        return buffers

    def clear_states(self, row: int) -> None:
        """Let a row's states be those before its first token."""
        for buffers in self.states:
            for buffer in buffers or ():
                buffer[row].zero_()

    def end_of(self, new: int) -> int:
        """Return the number of tokens after `new` more.

        Raises:
            ValueError: the new tokens do not fit.
        """
        end = self.length + new
        if end > self.max_length:
            raise ValueError(
                f"KVCache: cannot put {end} tokens in a cache made for {self.max_length}; make the "
                "cache with a larger max_length"
            )
        return end

    def buffers(self, layer_index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, (batch, kv heads, slots, head_dim).

        The token at position p of a row is in slot p % slots.
        """
        slot = layer_index + self.use * self._layers
        keys, values = self.keys[slot], self.values[slot]
        assert keys is not None and values is not None, "a pass has written the prompt"
        return keys, values

    def key_positions(self, layer_index: int, new: int) -> Tensor | None:
        """Return the positions in the row of the keys that `update` has just returned.

        Call it after `update` and before `advance`.

        Args: new: the number of tokens that were appended.
        Returns: (keys,) int64 in the order of the keys, or None if the keys are all tokens so far,
            in order.
        """
        size, end = self.sizes[layer_index], self.length + new
        first = self.length - min(self.length, size - 1)
        if end <= size or (new > 1 and first == 0):
            return None
        if (size, new) not in self._key_positions:
            keys = self.keys[layer_index]
            assert keys is not None, "key_positions must be called after update"
            if new > 1:
                found = torch.arange(first, end, device=keys.device)
            else:
                slots = torch.arange(size, device=keys.device)
                found = end - 1 - (end - 1 - slots) % size
            self._key_positions[size, new] = found
        return self._key_positions[size, new]

    @contextmanager
    def step_at(self, ends: Tensor, firsts: Tensor | None = None) -> Iterator[None]:
        """Let the forward inside be a step of decoding, whose tokens stand there: `DecodeStep`."""
        self.step = DecodeStep(ends, firsts)
        try:
            yield
        finally:
            self.step = None

    def advance(self, tokens: int) -> None:
        """Add the tokens that every layer has written to `length`; call it once per forward."""
        if self.step is None:
            self.length += tokens
            self._key_positions.clear()

    def advance_decoded(self) -> None:
        """Add the token of a step of decoding to `length`, after the host has started the step."""
        self.advance(1)
        self._written = [self.length] * len(self._written)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. The next ones are written in the places of the others.

        In layers with a window, the removed tokens have overwritten earlier ones. So the cache must
        have been made with at least as many `extra` tokens as one call removes, and what is removed
        by several calls without new tokens between them counts together.

        Raises:
            ValueError: the cache does not have so many tokens, or has states of recurrent layers.
        """
        if any(self.states) and length != self.length:
            raise ValueError(
                "KVCache: states of recurrent layers cannot be truncated; call reset(), and read "
                "the tokens again"
            )
        if not 0 <= length <= self.length:
            raise ValueError(
                f"KVCache: cannot keep {length} tokens of {self.length}; pass a number from 0 to "
                f"{self.length}"
            )
        self.length = length
        self._written = [min(written, length) for written in self._written]
        self._key_positions.clear()

    def reset(self) -> None:
        """Remove all tokens from the cache, but keep its buffers."""
        self.length = 0
        self._written = [0] * len(self.sizes)
        self._key_positions.clear()

    def _append(self, buffers: list[Tensor | None], index: int, x: Tensor) -> Tensor:
        """Write x after the layer's tokens; return the earlier tokens that x may see, with x."""
        size, new, length = self.sizes[index], x.shape[2], self.length
        buffer = self._buffer(buffers, index, x)
        end = length + new
        if end <= size:
            buffer.narrow(2, length, new).copy_(x)  # faster on the host than slices
            return buffer.narrow(2, 0, end)
        if new == 1:
            buffer[:, :, length % size] = x[:, :, 0]
            return buffer
        # The new tokens may overwrite tokens that the first of them still see, so return a copy.
        x = x.to(buffer)
        past = torch.arange(length - min(length, size - 1), length, device=buffer.device)
        seen = torch.cat([buffer[:, :, past % size], x], dim=2) if length else x
        kept = torch.arange(max(length, end - size), end, device=buffer.device)
        buffer[:, :, kept % size] = x[:, :, kept - length]
        return seen

    def _buffer(self, buffers: list[Tensor | None], index: int, x: Tensor) -> Tensor:
        """Return a layer's buffer, which is made for the first keys or values x."""
        buffer = buffers[index]
        if buffer is None:
            shape = (self.batch, x.shape[1], self.sizes[index], x.shape[3])
            buffer = torch.empty(shape, dtype=self.dtype or x.dtype, device=self.device or x.device)
            buffers[index] = buffer
        return buffer

    def copy_row(self, source: int, targets: list[int]) -> None:
        """Copy the keys, values and states of a row to other rows."""
        states = (x for buffers in self.states for x in buffers or ())
        for buffer in (*self.keys, *self.values, *states):
            if buffer is not None:
                for target in targets:
                    buffer[target].copy_(buffer[source])


class CacheRow(KVCache):
    """A cache of one row, which writes into the buffers of a row of another cache."""

    def __init__(self, whole: KVCache, row: int) -> None:
        self._like(whole, 1)
        self.whole, self.row = whole, row

    def _buffer(self, buffers: list[Tensor | None], index: int, x: Tensor) -> Tensor:
        of_whole = self.whole.keys if buffers is self.keys else self.whole.values
        buffers[index] = row = self.whole._buffer(of_whole, index, x)[self.row : self.row + 1]
        return row

    def _state_buffers(self, slot: int, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        whole = self.whole._state_buffers(slot, state)
        self.states[slot] = rows = tuple(x[self.row : self.row + 1] for x in whole)
        return rows


class PackedRows(KVCache):
    """A cache that takes one packed row of documents, and writes each into a row of another cache.

    Args:
        whole: the other cache.
        rows: its row for each document.
        lengths: the number of tokens of each document.
        device: where the keys and values are.
    """

    def __init__(
        self, whole: KVCache, rows: list[int], lengths: list[int], device: torch.device
    ) -> None:
        self._like(whole, whole.batch)
        self.whole, self.rows = whole, rows
        self.keys, self.values = whole.keys, whole.values
        self.places: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for size in set(self.sizes):
            # Of each document, a layer keeps the last `size` tokens.
            kept = [range(max(0, length - size), length) for length in lengths]
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            found = [
                (start + position, row, position % size)
                for start, row, positions in zip(starts, rows, kept)
                for position in positions
            ]
            tokens, of_rows, slots = torch.tensor(found, device=device).unbind(1)
            self.places[size] = tokens, of_rows, slots

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (1, kv heads, tokens, head_dim) into their rows, and return them."""
        index = layer_index + self.use * self._layers
        tokens, rows, slots = self.places[self.sizes[index]]
        for buffers, x in ((self.keys, k), (self.values, v)):
            buffer = self._buffer(buffers, index, x)
            buffer[rows, :, slots] = x[0].transpose(0, 1)[tokens].to(buffer.dtype)
        return k, v

    def keep_state(self, layer_index: int, state: tuple[Tensor, ...]) -> None:
        """Copy the state after each document into its row."""
        slot = layer_index + self.use * self._layers
        for buffer, x in zip(self.whole._state_buffers(slot, state), state, strict=True):
            buffer[self.rows] = x.to(buffer.dtype)

    def key_positions(self, layer_index: int, new: int) -> None:
        """Return None: the keys of a packed row are those of its tokens, in order."""

    def advance(self, tokens: int) -> None:
        """Do nothing: the rows have lengths of their own."""
