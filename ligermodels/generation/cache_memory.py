"""The memory of a KV cache, counted before it is made."""

from __future__ import annotations

from pathlib import Path

import torch

from ligermodels.layers.attention import Attention
from ligermodels.layers.gated_delta import LinearAttention
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel, kept_for_generation

_MEMINFO = Path("/proc/meminfo")


def row_bytes(model: DecoderModel, cache: KVCache) -> int:
    """Return the bytes of a row: keys, values and states, and float32 logits with their filters."""
    each = sum(
        2 * layer.num_kv_heads * layer.head_dim * cache.sizes[layer.layer_index]
        for layer in model.modules()
        if isinstance(layer, Attention) and layer.causal and layer.kv_from is None
    )
    size = model.head.weight.element_size()
    states = sum(
        layer.state_bytes(size) for layer in model.modules() if isinstance(layer, LinearAttention)
    )
    return cache.uses * (each * size + states) + 4 * 4 * model.config.vocab_size


def check_room(model: DecoderModel, rows: int, tokens: int) -> None:
    """Raise ValueError if a cache for rows of so many tokens needs more than the free memory."""
    need = rows * row_bytes(model, KVCache.of(model, 1, tokens))
    device = model.head.weight.device
    if need > free_bytes(device):
        kept_for_generation.pop(model, None)  # frees the cache of the last generation
    if need > (free := free_bytes(device)):
        raise ValueError(
            f"generate: {rows} rows of {tokens} tokens need {need / 2**30:,.2f} GiB for their "
            f"cache, and {free / 2**30:,.2f} GiB are free; lower max_new_tokens, or pass fewer "
            "prompts at a time"
        )


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a cache may take on a device."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    if _MEMINFO.exists():
        line = next(x for x in _MEMINFO.read_text().splitlines() if x.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return 2**40  # not known on this system
