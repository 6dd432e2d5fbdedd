"""The gated delta net beside transformers' layer, and its states."""

from __future__ import annotations

import pytest
import torch

from ligermodels.layers.gated_delta import DeltaState, GatedDeltaNet

qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
qwen_config = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")


def pair() -> tuple[GatedDeltaNet, torch.nn.Module]:
    """Return a layer, and transformers' with the same weights."""
    torch.manual_seed(0)
    ours = GatedDeltaNet(24, 2, 4, 16, 8)
    config = qwen_config.Qwen3_5TextConfig(
        hidden_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
    )
    theirs = qwen.Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        ours.norm.weight.normal_(1)
        ours.dt_bias.normal_()
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        for name, part in zip(names, ours.in_proj.weight.split(ours.widths), strict=True):
            getattr(theirs, name).weight.copy_(part)
        theirs.conv1d.weight.copy_(ours.conv1d.weight)
        theirs.A_log.copy_(ours.A_log)
        theirs.dt_bias.copy_(ours.dt_bias)
        theirs.norm.weight.copy_(ours.norm.weight)
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
    return ours, theirs


def test_equals_transformers() -> None:
    """Outputs within 1e-5, gradients within 1e-4, both relative."""
    ours, theirs = pair()
    x = torch.randn(2, 70, 24)
    found, expected = ours(x)[0], theirs(x)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream)
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    packed = torch.cat([getattr(theirs, name).weight.grad for name in names])
    for a, b in (
        (ours.in_proj.weight.grad, packed),
        (ours.conv1d.weight.grad, theirs.conv1d.weight.grad),
        (ours.A_log.grad, theirs.A_log.grad),
        (ours.dt_bias.grad, theirs.dt_bias.grad),
        (ours.norm.weight.grad, theirs.norm.weight.grad),
        (ours.out_proj.weight.grad, theirs.out_proj.weight.grad),
    ):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_a_state_of_other_rows_or_sizes_is_refused() -> None:
    layer, x = GatedDeltaNet(24, 2, 4, 16, 8), torch.randn(2, 5, 24)
    rows, memory = layer(x, returns_state=True)[2]
    for wrong in (
        DeltaState(rows[:1], memory[:1]),
        DeltaState(rows[:, 1:], memory),
        DeltaState(rows, memory.mT.contiguous().mT),
        (rows, memory),
    ):
        for run in (layer.decode, lambda x, state: layer(x, state=state)):
            with pytest.raises(ValueError, match=r"expected DeltaState of contiguous \(2, 3, 96\)"):
                run(x, wrong)
    with pytest.raises(ValueError, match="num_value_heads=3; expected a multiple"):
        GatedDeltaNet(24, 2, 3, 16, 8)
