"""Who attends to whom: causal, packed documents, padding, and a KV cache's past."""

from typing import NamedTuple

import torch
from torch import Tensor


class VarlenMask(NamedTuple):
    """Causal attention inside documents that lie end to end, for the varlen kernel (CUDA)."""

    cu_seqlens: Tensor  # (documents + 1), int32, starts of the documents and the total
    max_seqlen: int  # longest document, known to the host


class DocumentMask(NamedTuple):
    """Causal attention inside documents, for FlexAttention (CUDA)."""

    block_mask: object  # torch.nn.attention.flex_attention.BlockMask


Mask = Tensor | VarlenMask | DocumentMask | None
"""None is plain causal; a tensor (batch, 1, queries, keys) is True where a query sees a key."""


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


def document_mask(position_ids: Tensor) -> Mask:
    """Causal attention within documents told by position_ids (batch, seq) that restart.

    A dense mask on CPU, FlexAttention's block mask on a GPU, where a dense one would cost
    seq^2 memory.
    """
    documents = document_ids(position_ids)
    if position_ids.device.type != "cuda":
        return _dense(documents)
    from torch.nn.attention.flex_attention import create_block_mask

    def same_document(batch, head, query, key):
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    rows, seq = position_ids.shape
    make = create_block_mask if torch.compiler.is_compiling() else _compiled(create_block_mask)
    return DocumentMask(make(same_document, rows, None, seq, seq, device=position_ids.device))


def _dense(documents: Tensor) -> Tensor:
    seq = documents.shape[-1]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=documents.device).tril()
    return (causal & (documents[:, :, None] == documents[:, None, :])).unsqueeze(1)


def padding_mask(attention_mask: Tensor, queries: int) -> Tensor:
    """Causal attention (batch, 1, queries, keys) to the tokens that attention_mask marks.

    Args: attention_mask (batch, keys), nonzero for tokens and 0 for padding; the queries are the
        last `queries` of the keys.
    """
    keys = attention_mask.shape[-1]
    at = torch.arange(keys, device=attention_mask.device)
    causal = at[None, :] <= at[keys - queries :, None]
    return (causal & attention_mask.bool()[:, None, :]).unsqueeze(1)


_compiled_functions: dict[object, object] = {}


def _compiled(function):
    """torch.compile(function), made once: FlexAttention is only fast, or lean, compiled."""
    if function not in _compiled_functions:
        _compiled_functions[function] = torch.compile(function, dynamic=False)
    return _compiled_functions[function]


def flex_attention_compiled():
    """FlexAttention, compiled by itself unless an outer torch.compile does it."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
