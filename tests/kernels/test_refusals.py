"""What the ops refuse: each error names the op or the head, the argument, and what is expected.

tests/layers/test_loss_head_options.py has a wrong value of every option of a loss.
A kernel would read out of bounds, or PyTorch would broadcast, what is refused here.
"""

from __future__ import annotations

import re

import pytest
import torch

from ligermodels.kernels import linear_group_loss
from ligermodels.kernels.checks import ClampedSwiGLU
from tests.kernels.ops_table import CASES, differentiable

X = torch.float64  # of the inputs
ONES = {n: torch.ones(n, dtype=X) for n in (1, 3, 4, 6, 8)}
MATRIX = torch.ones(5, 8, dtype=X)
ANGLES = torch.ones(1, 3, 8, dtype=X)
INF = float("inf")

# For each op, with inputs of (2, 3) rows of 8 (for rope, of 8 pairs): changed arguments, and the
# error.
REFUSALS: dict[str, list[tuple[dict, str]]] = {
    "rms_norm": [
        ({"weight": ONES[3]}, r"rms_norm: weight \(3,\) .*, x .*; expected weight \(8,\)"),
        ({"weight": ONES[8].to(torch.float8_e4m3fn)}, "rms_norm: weight .* torch.float8_e4m3fn"),
        ({"casting_mode": "hf"}, "casting_mode='hf'; expected one of .'llama', 'gemma'"),
        ({"x": torch.tensor(1.0)}, "rms_norm: x \\(\\) .*; expected \\(..., hidden\\)"),
    ],
    "add_rms_norm": [({"residual": torch.ones(2, 3, 1, dtype=X)}, "expected the same shape")],
    "layer_norm": [
        ({"weight": ONES[3]}, r"weight \(3,\) .*, x .*; expected weight \(8,\)"),
        ({"bias": torch.ones(1, 8, dtype=X)}, r"bias \(1, 8\) .*; expected bias \(8,\)"),
    ],
    "add_layer_norm": [({"residual": torch.ones(2, 3, 1, dtype=X)}, "expected the same shape")],
    "glu": [
        ({"gate_up": torch.ones(2, 3)}, r"expected \(..., 2 \* intermediate\)"),
        ({"gate_up": torch.tensor(1.0)}, r"gate_up \(\) .*; expected \(\.\.\., 2"),
        ({"activation": "relu"}, "glu: activation='relu'; expected one of .'silu'"),
    ],
    "routing": [
        ({"top_k": 9}, "routing: top_k=9; expected at most the 8 experts"),
        ({"score": "tanh"}, "score='tanh'; expected 'softmax' or 'sigmoid'"),
        ({"bias": ONES[3]}, r"bias \(3,\) does not fit logits .* expected \(8,\)"),
    ],
    "expert_mlp": [
        (
            {"x": torch.ones(2, 3, 8, dtype=X)},
            r"expected \(\.\.\., hidden\), \(experts, 2 \* inner",
        ),
        ({"gate_up_weight": MATRIX}, r"gate_up_weight \(5, 8\).*; expected"),
        ({"x": torch.ones(2, 3, 24)}, "x .* torch.float32 .*; expected one dtype"),
        ({"experts": MATRIX}, "experts .* torch.float64 on cpu; expected torch.int32"),
        ({"weights": MATRIX}, r"weights \(5, 8\) .*, experts .* expected \(2, 3, 'top_k'\)"),
        ({"activation": "relu"}, "expert_mlp: activation='relu'; expected one of .'silu'"),
        ({"activation": ClampedSwiGLU(limit=0)}, "activation.limit=0; expected a finite number of"),
        ({"down_bias": ONES[8]}, r"down_bias \(8,\) .* expected down_bias \(5, 24\) torch.float64"),
    ],
    "rope": [
        ({"qkv": torch.ones(2, 3, 33)}, "packed rows have 33 columns; expected a multiple of 7"),
        ({"qkv": torch.ones(2, 5, 112)}, r"packed_rows=\(2, 5, 112\)"),
        ({"qkv": torch.ones(3, 112)}, r"packed_rows=\(3, 112\), cos .*; expected"),
        ({"qkv": torch.ones(2, 3, 0)}, "have 0 columns"),
        ({"cos": ANGLES.expand(4, 3, 8), "sin": ANGLES.expand(4, 3, 8)}, r"cos \(4, 3, 8\)"),
        ({"cos": torch.ones(1, 3, 9), "sin": torch.ones(1, 3, 9)}, "at most 8 angles"),
        ({"sin": ANGLES[:, :1]}, r"sin \(1, 1, 8\)"),
        ({"sin": ANGLES[..., :2]}, r"sin \(1, 3, 2\)"),
        ({"sin": ANGLES.to(torch.complex64)}, "rope: sin .* torch.complex64"),
        # These add up to the columns.
        ({"num_heads": 9, "num_kv_heads": -1}, "num_kv_heads=-1; expected an integer of 0 or more"),
        ({"num_heads": -1, "num_kv_heads": 4}, "num_heads=-1; expected an integer of 1 or more"),
        ({"num_heads": 3.0}, "num_heads=3.0; expected an integer"),
    ],
    "qk_norm_rope": [
        ({"k_weight": ONES[4]}, r"qk_norm_rope: k_weight \(4,\) .*, k .*\(16,\)"),
        ({"casting_mode": "hf"}, "casting_mode='hf'"),
        ({"qkv": torch.ones(1, 3, 35), "cos": ANGLES[..., :2], "sin": ANGLES[..., :2]}, "5 elem"),
    ],
    "norm_linear": [
        ({"norm_weight": ONES[3]}, r"norm_weight \(3,\) .*, x .*; expected norm_weight \(8,\)"),
        ({"weight": MATRIX[:, 1:]}, r"norm_linear: weight \(5, 7\) .*, x \(2, 3, 8\)"),
        ({"weight": MATRIX[:, 0]}, r"norm_linear: weight \(5,\) .*, x .*\(out, 8\)"),
        ({"bias": ONES[1]}, r"norm_linear: bias \(1,\) .*; expected bias \(5,\)"),
        ({"bias": ONES[6]}, r"norm_linear: bias \(6,\) .*; expected bias \(5,\)"),
        ({"bias": torch.ones(5)}, "bias .* torch.float32 on cpu, weight"),
        ({"residual": torch.ones(1, 3, 8, dtype=X)}, "expected the same shape"),
    ],
    "norm_qkv_rope": [
        ({"num_heads": 5}, "packed rows have 56 columns"),
        ({"weight": MATRIX[:, 1:]}, "norm_qkv_rope: weight .*, x"),
    ],
    "glu_linear": [
        ({"weight": MATRIX[:, 1:]}, r"glu_linear: weight .*, gate_up .*\(out, 8\)"),
        ({"bias": ONES[1]}, r"glu_linear: bias \(1,\) .*; expected bias \(5,\)"),
        ({"activation": "relu"}, "activation='relu'"),
    ],
    "cross_entropy": [
        ({"targets": torch.zeros(3).long()}, r"targets \(3,\) .*; expected \(2, 3\)"),
        ({"targets": torch.zeros(2, 3).int()}, "torch.int32 on cpu; .* torch.int64"),
        ({"logits": torch.tensor(1.0)}, "logits are 0-dimensional"),
        ({"class_weights": ONES[4]}, r"class_weights \(4,\) .* expected \(8,\)"),
        ({"ignore_index": 0.5}, "ignore_index=0.5; expected an integer"),
        ({"z_loss": INF}, "^cross entropy: z_loss=inf; expected a finite number"),
        ({"top_k": 9}, "top_k=9; expected at most the vocabulary, 8"),
        ({"alternatives": torch.zeros(2, 3).long()}, r"alternatives \(2, 3\)"),
        ({"alternatives": torch.zeros(2, 3, 2)}, "alternatives .* torch.float32"),
    ],
    "linear_cross_entropy": [
        ({"hidden": torch.ones(2, 3, 31)}, r"loss head: hidden .*; expected \("),
        ({"hidden": torch.ones(2, 3, 0), "weight": torch.ones(8, 0)}, "with 1 or more columns"),
        ({"hidden": torch.tensor(1.0)}, r"loss head: hidden \(\) .*; expected \("),
        ({"weight": ONES[8]}, r"loss head: hidden .*, weight \(8,\) .*; expected \("),
        (
            {"weight": torch.ones(0, 32, dtype=X), "bias": None},
            "vocabulary=0; expected 1 class",
        ),
        (
            {"hidden": torch.ones(2, 3, 32)},
            "float32 on cpu, weight .*; expected one dtype",
        ),
        # A product with a meta tensor would return uninitialised memory.
        (
            {"weight": torch.ones(8, 32, device="meta")},
            "expected tensors on one device",
        ),
        ({"bias": ONES[1]}, "bias .*, weight"),
        ({"bias": torch.ones(8)}, "bias .*, weight"),
        ({"token_weights": ONES[3]}, r"token_weights \(3,\) .* on cpu; expected"),
        ({"max_valid": True, "skip_ignored": True}, "loss head: max_valid=True; expected an int"),
    ],
    "linear_log_probs": [
        ({"hidden": torch.ones(2, 3, 31)}, "^loss head: hidden .*; expected"),
        ({"chunk_size": None, "max_scratch_bytes": 1}, "max_scratch_bytes=1 is too small"),
    ],
    "linear_divergence": [
        ({"beta": 1.5}, "beta=1.5; expected a number in"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask \(3,\)"),
        ({"mask": torch.ones(2, 3)}, "mask .* torch.float32 on cpu; expected torch.bool"),
        ({"teacher_hidden": torch.ones(5, 16, dtype=X)}, "expected the same tokens"),
        ({"teacher_hidden": torch.ones(2, 3, 3, dtype=X)}, r"teacher_hidden .*, teacher_weight"),
        ({"weight": torch.ones(9, 32, dtype=X), "bias": None}, "the same vocabulary"),
        ({"hidden": torch.ones(2, 3, 32)}, "hidden .* torch.float32 on cpu, weight"),
        ({"temperature": 0}, "temperature=0; expected a finite number"),
        ({"chunk_size": None, "max_scratch_bytes": 100}, "max_scratch_bytes=100 is too small"),
    ],
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name) -> None:
    case = CASES[name]
    made = case.inputs((2, 3), 8)
    for key in differentiable(case):
        made[key].requires_grad_()
    for changes, complaint in REFUSALS[name]:
        with pytest.raises(ValueError, match=complaint):
            case.function(**made | changes)


@pytest.mark.parametrize("name", CASES)
def test_integers_are_refused(name) -> None:
    """The ops of a head also name a dtype that does not fit the others."""
    case = CASES[name]
    made = case.inputs((2, 3), 8)
    for key in differentiable(case):
        with pytest.raises(ValueError, match=rf"\b{key}\b.*{re.escape('torch.int64')}"):
            case.function(**made | {key: made[key].long()})


def test_other_arguments_are_refused() -> None:
    head = CASES["linear_cross_entropy"]
    made = head.inputs((8, 6), 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match=r"expected one dtype"):
            head.function(**made | {"weight": made["weight"].float()})
    with pytest.raises(ValueError, match=r"cast one, or run under autocast"):
        head.function(**made | {"hidden": made["hidden"].half(), "weight": made["weight"].float()})
    for given, complaint in (
        ({"group_size": 3}, r"hidden \(8, 6, 32\) .*; expected \(batch, seq, in\)"),
        (
            {"loss_function": lambda tokens, _: tokens.log_probs},
            r"result \(8, 6\)",
        ),
        ({"loss_function": lambda *_: 0.0}, "result=0.0; expected a scalar"),
        ({"return_token_stats": ("p",)}, "return_token_stats"),
    ):
        options = {"loss_function": lambda tokens, _: tokens.log_probs.sum()} | given
        with pytest.raises(ValueError, match=complaint):
            linear_group_loss(**made | options)
