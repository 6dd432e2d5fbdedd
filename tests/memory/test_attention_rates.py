"""The kinds of attention, and the measurement of their rates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ligermodels.layers import attention_backend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.memory import attention_rates
from ligermodels.memory.attention_rates import (
    AttentionKind,
    attention_kind,
    attention_pairs,
    measured_rates,
)

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind("sdpa", 4, 2, 16, 64),
        AttentionKind("varlen", 4, 2, 16, 32),
        AttentionKind("varlen", 4, 2, 16, 64, 8),
        AttentionKind("flex", 4, 2, 16, 64, 8, 20.0),
        AttentionKind("flex", 4, 2, 16, 64),
    ],
)
def test_the_attention_of_the_layers_is_measured(
    monkeypatch: pytest.MonkeyPatch, kind: AttentionKind
) -> None:
    monkeypatch.setattr(attention_rates, "_TOKENS", 64)
    calls: list[tuple[tuple[int, ...], dict[str, object]]] = []
    real = attention_backend.attend

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, **options: object
    ) -> torch.Tensor:
        calls.append((tuple(q.shape), options))
        assert k.shape[1] == kind.kv_heads and q.requires_grad and v.requires_grad
        window, cap = options["window"], options["softcap"]
        given = torch.device("cuda"), torch.bfloat16, kind.head_dim, 4
        assert attention_backend.choose_backend(mask, window, cap, *given) == kind.backend
        return real(q, k, v, mask, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_rates, "attend", attend)
    monkeypatch.setattr(torch, "compile", lambda run, **options: run)
    monkeypatch.setattr(AttentionMask, "block_mask", lambda *given, **options: None)
    seconds = iter((2.0, 7.0))

    def seconds_of(run: Callable[[], object]) -> float:
        run()
        return next(seconds)

    found = measured_rates.__wrapped__(kind, CPU, torch.float32, seconds_of)
    assert found == (kind.forward_flops / 2, 2.5 * kind.forward_flops / 5)
    rows = 1 if kind.backend == "varlen" else 64 // kind.length
    assert [shape for shape, _ in calls] == 3 * [(rows, 4, 64 // rows, 16)]
    assert all(o["window"] == kind.window and o["softcap"] == kind.softcap for _, o in calls)
