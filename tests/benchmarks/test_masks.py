"""Test the masks whose costs are measured: they hide what their names say."""

from __future__ import annotations

import torch

from benchmarks import masks
from ligermodels.layers import RotaryEmbedding

CPU = torch.device("cpu")
SIZES = masks.Sizes(hidden=32, inner=48, heads=4, kv_heads=2)
BATCH, SEQ = 2, 16


def test_each_mask_hides_what_its_name_says() -> None:
    made = {
        name: case.make().dense(None, CPU) for name, case in masks.cases(BATCH, SEQ, CPU).items()
    }
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    assert torch.equal(made["none"][0, 0], causal)
    assert torch.equal(made["ones"], causal.expand(BATCH, 1, SEQ, SEQ))
    assert made["right"][:, 0, -1].sum(-1).tolist() == [12, 8]
    assert made["left"][:, 0, -1].sum(-1).tolist() == [12, 8]
    assert made["left"][1, 0, -1, -1] and not made["right"][1, 0, -1, -1]
    assert torch.equal(made["documents"][0, 0], torch.block_diag(causal, causal))


def test_documents_compute_what_rows_under_a_mask_of_ones_do() -> None:
    rotary = RotaryEmbedding(SIZES.hidden // SIZES.heads)
    made = masks.cases(BATCH, SEQ, CPU)
    x = torch.randn(BATCH, SEQ, SIZES.hidden, generator=torch.Generator().manual_seed(0))
    for layer in masks.layers(SIZES, CPU, torch.float32):
        grads = {
            name: masks.step(
                layer,
                x.reshape(*case.rows, -1).clone().requires_grad_(),
                rotary(case.positions),
                case.make(),
            )
            for name, case in made.items()
        }
        for name in ("ones", "documents"):
            for found, expected in zip(grads[name], grads["none"]):
                torch.testing.assert_close(found.view_as(expected), expected)
        assert not torch.allclose(grads["left"][1], grads["none"][1])
