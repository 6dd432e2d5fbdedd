"""The attention mask: which keys each query may attend to."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ligermodels.kernels.checks import check_count
from ligermodels.layers.sequence_shard import SequenceShard

# torch.compile compiles a function again for each combination of head_dim, dtype and soft cap in
# the process. Its default limit is 8.
_RECOMPILE_LIMIT = 256

_Rule = tuple[int | None, bool]  # a layer's window, and whether it is causal


class VarlenSeqlens(NamedTuple):
    """The arguments of the varlen kernel for a mask.

    Attributes:
        queries, keys: (documents + 1,) int32, where each document begins in all rows joined.
        max_queries, max_keys: the length of the longest one.
        first_key: the number of keys that no query of any row sees, at the start of each row; the
            kernel gets those after them.
        seen: (keys after them,) bool, whether the documents of the queries have the key. None
            means that all are seen.
    """

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int
    first_key: int = 0
    seen: Tensor | None = None


class KeyRanges(NamedTuple):
    """Which keys each query may see; the arguments of `kernels.wide_attention`.

    Attributes:
        ranges: for each query, the first key in its range and the one after the last one, then for
            each key the same of queries; int32.
        ids: (batch, queries) and (batch, keys) int32, of which a query and its keys have the same.
            None means that a query sees all keys in its range.
    """

    ranges: tuple[Tensor, Tensor, Tensor, Tensor]
    ids: tuple[Tensor, Tensor] | None


class AttentionMask:
    """The mask of one forward pass, from which each layer derives the mask for its own rule.

    A layer's rule is whether it is causal, and its window. A query of a causal layer sees every key
    up to its own position; a query of another layer sees every key. A window W leaves only keys
    that are less than W positions away. Each argument below hides more keys, except that a prefix
    shows some.

    Args:
        queries, keys: the number of queries and of keys. By default keys equals queries.
        past: the number of keys before the first query. By default the queries are the last tokens
            of the keys (the earlier keys come from a cache).
        document_ids: (batch or 1, keys) integers. A query sees only keys of its own document.
        padding_mask: (batch or 1, keys), 0 or False for padding. No query sees padding.
        padding_at_ends: whether the tokens of each row have padding only before and after them.
            Then the varlen kernel may take them as documents, and padding sees other padding. The
            kernel would compute something else for padding between tokens: see `fault`.
        cu_seqlens, max_seqlen: (documents + 1,) int, the starts of the documents in all rows
            joined, and the length of the longest one. The varlen kernel reads these instead of
            document_ids.
        prefix_lengths: (batch or 1,) integers. In a causal layer, every query also sees the first
            so many keys of its row, which include padding. Negative numbers count as 0.
        mask: (batch or 1, 1, queries, keys) bool, True where a query sees a key. It replaces
            causality, documents, padding and prefix.
        shard: the part of each row that the queries are, under context parallelism. Attention then
            takes the mask of each chunk of it from `parts`.
    Raises:
        ValueError: a tensor has another shape or dtype.

    `dense` makes the mask for scaled_dot_product_attention, `block_mask` makes it for
    FlexAttention, `varlen_seqlens` for the varlen kernel and `key_ranges` for that of wide heads.
    Each result is computed once per rule
    and cached.

    Attributes:
        fault: (batch, 1, 1), NaN for rows of which padding_at_ends is not true, and else 0. It is
            None unless the varlen kernel or a gated delta net has needed it. A caller that passes
            padding_at_ends adds it to the result, because reading the values on a GPU would be a
            host synchronisation.
    """

    def __init__(
        self,
        queries: int,
        keys: int | None = None,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        padding_at_ends: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        prefix_lengths: Tensor | None = None,
        mask: Tensor | None = None,
        past: int | None = None,
        shard: SequenceShard | None = None,
    ) -> None:
        self.queries = queries
        self.keys = queries if keys is None else keys
        self.past = self.keys - queries if past is None else past
        self.is_part = past is not None
        self.shard = shard
        for name, given, shape in (
            ("document_ids", document_ids, (self.keys,)),
            ("padding_mask", padding_mask, (self.keys,)),
            ("prefix_lengths", prefix_lengths, ()),
            ("mask", mask, (1, self.queries, self.keys)),
        ):
            if given is not None:
                _check_given(name, given, shape)
        if document_ids is not None and self.keys < queries:
            raise ValueError(
                f"AttentionMask: document_ids need a key for each query, but there are {queries} "
                f"queries and {self.keys} keys; hide keys with padding_mask or mask instead"
            )
        self.document_ids = document_ids
        self.padding_mask = None if padding_mask is None else padding_mask.bool()
        self.padding_at_ends = padding_at_ends
        self.fault: Tensor | None = None
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.prefix_lengths = prefix_lengths
        self.mask = mask
        # Whether documents, padding or a mask may hide a key.
        self._has_hidden_keys = any(x is not None for x in (document_ids, padding_mask, mask))
        # Each value also holds the key positions that it was made for.
        self._dense: dict[_Rule, tuple[Tensor | None, Tensor]] = {}
        self._block_masks: dict[_Rule, tuple[Tensor | None, BlockMask]] = {}
        self._varlen_seqlens: dict[int | None, VarlenSeqlens] = {}
        self._key_ranges: dict[_Rule, KeyRanges] = {}
        self._parts: dict[bool, tuple[AttentionMask, ...]] = {}
        self._document_starts: Tensor | None = None

    def parts(self, causal: bool) -> "tuple[AttentionMask, ...]":
        """Return the mask of each chunk of a `shard`, for layers that are causal or are not.

        Where no query sees a later key, the mask of a chunk has no keys after the chunk.
        """
        assert self.shard is not None and self.mask is None
        if causal not in self._parts:
            ahead = not causal or self.prefix_lengths is not None
            ids, padding = self.document_ids, self.padding_mask
            self._parts[causal] = tuple(
                AttentionMask(
                    end - start,
                    keys := self.keys if ahead else end,
                    past=start,
                    document_ids=None if ids is None else ids[:, :keys],
                    padding_mask=None if padding is None else padding[:, :keys],
                    cu_seqlens=self.cu_seqlens,
                    max_seqlen=self.max_seqlen,
                    prefix_lengths=self.prefix_lengths,
                )
                for start, end in self.shard.chunks(self.keys)
            )
        return self._parts[causal]

    def is_causal(self, window: int | None, past: int = 0) -> bool:
        """Return whether each query of a causal layer sees just all keys up to its own position.

        Args: past: the number of keys that there must be before the first query.
        """
        return (
            not self._has_hidden_keys
            and self.prefix_lengths is None
            and self.past == past
            and (window is None or window >= self.keys)
        )

    def hides_nothing(
        self, window: int | None, key_positions: Tensor | None = None, *, causal: bool = True
    ) -> bool:
        """Return whether every query sees every key that the layer holds."""
        held = self.keys if key_positions is None else len(key_positions)
        sees_ahead = (self.queries == 1 and self.past == self.keys - 1) or not causal
        return sees_ahead and not self._has_hidden_keys and (window is None or held <= window)

    def check(self, batch: int, queries: int, keys: int) -> None:
        """Raise ValueError unless the mask is one for tensors of these sizes."""
        rows: list[int] = []
        if self._has_hidden_keys or self.prefix_lengths is not None:
            given = (self.document_ids, self.padding_mask, self.prefix_lengths, self.mask)
            rows = [x.shape[0] for x in given if x is not None and x.shape[0] != 1]
        if (self.queries, self.keys) != (queries, keys) or (
            rows and any(each != batch for each in rows)
        ):
            raise ValueError(
                f"attention: the mask is made for {self.queries} queries and {self.keys} keys"
                + (f" in {rows[0]} rows" if rows else "")
                + f", but there are {queries} queries and {keys} keys in {batch} rows; make the "
                "mask, or the context, from this input"
            )

    def dense(
        self,
        window: int | None,
        device: torch.device,
        key_positions: Tensor | None = None,
        *,
        causal: bool = True,
    ) -> Tensor:
        """Return a bool mask (batch or 1, 1, queries, keys), True where a query sees a key.

        Args: window, causal: the layer's rule; key_positions (held,) int64, the positions of the
            keys that the layer holds, in their order. By default it holds all keys.
        """
        made = self._dense.get((window, causal))
        if made is None or made[0] is not key_positions:
            query = torch.arange(self.past, self.past + self.queries, device=device)[:, None]
            key = torch.arange(self.keys, device=device) if key_positions is None else key_positions
            if self.mask is None:
                sees = (key <= query if causal else torch.ones_like(key <= query))[None]
                if self.prefix_lengths is not None:
                    sees = sees | (key < self.prefix_lengths[:, None, None])
                if self.document_ids is not None:
                    ids = self.document_ids
                    own = ids[:, self.past : self.past + self.queries, None]
                    sees = sees & (own == ids[:, None, key])
                if self.padding_mask is not None:
                    sees = sees & self.padding_mask[:, None, key]
                sees = sees.unsqueeze(1)
            else:
                sees = self.mask
            if window is not None:
                sees = sees & ((query - key).abs() < window)
            made = self._dense[window, causal] = (key_positions, sees)
        return made[1]

    def block_mask(
        self,
        window: int | None,
        batch: int,
        device: torch.device,
        key_positions: Tensor | None = None,
        *,
        causal: bool = True,
    ) -> BlockMask:
        """Return FlexAttention's block mask; it needs memory per block, not per query-key pair.

        Args: batch: the batch size of the queries. The others are as in `dense`.
        """
        made = self._block_masks.get((window, causal))
        if made is None or made[0] is not key_positions:
            # The functions read only tensors, so each is compiled only once.
            longest = max(self.keys, self.queries)
            reach = torch.full((), window or 2 * longest, device=device)
            first = torch.full((), max(self.past, 0), device=device)
            position = torch.arange(self.keys, device=device)
            position = position if key_positions is None else key_positions
            if torch.compiler.is_compiling():
                reach, first, position = map(_in_memory, (reach, first, position))
            ids, padding, prefix = self.document_ids, self.padding_mask, self.prefix_lengths
            rows = 1 if all(x is None for x in (ids, padding, prefix)) else batch
            if ids is None:
                ids = torch.zeros(1, longest, dtype=torch.int64, device=device)
            if padding is None:
                padding = torch.ones(1, self.keys, dtype=torch.bool, device=device)
            ids, padding = ids.expand(batch, -1), padding.expand(batch, -1)

            def sees_back(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                at, other = first + query, position[key]
                near = (other <= at) & (other > at - reach)
                return near & (ids[b, at] == ids[b, other]) & padding[b, other]

            # (batch, queries and the keys before them): the first key that each query does not see.
            end = torch.arange(longest, device=device)[None] + reach
            if causal and prefix is not None:
                end = torch.minimum(end, torch.maximum(end - reach + 1, prefix[:, None]))
            end = end.expand(batch, -1)

            def sees_ahead(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                at, other = first + query, position[key]
                near = (other < end[b, at]) & (other > at - reach)
                return near & (ids[b, at] == ids[b, other]) & padding[b, other]

            # Within a compiled model on a GPU, inductor of torch 2.11 compiled one function for
            # both, which read the prefix by prefix[b], to wrong numbers.
            sees = sees_back if causal and prefix is None else sees_ahead
            blocks = compiled(create_block_mask)(
                sees, rows, None, self.queries, len(position), device=device
            )
            made = self._block_masks[window, causal] = (key_positions, blocks)
        return made[1]

    def varlen_seqlens(
        self, batch: int, device: torch.device, window: int | None = None
    ) -> VarlenSeqlens:
        """Return where documents begin in all rows joined, and the longest length.

        If the mask was made without cu_seqlens, every row is one document. With padding it is
        three, some of which may be empty: padding, tokens and padding.

        Args: window: the layer's window, which only changes the result for a mask of `parts`.
        """
        rule = window if self.is_part else None
        if rule not in self._varlen_seqlens:
            self._varlen_seqlens[rule] = self._find_seqlens(batch, device, rule)
        return self._varlen_seqlens[rule]

    def document_starts(self, batch: int, device: torch.device) -> Tensor | None:
        """Return where documents begin in all rows joined, and their end, (documents + 1,) int32.

        None means that each row is a document. With padding, a row is three documents as in
        `varlen_seqlens`. The host must know how many documents there are: without cu_seqlens, it
        waits for the device once for each mask that has document_ids.

        Raises:
            ValueError: the model is compiled, and only position_ids tell its documents.
        """
        if self.cu_seqlens is not None:
            return self.cu_seqlens.to(torch.int32)
        if self.document_ids is None:
            if self.padding_mask is None:
                return None
            return self.varlen_seqlens(batch, device).queries
        if torch.compiler.is_compiling():
            raise ValueError(
                "position_ids: in a compiled model, a gated delta net cannot find the documents; "
                "pass cu_seqlens and max_seqlen instead"
            )
        if self._document_starts is None:
            ids = self.document_ids.expand(batch, -1)
            begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
            if self.padding_mask is not None:
                padding = self.padding_mask
                begins |= F.pad(padding[:, 1:] != padding[:, :-1], (1, 0), value=True)
            found = begins.flatten().nonzero().flatten()
            self._document_starts = F.pad(found, (0, 1), value=begins.numel()).to(torch.int32)
        return self._document_starts

    def _find_seqlens(self, batch: int, device: torch.device, window: int | None) -> VarlenSeqlens:
        if self.padding_mask is not None:
            tokens = self.padding_mask.expand(batch, -1)
            first = tokens.int().argmax(1)
            last = first + tokens.sum(1)
            position = torch.arange(self.keys, device=device)
            together = (position >= first[:, None]) & (position < last[:, None])
            fits = (together == tokens).all(1)
            if fits.device.type == "cpu" and not torch.compiler.is_compiling() and not fits.all():
                raise ValueError(
                    f"attention_mask: row {int(fits.int().argmin())} has padding between its "
                    "tokens, which a gated delta net cannot skip; put all padding before or after "
                    "the tokens or, if these are documents, pass position_ids that start again "
                    "after it"
                )
            self.fault = torch.where(fits, 0.0, torch.nan)[:, None, None]
            rows = torch.arange(batch + 1, device=device) * self.keys
            starts = torch.stack([rows[:-1], rows[:-1] + first, rows[:-1] + last], 1)
            ends = torch.cat([starts.flatten(), rows[-1:]]).to(torch.int32)
            return VarlenSeqlens(ends, ends, self.keys, self.keys)
        past, end = self.past, self.past + self.queries
        # Under a window, the first query sees no key before this one.
        lowest = 0 if window is None else max(0, past - window + 1)
        if self.cu_seqlens is None:
            each = torch.arange(batch + 1, dtype=torch.int32, device=device)
            sizes = self.queries, end - lowest
            return VarlenSeqlens(each * sizes[0], each * sizes[1], *sizes, first_key=lowest)
        assert self.max_seqlen is not None
        ends, longest = self.cu_seqlens.to(torch.int32), self.max_seqlen
        if not self.is_part:
            return VarlenSeqlens(ends, ends, longest, longest)
        # Documents that end before the queries become empty, and those after them, too. The first
        # one that a query belongs to begins at `start`.
        start = torch.where(ends <= past, ends, 0).amax()
        keys = ends.clamp(min=start).clamp(min=lowest, max=end) - lowest
        queries = (ends - past).clamp(min=0, max=self.queries)
        seen = torch.arange(lowest, end, device=device) >= start
        most = min(longest, self.queries), min(longest, end - lowest)
        return VarlenSeqlens(queries, keys, *most, first_key=lowest, seen=seen)

    def key_ranges(
        self, window: int | None, batch: int, device: torch.device, *, causal: bool = True
    ) -> KeyRanges:
        """Return the range of keys that each query may see, and the ids that tell which it does.

        Documents narrow the ranges if their ids rise in each row, as those of packed rows do.

        Args: as in `block_mask`. The mask must not be one of every pair.
        """
        assert self.mask is None
        if (window, causal) in self._key_ranges:
            return self._key_ranges[window, causal]
        query = torch.arange(self.past, self.past + self.queries, device=device)[None]
        key = torch.arange(self.keys, device=device, dtype=torch.int32)[None]
        first = torch.zeros_like(query) if window is None else query - window + 1
        end = query + 1 if causal else torch.full_like(query, self.keys)
        if causal and self.prefix_lengths is not None:
            end = torch.maximum(end, self.prefix_lengths[:, None])
        if window is not None:
            end = torch.minimum(end, query + window)
        ids, tokens, both = self.document_ids, self.padding_mask, None
        if ids is not None:
            ids, own = ids.contiguous(), ids[:, self.past : self.past + self.queries].contiguous()
            rises = (ids.diff(dim=1) >= 0).all()
            starts, ends = (torch.searchsorted(ids, own, right=right) for right in (False, True))
            first = torch.maximum(first, torch.where(rises, starts, 0))
            end = torch.minimum(end, torch.where(rises, ends, self.keys))
        if ids is not None or tokens is not None:
            if ids is None:
                own, ids = torch.zeros_like(query), torch.zeros_like(key)
            if tokens is not None:
                ids = torch.where(tokens, ids, torch.iinfo(torch.int32).min)
            own, ids = (x.to(torch.int32).expand(batch, -1).contiguous() for x in (own, ids))
            both = own, ids
        first, end = (x.clamp(0, self.keys).to(torch.int32).contiguous() for x in (first, end))
        key = key.expand(len(first), -1).contiguous()
        first_query = torch.searchsorted(end, key, right=True, out_int32=True)
        end_query = torch.searchsorted(first, key, right=True, out_int32=True)
        made = KeyRanges((first, end, first_query, end_query), both)
        self._key_ranges[window, causal] = made
        return made

    def to(self, device: torch.device, non_blocking: bool = False) -> "AttentionMask":
        """Return the same mask for tensors on another device, without its cached results."""
        names = ("document_ids", "padding_mask", "cu_seqlens", "prefix_lengths", "mask")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in given.items()}
        return AttentionMask(
            self.queries,
            self.keys,
            padding_at_ends=self.padding_at_ends,
            max_seqlen=self.max_seqlen,
            past=self.past if self.is_part else None,
            shard=self.shard,
            **moved,
        )


def _check_given(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor is (batch, *shape) and has a dtype that its name allows."""
    if not isinstance(given, Tensor):
        raise ValueError(f"AttentionMask: {name} is a {type(given).__name__}; expected a tensor")
    is_number = given.is_floating_point() or given.is_complex()
    fits, dtype = {
        "mask": (given.dtype == torch.bool, "torch.bool, True where a query sees a key"),
        # A mask of 0 and -inf, to be added to scores, would say the opposite.
        "padding_mask": (not is_number, "integers or bools, 0 for padding"),
    }.get(name, (not is_number and given.dtype != torch.bool, "integers"))
    if given.dim() != 1 + len(shape) or given.shape[1:] != shape or not fits:
        expected = "".join(f", {size}" for size in shape) or ","
        raise ValueError(
            f"AttentionMask: {name} has shape {tuple(given.shape)} and {given.dtype}; expected "
            f"(batch{expected}) and {dtype}"
        )


def document_ids_from_positions(position_ids: Tensor) -> Tensor:
    """Return each token's document number (batch, seq), inferred from position_ids.

    A new document starts at every token whose position is not one more than that of the token
    before it.
    """
    starts = torch.zeros_like(position_ids, dtype=torch.int64)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts.cumsum(-1)


def positions_from_cu_seqlens(cu_seqlens: Tensor, batch: int, seq: int) -> Tensor:
    """Return the position of each token in its document (batch, seq)."""
    token = torch.arange(batch * seq, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens.to(torch.int64), token, right=True) - 1
    return (token - cu_seqlens[document]).view(batch, seq)


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, seq: int, max_seqlen: int | None) -> None:
    """Raise ValueError unless cu_seqlens rises from 0 to batch * seq by at most max_seqlen.

    The starts of all rows must be among its numbers.

    The values of cu_seqlens are checked only on CPU in eager mode. On a GPU the check would need a
    host synchronisation.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; expected int32 "
            "or int64 of shape (documents + 1,)"
        )
    if torch.compiler.is_compiling():
        return
    if max_seqlen is not None:
        check_count("cu_seqlens", "max_seqlen", max_seqlen, 1)
    if cu_seqlens.device.type != "cpu":
        return
    lengths = cu_seqlens.diff()
    fits = len(lengths) > 0 and cu_seqlens[0] == 0 and cu_seqlens[-1] == batch * seq
    fits = fits and lengths.min() >= 1
    if not fits or not torch.isin(torch.arange(batch) * seq, cu_seqlens).all():
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.tolist()}; it is expected to rise from 0 to {batch * seq}, "
            "the number of tokens, and to have the start of each row"
        )
    if max_seqlen is not None and int(lengths.max()) > max_seqlen:
        raise ValueError(
            f"max_seqlen {max_seqlen}: it is too small, because a document of cu_seqlens has "
            f"{int(lengths.max())} tokens"
        )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.compile(function), or the function itself inside an outer torch.compile.

    FlexAttention and its masks must be compiled, because uncompiled they materialise all scores.
    """
    return function if torch.compiler.is_compiling() else _compiled(function)


# Inductor computes inside of FlexAttention's kernel what depends on no input. Where a kernel thus
# knows the positions of a tile of keys, Triton 3.6 loads their padding ahead as neighbouring bytes,
# and reads wrong ones: on an H100, float32 attention was wrong with heads of 32 and 200 tokens, and
# of 96 and 517. With positions in memory, as in eager mode, it is right. So inductor sees an op.
@torch.library.custom_op("ligermodels::in_memory", mutates_args=())
def _in_memory(x: Tensor) -> Tensor:
    return x.clone()


@_in_memory.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Without fullgraph, torch.compile would run the function uncompiled beyond the recompile limit.
    made = torch.compile(function, fullgraph=True)
    # Without specialize_float, a second scale or cap in the process would become a symbolic float,
    # and FlexAttention does not accept one. `config.patch` does the same, but it makes a class at
    # each call, in several times the time.
    change = torch._dynamo.config._make_closure_patcher(
        recompile_limit=_RECOMPILE_LIMIT, specialize_float=True
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        revert = change()
        try:
            return made(*args, **kwargs)
        finally:
            revert()

    return call
