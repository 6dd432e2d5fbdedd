"""AdamW's kernel on a GPU at real sizes, plain and for the shards of FSDP2."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from ligermodels import AdamW

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_it_computes_what_pytorch_does(dtype, sharded: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Linear(4096, 4096, device="cuda", dtype=dtype)
    theirs = copy.deepcopy(ours)
    if sharded:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        fully_shard(ours)
    try:
        optimizers = AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
        for _ in range(3):
            x, upstream = torch.randn(2, 64, 4096, device="cuda", dtype=dtype)
            for linear, optimizer in zip((ours, theirs), optimizers):
                linear(x).backward(upstream)  # this gradient does not depend on the weights
                optimizer.step()
                optimizer.zero_grad()
        eps = torch.finfo(dtype).eps
        for one, other in zip(ours.parameters(), theirs.parameters()):
            one = one.full_tensor() if sharded else one
            torch.testing.assert_close(one, other, rtol=3 * eps, atol=0.05 * eps)
    finally:
        if sharded:
            torch.distributed.destroy_process_group()
