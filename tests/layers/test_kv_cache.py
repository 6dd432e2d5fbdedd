"""Compare the KV cache with a list of all keys and values that were appended to it."""

import types

import pytest
import torch

from ligermodels.layers import Attention, LayerNorm
from ligermodels.layers.kv_cache import KVCache

LENGTH = 12


def config(*windows):
    return types.SimpleNamespace(sliding_windows=list(windows))


def tokens(total, batch=2, heads=2, size=4):
    """Return different keys and values (batch, heads, total, size) that identify their column."""
    column = torch.arange(total, dtype=torch.float32).view(1, 1, total, 1)
    keys = column + torch.rand(batch, heads, total, size)
    return keys, -keys


@pytest.mark.parametrize(
    "chunks",
    [
        [1] * LENGTH,
        [LENGTH],
        [5, 1, 1, 1, 1, 1, 1, 1],
        [7, 5],
        [2, 3, 1, 4, 1, 1],
        [1, 2, 2, 2, 2, 2, 1],
        [3, 1, 1, 6, 1],
    ],
)
def test_update_returns_every_visible_key_and_its_position(chunks):
    for window in (None, 1, 2, 3, 5, 11, 12, 40):
        check_updates(window, chunks)


def check_updates(window, chunks):
    keys, values = tokens(LENGTH)
    cache = KVCache(config(window, None), 2, LENGTH)
    for _ in range(2):  # the second round follows a reset
        for new in chunks:
            begin, end = cache.length, cache.length + new
            for layer in (0, 1):
                k, v = cache.update(layer, keys[:, :, begin:end], values[:, :, begin:end])
                held = cache.key_positions(layer, new)
                if held is None:
                    held = torch.arange(end)
                assert held.dtype == torch.int64 and held.unique().numel() == len(held)
                assert torch.equal(k, keys[:, :, held])
                assert torch.equal(v, values[:, :, held])
                reach = LENGTH if window is None or layer == 1 else window
                # The first new token may attend to these positions; they include the new ones.
                visible = set(range(max(0, begin + 1 - reach), end))
                assert visible <= set(held.tolist()), f"window {window}"
                if new == 1:
                    assert len(held) == min(end, reach), f"window {window}"
                else:
                    assert held.tolist() == sorted(held.tolist())
            cache.advance(new)
        assert cache.length == LENGTH
        cache.reset()


def test_buffers_and_their_dtype():
    cache = KVCache(None, 1, 4, sliding_windows=[None, 2])
    assert cache.update(0, *tokens(3, 1, heads=2))[0].shape == (1, 2, 3, 4)
    assert cache.update(1, *tokens(3, 1, heads=1, size=6))[0].shape == (1, 1, 3, 6)
    assert [buffer.shape for buffer in cache.keys] == [(1, 2, 4, 4), (1, 1, 2, 6)]
    k = torch.ones(1, 2, 3, 4)
    # With a window of two, `update` returns a copy of three keys.
    for window in (None, 2):
        cache = KVCache(config(window), 1, 4, dtype=torch.bfloat16, device="cpu")
        found, _ = cache.update(0, k, k)
        assert found.dtype == torch.bfloat16 and found.shape == (1, 2, 3, 4)
        cache = KVCache(config(window), 1, 4)
        cache.update(0, k, k)
        cache.advance(3)
        found, _ = cache.update(0, k[:, :, :1].bfloat16(), k[:, :, :1].bfloat16())
        assert found.dtype == torch.float32


def test_a_cache_of_the_layers_of_a_model():
    def attention(index, window=None, **options):
        return Attention(16, 4, 2, layer_index=index, sliding_window=window, **options)

    model = torch.nn.ModuleDict({"a": attention(1, 3), "b": attention(0), "other": LayerNorm(16)})
    model["of images"] = attention(0, causal=False)
    cache = KVCache.of(model, 2, 9, torch.bfloat16)
    assert (cache.sizes, cache.batch, cache.dtype) == ([9, 3], 2, torch.bfloat16)
    model["c"] = attention(1)
    with pytest.raises(ValueError, match="a and c both have layer_index=1; give every"):
        KVCache.of(model, 2, 9)


def test_a_layer_that_runs_several_times_has_buffers_for_each_time() -> None:
    block = torch.nn.ModuleList([Attention(16, 4, 2, layer_index=0, sliding_window=3)])
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([block, block, block])
    cache = KVCache.of(model, 2, 9)
    assert (cache.sizes, cache.uses) == ([3, 3, 3], 3)
    made = [tokens(2) for _ in range(3)]
    for cache.use, (k, v) in enumerate(made):
        cache.update(0, k, v)
    cache.advance(2)
    k, v = tokens(1)
    for cache.use in range(3):
        keys, _ = cache.update(0, k, v)
        assert torch.equal(keys, torch.cat([made[cache.use][0], k], 2))
    cache.use = 3
    with pytest.raises(ValueError, match=r"so many times in model\.layers.*KVCache\.of"):
        cache.update(0, k, v)


def test_what_cannot_be_right_is_refused():
    k, v = tokens(3)
    cache = KVCache(config(2, None), 2, 4)
    with pytest.raises(ValueError, match="batch 1 in a cache made for 2"):
        cache.update(0, k[:1], v[:1])
    cache.update(0, k, v)
    with pytest.raises(ValueError, match=r"layer 0 was updated twice.*layer_index.*reset"):
        cache.update(0, k, v)
    cache.advance(3)
    with pytest.raises(ValueError, match="6 tokens in a cache made for 4"):
        cache.update(0, k, v)
    cache.reset()
    cache.update(0, k, v)


def test_truncate_keeps_the_first_tokens() -> None:
    cache = KVCache(None, 1, 10, sliding_windows=[None])
    k = torch.arange(8.0).view(1, 1, 8, 1)
    cache.update(0, k[:, :, :5], k[:, :, :5])
    cache.advance(5)
    cache.truncate(3)
    assert cache.length == 3
    keys, _ = cache.update(0, k[:, :, 6:], k[:, :, 6:])
    assert keys.flatten().tolist() == [0, 1, 2, 6, 7]
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"cannot keep {length} tokens of 3"):
            cache.truncate(length)


@pytest.mark.parametrize("extra", [1, 2, 4])
def test_windows_keep_what_truncate_may_bring_back(extra):
    """After up to `extra` tokens are removed, every layer still has all keys of its window."""
    model = torch.nn.ModuleList(
        Attention(16, 4, 2, layer_index=i, sliding_window=w) for i, w in enumerate((3, None, 5))
    )
    keys, values = tokens(LENGTH)
    for removed in range(1, extra + 1):
        cache = KVCache.of(model, 2, LENGTH, extra=extra)
        assert cache.sizes == [3 + extra, LENGTH, 5 + extra]
        for begin, end in ((0, 9), (9 - removed, LENGTH - removed), (LENGTH - removed, LENGTH)):
            cache.truncate(begin)
            for layer, window in enumerate((3, LENGTH, 5)):
                k, v = cache.update(layer, keys[:, :, begin:end], values[:, :, begin:end])
                held = cache.key_positions(layer, end - begin)
                held = torch.arange(end) if held is None else held
                seen = held > begin - window  # the others may be of removed tokens
                assert set(range(max(0, begin + 1 - window), end)) <= set(held.tolist())
                assert torch.equal(k[:, :, seen], keys[:, :, held[seen]])
                assert torch.equal(v[:, :, seen], values[:, :, held[seen]])
            cache.advance(end - begin)
