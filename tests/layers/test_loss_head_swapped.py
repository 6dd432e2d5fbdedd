"""A loss head whose projection is another module: it is called, chunk by chunk."""

from __future__ import annotations

from tests.layers.heads import BATCH, SEQ, VOCAB, build, data


def test_a_swapped_head_is_called_chunk_by_chunk() -> None:
    head, _, _ = build("swapped")
    hidden, targets = data()
    loss = head(hidden, targets, chunk_size=10).loss
    assert head.proj.rows == [10, 10, 7]
    loss.backward()
    assert sorted(head.proj.rows) == sorted(2 * [10, 10, 7])  # once more in backward
    head.proj.rows.clear()
    # Rows of 37 logits in float32, their gradient and copies: room for eight rows or so.
    head(hidden, targets, max_scratch_bytes=8 * 24 * VOCAB + 64 * BATCH * SEQ)
    assert max(head.proj.rows) == 8
    assert sum(head.proj.rows) == BATCH * SEQ
