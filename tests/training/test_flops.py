"""The operations of a step, against a count of what autograd computes."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from ligermodels import LigerLlama
from ligermodels.training.data import Document
from ligermodels.training.packing import PackedRows
from ligermodels.training.trainer import StepFlops
from tests.training.tiny_run import tiny_config


def rows(*lengths, seq_len=64):
    documents = [
        Document(np.arange(n, dtype=np.int32) + 1, np.arange(n) > 0, divisible=False)
        for n in lengths
    ]
    return PackedRows([documents], seq_len)


@pytest.mark.parametrize("frozen", [(), ("layers.0",)])
def test_linears_and_head_are_those_that_torch_counts(frozen):
    model = LigerLlama(tiny_config())
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    flops = StepFlops.of(model)
    batch = rows(64).batch([0])
    with FlopCounterMode(display=False) as counter:
        model(batch.input_ids, labels=batch.labels).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(v for op, v in counted.items() if "mm" in str(op) and "bmm" not in str(op))
    # The head computes a row more than there are targets; the attention is not counted here.
    expected = flops.per_token * 64 + flops.per_target * 63
    assert expected == pytest.approx(products, rel=0.03)


def test_attention_counts_the_pairs_of_each_document():
    batch = rows(10, 20, 5, seq_len=32).batch([0, 1])
    pairs = 10 * 11 // 2 + 20 * 21 // 2 + 5 * 6 // 2
    assert StepFlops(0, 0, 1, (None, None)).count(batch) == 2 * pairs
    near = 10 * 11 // 2 + (55 + 10 * 10) + 5 * 6 // 2
    assert StepFlops(0, 0, 1, (None, 10)).count(batch) == pairs + near
    assert StepFlops(1, 0, 0, ()).count(batch) == 35
    assert StepFlops(0, 1, 0, ()).count(batch) == 32
    assert StepFlops(1, 1, 1, (None,)).count(batch.uncounted()) == 0
