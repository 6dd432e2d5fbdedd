"""The gated delta net beside transformers' layer, and its states."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.layers.fusion import pre_norm
from ligermodels.layers.gated_delta import GatedDeltaNet
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.recompute import run_layer

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


def test_decoding_equals_the_whole_row() -> None:
    ours, _ = pair()
    ours.double()
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    whole, _, last = ours(x, returns_state=True)
    out, _, state = ours(x[:, :2], returns_state=True)  # fewer than the convolution reads
    more, _, state = ours(x[:, 2:5], state=state)
    parts = [out, more]
    for i in range(5, 12, 1):
        parts.append(ours.decode(x[:, i : i + 1], state)[0])
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    for ours_, whole_ in zip(state, last, strict=True):
        torch.testing.assert_close(ours_, whole_)


def test_packed_documents_are_separate_rows() -> None:
    ours, _ = pair()
    x = torch.randn(1, 90, 24)
    ends = torch.tensor([0, 1, 70, 90])
    packed, _, state = ours(x, ends, returns_state=True)
    alone = [ours(x[:, first:end], returns_state=True) for first, end in pairwise(ends.tolist())]
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(packed, torch.cat([each[0] for each in alone], 1), **close)
    for name in ("rows", "memory"):
        expected = torch.cat([getattr(each[2], name) for each in alone])
        torch.testing.assert_close(getattr(state, name), expected, **close)
    with pytest.raises(ValueError, match="expected no cu_seqlens"):
        ours(x, ends, state)


def test_padding_is_documents_of_its_own() -> None:
    """Tokens are those of rows without padding, and so are the states after them."""
    ours, _ = pair()
    x = torch.randn(2, 12, 24)
    tokens = torch.tensor([[0] * 3 + [1] * 9, [1] * 10 + [0] * 2])
    starts = AttentionMask(12, padding_mask=tokens, padding_at_ends=True).document_starts(2, "cpu")
    out, _, state = ours(x, starts, returns_state=True)
    for row, (first, end) in enumerate(((3, 12), (0, 10))):
        alone, _, after = ours(x[row : row + 1, first:end], returns_state=True)
        torch.testing.assert_close(out[row : row + 1, first:end], alone)
        for mine, expected in zip(state, after, strict=True):
            torch.testing.assert_close(mine[3 * row + 1], expected[0])
    ids = torch.tensor([[0, 0, 1], [2, 2, 2]])
    assert AttentionMask(3, document_ids=ids).document_starts(2, "cpu").tolist() == [0, 2, 3, 6]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(24), pair()[0]

    def forward(self, x, residual, context):
        x, residual, _ = self.mixer(pre_norm(self.norm, x, residual))
        return x, residual


@pytest.mark.parametrize("policy", ["attention", "input"])
def test_a_policy_changes_no_gradient(policy) -> None:
    block, x = Block(), torch.randn(1, 20, 24)
    found = []
    for each in ("all", policy):
        leaf = x.clone().requires_grad_()
        out, residual = run_layer(block, leaf, None, None, each)
        loss = (out + residual).square().mean()
        found.append(torch.autograd.grad(loss, [leaf, *block.parameters()]))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
