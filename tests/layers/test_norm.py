"""Tests of the norm modules: the residual, the device, and the interface of torch."""

from __future__ import annotations

import pytest
import torch

from ligermodels.layers import LayerNorm, RMSNorm


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_residual_and_device(kind: type) -> None:
    norm, (x, residual) = kind(24), torch.randn(2, 3, 5, 24)
    torch.nn.init.normal_(norm.weight)
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, norm(x + residual))
    weight = kind(8, device="meta", dtype=torch.bfloat16).weight
    assert weight.is_meta and weight.dtype == torch.bfloat16


def test_is_an_rms_norm_of_torch() -> None:
    norm = RMSNorm(24, 1e-4)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert list(norm.state_dict()) == ["weight"]
    x = torch.randn(4, 24)
    torch.testing.assert_close(norm(x), torch.nn.RMSNorm(24, eps=1e-4)(x))
    assert "casting_mode='llama'" in repr(norm)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_starts_as_a_factor_of_one(offset: float) -> None:
    norm = RMSNorm(8, offset=offset, casting_mode="gemma")
    assert torch.equal(norm.weight + offset, torch.ones(8))
    norm.weight.data.fill_(3.0)
    norm.reset_parameters()
    assert torch.equal(norm.weight + offset, torch.ones(8))


@pytest.mark.parametrize("affine, bias", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_that_of_torch(dtype: torch.dtype, affine: bool, bias: bool) -> None:
    torch.manual_seed(0)
    ours = LayerNorm(24, 1e-4, elementwise_affine=affine, bias=bias, dtype=dtype)
    theirs = torch.nn.LayerNorm(24, 1e-4, affine, bias, dtype=dtype)
    assert isinstance(ours, torch.nn.LayerNorm)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    x, upstream = (3 * torch.randn(2, 5, 24) + 1).to(dtype), torch.randn(2, 5, 24).to(dtype)
    results = []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        y.backward(upstream)
        results.append([y, leaf.grad, *(p.grad for p in norm.parameters())])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, expected in zip(*results):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_numbers_that_no_norm_has_are_refused(norm: type) -> None:
    for wrong in ({"hidden_size": 0}, {"hidden_size": 2.5}, {"eps": -1e-6}, {"eps": "1e-6"}):
        with pytest.raises(ValueError, match=f"{norm.__name__}: {next(iter(wrong))}=.*expected a"):
            norm(**{"hidden_size": 4, **wrong})
    assert norm(4, eps=0).eps == 0
