"""The checks that ops share. The tests of each op hold the messages that its callers see."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.checks import (
    check_token_ids,
)


def test_check_token_ids() -> None:
    for dtype in (torch.int64, torch.int32):
        ids = torch.tensor([[0, 6]], dtype=dtype)
        assert check_token_ids("ids", ids, 7) is ids
    check_token_ids("ids", torch.empty(0, 3, dtype=torch.int64), 7)
    check_token_ids("ids", torch.empty(2, 3, dtype=torch.int64, device="meta"), 7)
    for outside in (-1, 7, 2**40):
        with pytest.raises(
            IndexError, match=f"ids: token {outside} is outside the vocabulary of 7"
        ):
            check_token_ids("ids", torch.tensor([3, outside]), 7)
    for dtype in (torch.uint8, torch.bool, torch.float32, torch.int16):
        with pytest.raises(ValueError, match=f"ids is {dtype}; expected"):
            check_token_ids("ids", torch.ones(1, 2).to(dtype), 7)
    with pytest.raises(ValueError, match="ids is a list"):
        check_token_ids("ids", [1, 2], 7)
    with pytest.raises(ValueError, match="sparse"):
        check_token_ids("ids", torch.ones(1, 2).long().to_sparse(), 7)


def test_a_compiled_embedding_refuses_a_negative_id(monkeypatch) -> None:
    """The compiler would read the last rows for it, as Python's indices do."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert check_token_ids("ids", torch.tensor([0, -1, 6]), 7).tolist() == [0, 7, 6]
