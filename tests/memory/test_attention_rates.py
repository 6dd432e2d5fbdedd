"""The kinds of attention; test_rates.py measures their rates on a GPU."""

from __future__ import annotations

import pytest
import torch

from ligermodels.memory.rates import (
    AttentionKind,
    attention_kind,
    attention_pairs,
)


@pytest.mark.parametrize("queries, window", [(5, None), (5, 2), (5, 5), (5, 9), (1, 1)])
def test_pairs_are_those_of_a_mask(queries: int, window: int | None) -> None:
    query, key = torch.arange(queries)[:, None], torch.arange(queries)
    near = (query - key).abs() < (window or queries)
    assert attention_pairs(queries, window) == ((key <= query) & near).sum()
    assert attention_pairs(queries, window, causal=False) == near.sum()


def test_lengths_are_rounded_and_a_window_that_hides_nothing_does_not_count() -> None:
    q, k = (torch.empty(2, heads, 3000, 64, device="meta") for heads in (8, 2))

    def kind(length: int, window: int | None) -> AttentionKind:
        return attention_kind("varlen", q, k, length, window, None, True)

    assert kind(3000, 4096) == AttentionKind("varlen", 8, 2, 64, 4096)
    assert kind(10**6, 4096) == AttentionKind("varlen", 8, 2, 64, 16384, 4096)
    assert [kind(length, None).length for length in (1, 128, 129, 512)] == [128, 128, 256, 512]
    whole, short = kind(4096, None).forward_flops, kind(512, None).forward_flops
    assert whole == 4 * 8 * 64 * 4096 * 4097 // 2 and short == 4 * 8 * 64 * 4096 * 513 // 2
