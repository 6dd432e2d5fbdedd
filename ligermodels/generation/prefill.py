"""Read prompts: write their keys and values into the rows of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ligermodels.layers.attention import Attention
from ligermodels.layers.attention_backend import choose_backend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.layers.kv_cache import CacheRow, KVCache, PackedRows
from ligermodels.models.base import DecoderModel

# The tokens of one pass. The products are at the GPU's limit with fewer, and what a pass of so many
# tokens needs is small beside the weights.
PASS_TOKENS = 8192


@torch.no_grad()
def read_prompts(
    model: DecoderModel, cache: KVCache, rows: Sequence[int], prompts: Sequence[Tensor]
) -> None:
    """Write the tokens of prompts into rows of a cache, without padding.

    The next step computes the last token again. Layers with a state would count it twice, so that
    with such layers, all but the last token are written.

    Prompts share a pass as documents of one packed row if a kernel computes all layers document by
    document. Otherwise each has a pass of its own. Longer prompts than `PASS_TOKENS` are read in
    chunks.

    Args: rows: the row for each prompt; prompts: (tokens,) int64, on the model's device.
    """
    packs = _can_pack(model)
    single: list[int] = []
    if model.is_recurrent:
        single = [row for row, prompt in zip(rows, prompts) if len(prompt) == 1]
        prompts = [prompt[:-1] if len(prompt) > 1 else prompt for prompt in prompts]
    for part in _parts([len(prompt) for prompt in prompts], PASS_TOKENS if packs else 0):
        some, ids = [rows[i] for i in part], [prompts[i] for i in part]
        if len(part) == 1:
            for chunk in chunks(model, ids[0][None]):
                if chunk.start == 0:
                    row = CacheRow(cache, some[0])
                inputs = ids[0][None, chunk]
                context = model.prepare_context(inputs, cache=row)
                model.run_layers(model.embed_tokens(inputs), context)
            continue
        lengths = [len(each) for each in ids]
        inputs = torch.cat(ids)[None]
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        context = model.prepare_context(
            inputs, cu_seqlens=ends.to(inputs.device), max_seqlen=max(lengths)
        )
        into = PackedRows(cache, some, lengths, inputs.device)
        for each in context.layers:
            each.cache = into
        model.run_layers(model.embed_tokens(inputs), context)
    for index in single:
        cache.clear_states(index)


def chunks(model: DecoderModel, ids_BS: Tensor) -> list[slice]:
    """Return the parts of the prompts that are read one after the other.

    Angles that depend on the length of a row need it whole.
    """
    batch, length = ids_BS.shape
    size = max(1, PASS_TOKENS // batch)
    kinds = {getattr(model, name).rope_type for name in model.ropes}
    if kinds & {"dynamic", "longrope"}:
        size = length
    return [slice(start, min(length, start + size)) for start in range(0, length, size)]


def _can_pack(model: DecoderModel) -> bool:
    """Return whether a kernel computes all layers of a packed row document by document."""
    weight = model.embed_tokens.weight
    if any(getattr(model, name).rope_type in ("dynamic", "longrope") for name in model.ropes):
        return False  # The angles of a document would depend on the longest one.
    documents = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    mask = AttentionMask(2, document_ids=documents, max_seqlen=1)
    return all(
        choose_backend(
            mask, each.sliding_window, each.softcap, weight.device, weight.dtype, each.head_dim, 1
        )
        in ("varlen", "wide")
        for each in model.modules()
        if isinstance(each, Attention)
    )


def _parts(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the indices of neighbours that together have at most `most` tokens, or one index."""
    part: list[int] = []
    for index, length in enumerate(lengths):
        if part and sum(lengths[i] for i in part) + length > most:
            yield part
            part = []
        part.append(index)
    if part:
        yield part
