"""Compare the references' own backwards with autograd's derivatives of their forwards."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.checks import ACTIVATIONS, NormOptions
from ligermodels.kernels.loss_options import CrossEntropyOptions, OutputGrads
from ligermodels.kernels.reference import (
    cross_entropy,
    glu,
    layer_norm,
    qk_norm_rope,
    rms_norm,
    rope,
)
from ligermodels.kernels.rope import split_qkv
from tests.kernels import formulas
from tests.kernels.checks import random
from tests.kernels.test_cross_entropy import OPTIONS, options_for, targets_for
from tests.kernels.test_qk_norm_rope import inputs as qk_norm_rope_inputs


def equal(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("casting_mode, offset", [("llama", 0.0), ("gemma", 1.0)])
def test_rms_norm(casting_mode, offset, residual) -> None:
    x, r, weight = (random(3, 8, seed=1), random(3, 8, seed=2), random(8, seed=3))
    s = (x + r if residual else x).requires_grad_()
    weight.requires_grad_()
    options = NormOptions(1e-5, offset, casting_mode)
    y, _, _ = rms_norm.rms_norm_forward(s, None, weight, options, s.dtype)
    equal(y, formulas.rms_norm(s, weight, 1e-5, offset, casting_mode))
    with_residual, total, rstd = rms_norm.rms_norm_forward(
        x.detach(), r if residual else None, weight, options, s.dtype
    )
    equal(with_residual, y)
    equal(total, s)
    grad_y, grad_s = random(3, 8, seed=4), random(3, 8, seed=5)
    expected = torch.autograd.grad((y, s * 1.0), (s, weight), (grad_y, grad_s))
    grad_x, grad_weight, again = rms_norm.rms_norm_backward(
        grad_y, grad_s, s, weight, rstd, options, True, True
    )
    equal(grad_x, expected[0])
    equal(grad_weight, expected[1])
    equal(again, y)


@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine) -> None:
    x, r = random(3, 8, seed=1), random(3, 8, seed=2)
    weight, bias = (random(8, seed=i).requires_grad_() if affine else None for i in (3, 4))
    s = (x + r).requires_grad_()
    y, total, mean, rstd = layer_norm.layer_norm_forward(x, r, weight, bias, 1e-5)
    expected = formulas.layer_norm(s, weight, bias)
    equal(y, expected)
    equal(total, s)
    grad_y, grad_s = random(3, 8, seed=5), random(3, 8, seed=6)
    leaves = [leaf for leaf in (s, weight, bias) if leaf is not None]
    wanted = torch.autograd.grad((expected, s * 1.0), leaves, (grad_y, grad_s))
    dtype = torch.float64 if affine else None
    got = layer_norm.layer_norm_backward(grad_y, grad_s, s, weight, mean, rstd, dtype, dtype)
    for ours, want in zip(got, wanted):
        equal(ours, want)
    if not affine:
        assert got[1] is None and got[2] is None


def test_rope_and_its_gradient() -> None:
    angles = random(2, 3, 4, seed=1)
    qkv = random(2, 3, 4 * 8, seed=2).requires_grad_()
    out = rope.rope_forward(qkv, angles.cos(), angles.sin(), 2, 1, False)
    expected = torch.cat([x.flatten(-2) for x in formulas.rope(qkv, *cos_sin(angles), 2, 1)], -1)
    equal(out, expected)
    grad = random(2, 3, 32, seed=3)
    (want,) = torch.autograd.grad(out, qkv, grad)
    upstream = split_qkv(grad, 2, 1)
    equal(rope.rope_backward(*upstream, angles.cos(), angles.sin()), want)


@pytest.mark.parametrize("casting_mode, offset", [("llama", 0.0), ("gemma", 1.0)])
def test_qk_norm_rope(casting_mode, offset) -> None:
    made = qk_norm_rope_inputs(2, 3, 4, 2, 8)
    options = NormOptions(1e-5, offset, casting_mode)
    for name in ("qkv", "q_weight", "k_weight"):
        made[name].requires_grad_()
    expected = formulas.qk_norm_rope(**made, **options._asdict())
    q, k, _ = split_qkv(made["qkv"], 4, 2)
    weights = (made["q_weight"], made["k_weight"], made["cos"], made["sin"])
    out = qk_norm_rope.qk_norm_rope_forward(q, k, *weights, options)
    equal(out, torch.cat(expected[:2], -2))
    grads = [random(*x.shape, seed=i) for i, x in enumerate(expected)]
    wanted = torch.autograd.grad(
        expected, [made[n] for n in ("qkv", "q_weight", "k_weight")], grads
    )
    got = qk_norm_rope.qk_norm_rope_backward(*grads, q, k, *weights, options, True)
    for ours, want in zip(got, wanted):
        equal(ours, want)
    got = qk_norm_rope.qk_norm_rope_backward(*grads, q, k, *weights, options, False)
    assert got[1] is None and got[2] is None


def cos_sin(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu(activation) -> None:
    gate_up, grad = random(3, 8, seed=1, scale=3.0).requires_grad_(), random(3, 4, seed=2)
    out = glu.glu_forward(gate_up, activation)
    equal(out, formulas.glu(gate_up, activation))
    (expected,) = torch.autograd.grad(out, gate_up, grad)
    got, again = glu.glu_backward(gate_up, grad, activation, True, False)
    equal(got, expected)
    equal(again, out)
    assert glu.glu_backward(gate_up, grad, activation, False, False)[1] is None
    buffer = gate_up.detach().clone()
    got, again = glu.glu_backward(buffer, grad, activation, True, True)
    equal(got, expected)
    equal(again, out)
    assert got.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy(name) -> None:
    options = options_for(name, 11)
    weights = options.pop("class_weights", None)
    options = CrossEntropyOptions(**options)
    logits = random(5, 11, seed=1).requires_grad_()
    targets = targets_for((5,), 11, options.ignore_index)
    loss, _, lse, _ = cross_entropy.cross_entropy_rows(
        logits, targets, None, None, weights, options, False
    )
    scale = random(5, seed=2)
    (expected,) = torch.autograd.grad(loss, logits, scale)
    for known in (None, lse):
        buffer = logits.detach().clone()
        *_, grad = cross_entropy.cross_entropy_rows(
            buffer, targets, OutputGrads(scale), known, weights, options, True
        )
        equal(grad, expected)
        assert grad.data_ptr() == buffer.data_ptr()
