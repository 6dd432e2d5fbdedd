"""Who attends to whom: causal always, inside documents, past padding, and within a window."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ligermodels.layers.flex import compiled


class AttentionMask:
    """What one forward pass says of who sees whom, for all layers whatever their window.

    Every query sees the keys up to itself; of those

    Args:
        queries, keys: how many; the queries are the last of the keys (a cache holds the others).
        documents: (batch or 1, keys) each token's document: only keys of the query's own.
        tokens: (batch, keys) bool: only keys where it is True; the others are padding.
        cu_seqlens, max_seqlen: (documents + 1,) and their longest, for a single row of documents;
            what the varlen kernel takes in place of `documents`.
        visible: (batch, 1, queries, keys) bool: instead of causality and all of the above.

    A window W leaves a query the last W keys, its own included. Each form is made once per window
    and kept: `dense` for scaled_dot_product_attention, `blocks` for FlexAttention.
    """

    def __init__(
        self,
        queries: int,
        keys: int | None = None,
        *,
        documents: Tensor | None = None,
        tokens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        visible: Tensor | None = None,
    ) -> None:
        self.queries = queries
        self.keys = queries if keys is None else keys
        self.documents = documents
        self.tokens = None if tokens is None else tokens.bool()
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.visible = visible
        # By window, each with the columns that it was made for.
        self._dense: dict[int | None, tuple[Tensor | None, Tensor]] = {}
        self._blocks: dict[int | None, tuple[Tensor | None, BlockMask]] = {}
        self._ends: tuple[Tensor, int] | None = None

    @property
    def past(self) -> int:
        """How many keys come before the first query."""
        return self.keys - self.queries

    def is_causal(self, window: int | None) -> bool:
        """Whether causality alone says it all within this window."""
        return (
            self.documents is None
            and self.tokens is None
            and self.visible is None
            and self.past == 0
            and (window is None or window >= self.keys)
        )

    def is_open(self, window: int | None, columns: Tensor | None = None) -> bool:
        """Whether there is one query, and it sees every key that is held."""
        held = self.keys if columns is None else len(columns)
        return (
            self.queries == 1
            and self.documents is None
            and self.tokens is None
            and self.visible is None
            and (window is None or held <= window)
        )

    def dense(
        self, window: int | None, device: torch.device, columns: Tensor | None = None
    ) -> Tensor:
        """Bool (batch or 1, 1, queries, keys), True where a query sees a key.

        Args: columns (held,) int64: which of the keys there are, in this order; default all.
        """
        made = self._dense.get(window)
        if made is None or made[0] is not columns:
            query = torch.arange(self.past, self.keys, device=device)[:, None]
            key = torch.arange(self.keys, device=device) if columns is None else columns
            if self.visible is None:
                sees = (key <= query)[None]
                if self.documents is not None:
                    documents = self.documents
                    sees = sees & (documents[:, self.past :, None] == documents[:, None, key])
                if self.tokens is not None:
                    sees = sees & self.tokens[:, None, key]
                sees = sees.unsqueeze(1)
            else:
                sees = self.visible
            if window is not None:
                sees = sees & (key > query - window)
            made = self._dense[window] = (columns, sees)
        return made[1]

    def blocks(
        self, window: int | None, batch: int, device: torch.device, columns: Tensor | None = None
    ) -> BlockMask:
        """FlexAttention's block mask: memory for the blocks of a dense one, not for its pairs.

        Args: batch, of the queries; columns as in `dense`.
        """
        made = self._blocks.get(window)
        if made is None or made[0] is not columns:
            # One function of tensors serves every case, so that it is compiled once.
            reach = torch.full((), window or self.keys + 1, device=device)
            first = torch.full((), self.past, device=device)
            column = torch.arange(self.keys, device=device) if columns is None else columns
            documents, tokens = self.documents, self.tokens
            if documents is None:
                documents = torch.zeros(1, self.keys, dtype=torch.int64, device=device)
            if tokens is None:
                tokens = torch.ones(1, self.keys, dtype=torch.bool, device=device)
            documents, tokens = documents.expand(batch, -1), tokens.expand(batch, -1)

            def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                at, other = first + query, column[key]
                near = (other <= at) & (other > at - reach)
                return near & (documents[b, at] == documents[b, other]) & tokens[b, other]

            rows = batch if self.documents is not None or self.tokens is not None else 1
            blocks = compiled(create_block_mask)(
                sees, rows, None, self.queries, len(column), device=device
            )
            made = self._blocks[window] = (columns, blocks)
        return made[1]

    def ends(self, batch: int, device: torch.device) -> tuple[Tensor, int]:
        """Starts of the documents of all rows laid end to end, (documents + 1,) int32, and their
        longest, for the varlen kernel; without cu_seqlens every row is a document."""
        if self._ends is None:
            if self.cu_seqlens is None:
                total = batch * self.queries
                rows = torch.arange(0, total + 1, self.queries, dtype=torch.int32, device=device)
                self._ends = rows, self.queries
            else:
                assert self.max_seqlen is not None
                self._ends = self.cu_seqlens.to(torch.int32), self.max_seqlen
        return self._ends


def document_ids(position_ids: Tensor) -> Tensor:
    """Number of each token's document (batch, seq); one ends where positions do not rise by 1."""
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

    Values are looked at on a CPU in eager mode only; on a GPU that would wait for the device.
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
