"""The inputs of a forward: checks of the tensors, the mask of the rows, and the targets."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.kernels.checks import check_token_ids
from ligermodels.kernels.dispatch import autocast_dtype
from ligermodels.layers.attention_mask import (
    AttentionMask,
    check_cu_seqlens,
    document_ids_from_positions,
    positions_from_cu_seqlens,
)
from ligermodels.layers.fusion import is_sharded
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.sequence_shard import SequenceShard

# The names that transformers' collators give to the documents of a flattened batch. All of them say
# the same, and seq_idx is the number of each token's document.
FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def flattened_documents(inputs: dict[str, Any]) -> dict[str, Any]:
    """Take the names of a flattened batch out of `inputs`; return what they replace.

    Returns: `DecoderModel.forward`'s arguments cu_seqlens and max_seqlen, and position_ids as None,
        because these documents begin at 0; nothing without cu_seq_lens_q.
    Raises:
        ValueError: seq_idx is the only one that tells the documents, which the model cannot honour.
    """
    given = {name: inputs.pop(name) for name in FLATTENED if name in inputs}
    if given.get("cu_seq_lens_q") is None:
        if given.get("seq_idx") is not None and inputs.get("position_ids") is None:
            raise ValueError(
                "seq_idx: the model finds documents by position_ids or cu_seq_lens_q; let the "
                "collator return one of them, too"
            )
        return {}
    return {
        "cu_seqlens": given["cu_seq_lens_q"],
        "max_seqlen": given.get("max_length_q"),
        "position_ids": None,
    }


def next_token_targets(
    labels: Tensor, document_ids: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Return targets aligned with hidden states: the target of each position is the next label.

    Args: labels (batch, seq); document_ids (batch or 1, seq), as in `AttentionMask`.
    Returns: (batch, seq). The last position of each row and each document holds ignore_index.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    if document_ids is None:
        return targets
    ends = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (0, 1), value=True)
    return targets.masked_fill(ends, ignore_index)


def rows_mask(
    inputs: Tensor,
    *,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    attention_mask: Tensor | None,
    prefix_lengths: Tensor | None,
    cache: KVCache | None,
    shard: SequenceShard | None,
) -> tuple[AttentionMask, Tensor | None, Tensor | None]:
    """Return the mask of the rows, the positions and the document ids, after checks.

    The positions are None if they are those after the cached tokens. The document ids are None if
    rows are not packed.

    Args:
        inputs: (batch, seq, ...), of which only shape and device count.
        shard: the part of each row that this rank computes, or None.
        position_ids, cu_seqlens, max_seqlen, attention_mask, prefix_lengths, cache: as in
            `DecoderModel.forward`.
    Raises:
        ValueError: the arguments contradict each other, or one has a wrong shape or dtype.
    """
    batch, seq = inputs.shape[:2]
    past = 0 if cache is None else cache.length
    if shard is not None:
        if cache is not None:
            raise ValueError(
                "cache: the model is spread over ranks by context parallelism, which is for "
                "training; load it again without it to generate text"
            )
        shard.check(seq)
    if cu_seqlens is not None:
        if position_ids is not None or cache is not None:
            raise ValueError(
                "cu_seqlens cannot be combined with position_ids or with a cache; leave one out"
            )
        if batch != 1 and shard is not None:
            raise ValueError(
                "cu_seqlens describes one packed row under context parallelism: batch must be 1; "
                f"got batch {batch}"
            )
        check_cu_seqlens(cu_seqlens, batch, seq, max_seqlen)
        position_ids = positions_from_cu_seqlens(cu_seqlens, batch, seq)
    elif max_seqlen is not None:
        raise ValueError("max_seqlen needs cu_seqlens, which is missing")
    keys = past + seq
    if attention_mask is not None:
        fits = _counts(attention_mask) and attention_mask.shape == (batch, keys)
        expected = (
            "bool or integers of shape ({}, {}), cached tokens included, with 0 for padding: "
        )
        expected += "a mask to be added to scores is not supported"
        _check("attention_mask", attention_mask, fits, expected, batch, keys)
    if position_ids is not None:
        fits = position_ids.dtype in (torch.int32, torch.int64)
        fits = fits and _has_rows(position_ids, batch, seq)
        expected = "int32 or int64 of shape ({0}, {1}) or (1, {1})"
        _check("position_ids", position_ids, fits, expected, batch, seq)
    if prefix_lengths is not None:
        fits = _has_rows(prefix_lengths, batch)
        _check(
            "prefix_lengths", prefix_lengths, fits, "({},) or (1,): a length for each row", batch
        )
    document_ids = None
    if position_ids is not None and cache is None:
        document_ids = document_ids_from_positions(position_ids)
    padding = hiding(attention_mask, inputs.device)
    mask = AttentionMask(
        seq if shard is None else seq // shard.ranks,
        keys,
        document_ids=document_ids,
        padding_mask=padding,
        padding_at_ends=padding is None or not _seen_between_tokens(attention_mask),
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        prefix_lengths=prefix_lengths,
        shard=shard,
    )
    return mask, position_ids, document_ids


def hiding(mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a padding mask on the device, or None if it is seen to hide nothing.

    A mask on the CPU is looked at: every tokenizer returns one of ones for a single text. On a GPU,
    a look at the values would be a host synchronisation.
    """
    if mask is None or (_may_look(mask) and mask.all()):
        return None
    return mask.to(device, non_blocking=True)


def _may_look(mask: Tensor) -> bool:
    return mask.device.type == "cpu" and type(mask) is Tensor and not torch.compiler.is_compiling()


def _seen_between_tokens(mask: Tensor | None) -> bool:
    """Return whether a mask is seen to have padding between the tokens of a row."""
    if mask is None or not _may_look(mask):
        return False
    tokens = F.pad(mask.bool(), (1, 0))
    begins = tokens[:, 1:] & ~tokens[:, :-1]
    return bool((begins.sum(1) > 1).any())


def check_tensors(**given: object) -> None:
    """Raise ValueError, with the name of the argument, unless each is a tensor or None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; expected a tensor")


def check_labels(labels: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless labels are int64 and have the inputs' shape (batch, seq)."""
    check_tensors(labels=labels)
    fits = labels.dtype == torch.int64 and labels.shape == shape
    _check("labels", labels, fits, "torch.int64 of the inputs' shape {}", tuple(shape))


def check_ids(input_ids: Tensor, vocab_size: int) -> Tensor:
    """Return ids as `check_token_ids` does; raise ValueError unless they are (batch, seq)."""
    ids = check_token_ids("input_ids", input_ids, vocab_size)
    fits = input_ids.dim() == 2 and 0 not in input_ids.shape
    _check("input_ids", input_ids, fits, "two dimensions (batch, seq), and a token in each row")
    return ids


def check_embeds(inputs_embeds: Tensor, embedding: nn.Embedding, weights: Iterable[Tensor]) -> None:
    """Raise ValueError unless embeddings (batch, seq, hidden) are such as `embedding` returns.

    Args: weights: the model's weights. The embeddings must have the dtype of one of them, unless
        autocast is on.
    """
    shape, hidden_size = inputs_embeds.shape, embedding.embedding_dim
    fits = len(shape) == 3 and shape[-1] == hidden_size and 0 not in shape
    fits = fits and inputs_embeds.is_floating_point()
    expected = "floating point numbers of shape (batch, seq, {}), and a token in each row"
    _check("inputs_embeds", inputs_embeds, fits, expected, hidden_size)
    _check_dtype("inputs_embeds", inputs_embeds, embedding, weights)


def check_memory(
    memory: Tensor,
    memory_mask: Tensor | None,
    batch: int,
    embedding: nn.Embedding,
    weights: Iterable[Tensor],
) -> None:
    """Raise ValueError unless a memory (batch, keys, size) and its mask (batch or 1, keys) fit."""
    fits = memory.dim() == 3 and memory.shape[0] == batch
    _check("memory", memory, fits, "shape ({}, keys, memory size)", batch)
    if memory_mask is not None:
        keys = memory.shape[1]
        fits = _counts(memory_mask) and _has_rows(memory_mask, batch, keys)
        expected = "bool or integers of shape ({0}, {1}) or (1, {1}), 0 for padding"
        _check("memory_mask", memory_mask, fits, expected, batch, keys)
    _check_dtype("memory", memory, embedding, weights)


def _check(name: str, given: Tensor, fits: bool, expected: str, *sizes: object) -> None:
    """Raise ValueError unless a tensor fits. A text with symbolic sizes is made only then."""
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)} and {given.dtype}; expected "
            f"{expected.format(*sizes)}"
        )


def _counts(given: Tensor) -> bool:
    return not (given.is_floating_point() or given.is_complex())


def _has_rows(given: Tensor, batch: int, *width: int) -> bool:
    """Whether a tensor has the shape (batch or 1, *width).

    torch.compile does not find a shape with symbolic sizes in a tuple of shapes.
    """
    rows = given.shape[0] if given.dim() == 1 + len(width) else 0
    return (rows == batch or rows == 1) and given.shape[1:] == width


def _check_dtype(
    name: str, given: Tensor, embedding: nn.Embedding, weights: Iterable[Tensor]
) -> None:
    """Raise ValueError unless a tensor has the dtype of a weight, or autocast casts it.

    The dtype in which sharded weights compute is not known here: FSDP2 may cast them.
    """
    if autocast_dtype(given) is None and not any(
        weight.dtype == given.dtype or is_sharded(weight) for weight in weights
    ):
        expected = embedding.weight.dtype
        raise ValueError(
            f"{name} is {given.dtype}, but the model's weights are {expected}; pass "
            f"{name}.to({expected})"
        )
