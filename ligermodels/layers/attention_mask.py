"""Which query sees which key: causality, documents, padding and windows."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

# Every head_dim, dtype and soft cap in the process counts as one; torch.compile's own limit is 8.
_RECOMPILE_LIMIT = 256


class AttentionMask:
    """What one forward pass says of which query sees which key, for layers of any window.

    Without arguments a query sees every key up to its own position. Each argument hides more.

    Args:
        queries, keys: how many there are; the queries are the last of the keys (a cache holds the
            others). By default there are as many keys as queries.
        document_ids: (batch or 1, keys) int64; a query sees only keys of its own document.
        padding_mask: (batch, keys), 0 or False for padding, which nobody sees.
        cu_seqlens, max_seqlen: (documents + 1,) int, where the documents of a single row start,
            and the longest of them: what the varlen kernel takes in place of document_ids.
        mask: (batch, 1, queries, keys) bool, True where a query sees a key. It replaces causality
            and everything above.

    A window W leaves each query the last W keys, its own included. `dense` gives the mask to
    scaled_dot_product_attention, `block_mask` to FlexAttention and `varlen_seqlens` to the varlen
    kernel. Each is made once per window and kept.
    """

    def __init__(
        self,
        queries: int,
        keys: int | None = None,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self.queries = queries
        self.keys = queries if keys is None else keys
        self.document_ids = document_ids
        self.padding_mask = None if padding_mask is None else padding_mask.bool()
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.mask = mask
        # By window, each with the key positions that it was made for.
        self._dense: dict[int | None, tuple[Tensor | None, Tensor]] = {}
        self._block_masks: dict[int | None, tuple[Tensor | None, BlockMask]] = {}
        self._varlen_seqlens: tuple[Tensor, int] | None = None

    @property
    def past(self) -> int:
        """How many keys come before the first query."""
        return self.keys - self.queries

    @property
    def _is_only_causal(self) -> bool:
        """Whether nothing but causality and a window hides a key."""
        return self.document_ids is None and self.padding_mask is None and self.mask is None

    def is_causal(self, window: int | None) -> bool:
        """Whether every query sees exactly the keys up to its own within this window."""
        return self._is_only_causal and self.past == 0 and (window is None or window >= self.keys)

    def hides_nothing(self, window: int | None, key_positions: Tensor | None = None) -> bool:
        """Whether there is one query, and it sees every key that is held."""
        held = self.keys if key_positions is None else len(key_positions)
        return self.queries == 1 and self._is_only_causal and (window is None or held <= window)

    def dense(
        self, window: int | None, device: torch.device, key_positions: Tensor | None = None
    ) -> Tensor:
        """Bool (batch or 1, 1, queries, keys), True where a query sees a key.

        Args: key_positions (held,) int64, which of the keys there are, in this order; by default
            all of them.
        """
        made = self._dense.get(window)
        if made is None or made[0] is not key_positions:
            query = torch.arange(self.past, self.keys, device=device)[:, None]
            key = torch.arange(self.keys, device=device) if key_positions is None else key_positions
            if self.mask is None:
                sees = (key <= query)[None]
                if self.document_ids is not None:
                    ids = self.document_ids
                    sees = sees & (ids[:, self.past :, None] == ids[:, None, key])
                if self.padding_mask is not None:
                    sees = sees & self.padding_mask[:, None, key]
                sees = sees.unsqueeze(1)
            else:
                sees = self.mask
            if window is not None:
                sees = sees & (key > query - window)
            made = self._dense[window] = (key_positions, sees)
        return made[1]

    def block_mask(
        self,
        window: int | None,
        batch: int,
        device: torch.device,
        key_positions: Tensor | None = None,
    ) -> BlockMask:
        """FlexAttention's block mask, which takes memory for blocks and not for pairs.

        Args: batch, of the queries; key_positions as in `dense`.
        """
        made = self._block_masks.get(window)
        if made is None or made[0] is not key_positions:
            # One function of tensors serves every case, so that it is compiled once.
            reach = torch.full((), window or self.keys + 1, device=device)
            first = torch.full((), self.past, device=device)
            position = torch.arange(self.keys, device=device)
            position = position if key_positions is None else key_positions
            ids, padding = self.document_ids, self.padding_mask
            rows = 1 if ids is None and padding is None else batch
            if ids is None:
                ids = torch.zeros(1, self.keys, dtype=torch.int64, device=device)
            if padding is None:
                padding = torch.ones(1, self.keys, dtype=torch.bool, device=device)
            ids, padding = ids.expand(batch, -1), padding.expand(batch, -1)

            def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                at, other = first + query, position[key]
                near = (other <= at) & (other > at - reach)
                return near & (ids[b, at] == ids[b, other]) & padding[b, other]

            blocks = compiled(create_block_mask)(
                sees, rows, None, self.queries, len(position), device=device
            )
            made = self._block_masks[window] = (key_positions, blocks)
        return made[1]

    def varlen_seqlens(self, batch: int, device: torch.device) -> tuple[Tensor, int]:
        """cu_seqlens (documents + 1,) int32 of all rows laid end to end, and the longest document.

        Without cu_seqlens of its own, every row is a document.
        """
        if self._varlen_seqlens is None:
            if self.cu_seqlens is None:
                total = batch * self.queries
                rows = torch.arange(0, total + 1, self.queries, dtype=torch.int32, device=device)
                self._varlen_seqlens = rows, self.queries
            else:
                assert self.max_seqlen is not None
                self._varlen_seqlens = self.cu_seqlens.to(torch.int32), self.max_seqlen
        return self._varlen_seqlens

    def to(self, device: torch.device, non_blocking: bool = False) -> "AttentionMask":
        """The same mask for tensors on another device, with nothing made yet."""
        names = ("document_ids", "padding_mask", "cu_seqlens", "mask")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in given.items()}
        return AttentionMask(self.queries, self.keys, max_seqlen=self.max_seqlen, **moved)


def document_ids_from_positions(position_ids: Tensor) -> Tensor:
    """Number each token's document (batch, seq); one ends where positions do not rise by 1."""
    starts = torch.zeros_like(position_ids, dtype=torch.int64)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts.cumsum(-1)


def positions_from_cu_seqlens(cu_seqlens: Tensor, batch: int, seq: int) -> Tensor:
    """Position of each token (batch, seq) inside its document, for documents laid end to end."""
    token = torch.arange(batch * seq, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens.to(torch.int64), token, right=True) - 1
    return (token - cu_seqlens[document]).view(batch, seq)


def check_cu_seqlens(cu_seqlens: Tensor, seq: int, max_seqlen: int | None) -> None:
    """Raise ValueError unless cu_seqlens rises from 0 to seq by at most max_seqlen.

    Values are read on a CPU in eager mode only; on a GPU that would wait for the device.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; expected int32 "
            "or int64 of shape (documents + 1,)"
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = cu_seqlens.diff()
    if len(lengths) == 0 or cu_seqlens[0] != 0 or cu_seqlens[-1] != seq or lengths.min() < 1:
        raise ValueError(f"cu_seqlens {cu_seqlens.tolist()}: expected to rise from 0 to {seq}")
    if max_seqlen is not None and lengths.max() > max_seqlen:
        raise ValueError(
            f"max_seqlen {max_seqlen}: a document of cu_seqlens has {int(lengths.max())} tokens"
        )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile(function), or the function itself where an outer torch.compile takes it in.

    FlexAttention and its masks have to be compiled: uncompiled they make every score.
    """
    return function if torch.compiler.is_compiling() else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # With fullgraph: past its limit torch.compile would otherwise run the function uncompiled.
    made = torch.compile(function, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        # A second scale or cap in a process would become a symbol, which the op does not take.
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT, specialize_float=True):
            return made(*args, **kwargs)

    return call
