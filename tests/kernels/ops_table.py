"""The table of all ops, with which the tests check every op in the same way.

An entry has the op's formula, a function that makes inputs of any size, and the sizes of models.
The tests check each entry for precision, layouts, frozen inputs, autocast, torch.compile, CUDA
graphs, host synchronisation and 64-bit offsets. They also compile its kernels for every
architecture at the sizes of models. `test_grid.py` fails for an op that has no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels.loss_options import TOKEN_STATS
from tests.kernels import formulas
from tests.kernels.checks import as_tuple, random

Inputs = dict[str, Any]


class Case(NamedTuple):
    """An op that is tested with one set of options."""

    op: str  # the op's name in ligermodels.kernels
    formula: Callable[..., Any]  # computes the same in eager PyTorch
    inputs: Callable[..., Inputs]  # takes the leading dimensions and the length of a row
    sizes: tuple[Inputs, ...]  # arguments of `inputs` for sizes of models; the largest is the last
    constant: tuple[str, ...] = ()  # names of float32 inputs that have no gradient
    outputs: int | None = None  # compare only this many outputs; None compares all
    flags: tuple[Inputs, ...] = ()  # arguments of `inputs` that change a kernel; the last sets all

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(kernels, self.op)


def norm(leading: tuple[int, ...], width: int, residual: bool = False, **options: Any) -> Inputs:
    made = {
        "x": random(*leading, width, seed=1, scale=3.0),
        "weight": random(width, seed=2),
        # The norm of one column has a gradient of nearly zero: rounding, which eps divides.
        "eps": 1e-5 if width > 1 else 1.0,
        **options,
    }
    return made | {"residual": random(*leading, width, seed=3)} if residual else made


def norm_without_residual(leading: tuple[int, ...], width: int) -> Inputs:
    return norm(leading, width) | {"residual": None}


def layer_norm(
    leading: tuple[int, ...], width: int, residual: bool = False, affine: str = "weight bias"
) -> Inputs:
    made = norm(leading, width, residual) | {"bias": random(width, seed=4)}
    for name in ("weight", "bias"):
        if name not in affine:
            made[name] = None
    return made


def angles(leading: tuple[int, ...], half: int, each_row: bool = False) -> Inputs:
    batch, seq = batch_and_seq(leading)
    angle = random(batch if each_row else 1, seq, half, seed=5, scale=3.0)
    return {"cos": angle.cos(), "sin": angle.sin()}


def batch_and_seq(leading: tuple[int, ...]) -> tuple[int, int]:
    batch, seq = (1, 1, *leading)[-2:]
    return batch, seq


def rope(
    leading: tuple[int, ...],
    half: int,
    heads: int = 3,
    kv_heads: int = 2,
    each_row: bool = False,
    rest: int = 0,
    **options: Any,
) -> Inputs:
    """Make inputs whose heads have 2 * half columns that are rotated, and `rest` that are not."""
    columns = (heads + 2 * kv_heads) * (2 * half + rest)
    return {
        "qkv": random(*batch_and_seq(leading), columns, seed=6, scale=3.0),
        **angles(leading, half, each_row),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        **options,
    }


def qk_norm_rope(
    leading: tuple[int, ...], half: int, heads: int = 3, kv_heads: int = 2, **options: Any
) -> Inputs:
    weights = {f"{name}_weight": random(2 * half, seed=i) for i, name in enumerate("qk")}
    return rope(leading, half, heads, kv_heads) | weights | {"eps": 1e-5} | options


def glu(leading: tuple[int, ...], width: int, **options: Any) -> Inputs:
    return {"gate_up": random(*leading, 2 * width, seed=7, scale=2.0), **options}


def linear(width: int, out: int, bias: bool = True) -> Inputs:
    return {
        "weight": random(out, width, seed=8, scale=width**-0.5),
        "bias": random(out, seed=9) if bias else None,
    }


def glu_linear(leading: tuple[int, ...], width: int, bias: bool = True, **options: Any) -> Inputs:
    return glu(leading, width, **options) | linear(width, 5, bias)


def norm_linear(
    leading: tuple[int, ...], width: int, out: int = 5, full: bool = True, **options: Any
) -> Inputs:
    """Make inputs with a residual and a bias, or without both."""
    made = norm(leading, width, residual=True, **options)
    made["norm_weight"] = made.pop("weight")
    if not full:
        made["residual"] = None
    return made | linear(width, out, full)


def norm_qkv_rope(
    leading: tuple[int, ...],
    width: int,
    half: int = 4,
    heads: int = 3,
    kv_heads: int = 2,
    full: bool = True,
) -> Inputs:
    out = (heads + 2 * kv_heads) * 2 * half
    made = norm_linear(batch_and_seq(leading), width, out, full)
    return made | angles(leading, half) | {"num_heads": heads, "num_kv_heads": kv_heads}


def targets(leading: tuple[int, ...], vocab: int, ignore_index: int = -100) -> Tensor:
    """Make targets that begin with the last class; every third target is ignored."""
    rows = torch.Size(leading).numel()
    made = vocab - 1 - torch.arange(rows) * 7 % vocab
    made[2::3] = ignore_index
    return made.view(leading)


def loss_options(vocab: int) -> Inputs:
    """Return a value for every option that changes the loss."""
    return {
        "label_smoothing": 0.2,
        "z_loss": 0.02,
        "softcap": 4.0,
        "logit_scale": 1.7,
        "class_weights": random(vocab, seed=10).abs() + 0.1,
    }


def cross_entropy(
    leading: tuple[int, ...], vocab: int, given: Collection[str] = (), **options: Any
) -> Inputs:
    """Make inputs with the loss options that `given` names."""
    made = {
        "logits": random(*leading, vocab, seed=11, scale=2.0),
        "targets": targets(leading, vocab),
        **options,
    }
    if "alternatives" in options:  # how many
        made["alternatives"] = torch.arange(options["alternatives"]).expand(*leading, -1) % vocab
    return made | {k: value for k, value in loss_options(vocab).items() if k in given}


def linear_cross_entropy(
    leading: tuple[int, ...], vocab: int, given: Collection[str] = (), **options: Any
) -> Inputs:
    """Make inputs with few hidden columns, which the op processes in several chunks."""
    hidden = 32
    made = cross_entropy(leading, vocab, given, **options)
    del made["logits"]
    made["hidden"] = random(*leading, hidden, seed=12)
    return made | linear(hidden, vocab, bias=bool(given)) | {"chunk_size": 2}


def linear_log_probs(leading: tuple[int, ...], vocab: int, **options: Any) -> Inputs:
    made = linear_cross_entropy(leading, vocab, **options)
    return made | linear(made["hidden"].shape[-1], vocab)


def linear_divergence(leading: tuple[int, ...], vocab: int, **options: Any) -> Inputs:
    """Make the inputs of a student and of a narrower teacher."""
    head, teacher = linear(32, vocab, bias="softcap" in options), linear(16, vocab)
    masked = {"mask": targets(leading, vocab) >= 0} if options.pop("masked", False) else {}
    return {
        "hidden": random(*leading, 32, seed=12),
        "weight": head["weight"],
        "bias": head["bias"],
        "teacher_hidden": random(*leading, 16, seed=13),
        "teacher_weight": teacher["weight"] * 1.5,
        "chunk_size": 2,
        **masked,
        **options,
    }


def without_chunks(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Let a formula accept the op's chunk_size; the formula computes all rows at once."""
    return lambda *, chunk_size=None, **kwargs: formula(**kwargs)


def each(name: str, *values: int) -> tuple[Inputs, ...]:
    """Return one size for each value of the named argument."""
    return tuple({name: value} for value in values)


HIDDEN = each("width", 576, 1024, 2048, 2304, 3072, 3584, 4096, 5120, 8192, 16384)
INTERMEDIATE = each("width", 1536, 8192, 14336, 28672)
VOCAB = each("vocab", 2048, 32000, 128256, 151936, 256000, 262208)
QKV = ({"width": 4096, "half": 64, "heads": 32, "kv_heads": 8}, *HIDDEN[-1:])
HEADS = tuple(
    {"half": head_dim // 2, "heads": heads, "kv_heads": kv_heads}
    for heads, kv_heads, head_dim in (
        (9, 3, 64),
        (32, 8, 64),
        (4, 1, 256),
        (8, 4, 256),
        (16, 8, 128),
        (32, 16, 128),
        (64, 8, 128),
        (32, 8, 128),
    )
)

ANGLES, GEMMA = ("cos", "sin"), {"casting_mode": "gemma", "offset": 1.0}
WEIGHTS = ("class_weights",)
LOSS_OPTIONS = ("label_smoothing", "z_loss", "softcap", "logit_scale", *WEIGHTS)
# The kernel has variants for these options. The table has all combinations of them, and the
# statistics of each row with no option and with all.
LOSS_FLAGS = tuple(
    {"given": given}
    for count in range(4)
    for given in combinations(("label_smoothing", "softcap", "class_weights"), count)
)
TOKEN_FLAGS = tuple(
    {"reduction": reduction, "return_token_stats": True, "given": given}
    for given in ((), LOSS_OPTIONS)
    for reduction in ("none", "mean")
)
# What can be asked of each token by name, one at a time and all at once.
ASKED_FLAGS = (
    *({"reduction": "none", "return_token_stats": (name,)} for name in TOKEN_STATS[3:]),
    {"reduction": "none", "alternatives": 3},
    {
        "reduction": "none",
        "return_token_stats": TOKEN_STATS,
        "alternatives": 3,
        "top_k": 1,
        "given": LOSS_OPTIONS,
    },
)
TEACHER = ("teacher_hidden", "teacher_weight")
DIVERGENCE_FLAGS = tuple(
    {"beta": beta, **options}
    for options in ({}, {"softcap": 4.0, "teacher_softcap": 5.0, "masked": True})
    for beta in (0.0, 1.0, None, 0.3)
)
LINEAR_LOG_PROBS = without_chunks(formulas.linear_log_probs)
LINEAR_CROSS_ENTROPY = without_chunks(formulas.linear_cross_entropy)

# A case whose kernels need fewer resources than those of another case of the op has only the
# largest size.
CASES = {
    "rms_norm": Case("rms_norm", formulas.rms_norm, norm, HIDDEN),
    "rms_norm of Gemma": Case("rms_norm", formulas.rms_norm, partial(norm, **GEMMA), HIDDEN[-1:]),
    "add_rms_norm": Case(
        "add_rms_norm", formulas.add_rms_norm, partial(norm, residual=True), HIDDEN
    ),
    "add_rms_norm without residual": Case(
        "add_rms_norm", formulas.add_rms_norm, norm_without_residual, HIDDEN[-1:]
    ),
    "add_rms_norm of Gemma": Case(
        "add_rms_norm", formulas.add_rms_norm, partial(norm, residual=True, **GEMMA), HIDDEN[-1:]
    ),
    "layer_norm": Case("layer_norm", formulas.layer_norm, layer_norm, HIDDEN),
    "layer_norm without bias": Case(
        "layer_norm", formulas.layer_norm, partial(layer_norm, affine="weight"), HIDDEN[-1:]
    ),
    "layer_norm without weight": Case(
        "layer_norm", formulas.layer_norm, partial(layer_norm, affine="bias"), HIDDEN[-1:]
    ),
    "layer_norm alone": Case(
        "layer_norm", formulas.layer_norm, partial(layer_norm, affine=""), HIDDEN[-1:]
    ),
    "add_layer_norm": Case(
        "add_layer_norm", formulas.add_layer_norm, partial(layer_norm, residual=True), HIDDEN
    ),
    "add_layer_norm alone": Case(
        "add_layer_norm",
        formulas.add_layer_norm,
        partial(layer_norm, residual=True, affine=""),
        HIDDEN[-1:],
    ),
    "glu": Case("glu", formulas.glu, partial(glu, activation="gelu"), INTERMEDIATE),
    "swiglu": Case("swiglu", formulas.glu, glu, INTERMEDIATE),
    "geglu": Case("geglu", partial(formulas.glu, activation="gelu_tanh"), glu, INTERMEDIATE),
    "rope": Case("rope", formulas.rope, rope, HEADS, ANGLES),
    "rope with angles of each row": Case(
        "rope", formulas.rope, partial(rope, each_row=True), HEADS[-1:], ANGLES
    ),
    "rope of a part, interleaved": Case(
        "rope", formulas.rope, partial(rope, rest=32, interleaved=True), HEADS[-1:], ANGLES
    ),
    "rope of queries alone": Case(
        "rope", formulas.rope, partial(rope, kv_heads=0), ({"half": 64, "heads": 32},), ANGLES
    ),
    "qk_norm_rope": Case("qk_norm_rope", formulas.qk_norm_rope, qk_norm_rope, HEADS, ANGLES),
    "qk_norm_rope of Gemma": Case(
        "qk_norm_rope", formulas.qk_norm_rope, partial(qk_norm_rope, **GEMMA), HEADS[-1:], ANGLES
    ),
    "norm_linear": Case("norm_linear", formulas.norm_linear, norm_linear, HIDDEN),
    "norm_linear of Gemma": Case(
        "norm_linear", formulas.norm_linear, partial(norm_linear, **GEMMA), HIDDEN[-1:]
    ),
    "norm_linear alone": Case(
        "norm_linear", formulas.norm_linear, partial(norm_linear, full=False), HIDDEN
    ),
    "norm_qkv_rope": Case("norm_qkv_rope", formulas.norm_qkv_rope, norm_qkv_rope, QKV, ANGLES),
    "norm_qkv_rope alone": Case(
        "norm_qkv_rope",
        formulas.norm_qkv_rope,
        partial(norm_qkv_rope, full=False),
        QKV,
        ANGLES,
    ),
    "norm_qkv_rope of queries alone": Case(
        "norm_qkv_rope",
        formulas.norm_qkv_rope,
        partial(norm_qkv_rope, kv_heads=0),
        ({"width": 4096, "half": 64, "heads": 32},),
        ANGLES,
    ),
    "glu_linear": Case("glu_linear", formulas.glu_linear, glu_linear, INTERMEDIATE),
    "glu_linear with gelu": Case(
        "glu_linear", formulas.glu_linear, partial(glu_linear, activation="gelu"), INTERMEDIATE[-1:]
    ),
    "glu_linear with gelu_tanh": Case(
        "glu_linear",
        formulas.glu_linear,
        partial(glu_linear, bias=False, activation="gelu_tanh"),
        INTERMEDIATE[-1:],
    ),
    "cross_entropy": Case(
        "cross_entropy",
        formulas.cross_entropy,
        cross_entropy,
        VOCAB,
        outputs=2,
        flags=LOSS_FLAGS + TOKEN_FLAGS + ASKED_FLAGS,
    ),
    "cross_entropy of each row": Case(
        "cross_entropy",
        formulas.cross_entropy,
        partial(cross_entropy, given=LOSS_OPTIONS, reduction="none"),
        VOCAB,
        WEIGHTS,
        outputs=2,
    ),
    "linear_cross_entropy": Case(
        "linear_cross_entropy",
        LINEAR_CROSS_ENTROPY,
        linear_cross_entropy,
        VOCAB,
        outputs=2,
        flags=LOSS_FLAGS + TOKEN_FLAGS + ASKED_FLAGS,
    ),
    "linear_cross_entropy with options": Case(
        "linear_cross_entropy",
        LINEAR_CROSS_ENTROPY,
        partial(linear_cross_entropy, given=LOSS_OPTIONS),
        VOCAB,
        WEIGHTS,
        outputs=2,
    ),
    "linear_cross_entropy of each row": Case(
        "linear_cross_entropy",
        LINEAR_CROSS_ENTROPY,
        partial(linear_cross_entropy, given=LOSS_OPTIONS, reduction="none"),
        VOCAB[-1:],
        WEIGHTS,
        outputs=2,
    ),
    "linear_log_probs": Case(
        "linear_log_probs",
        LINEAR_LOG_PROBS,
        partial(linear_log_probs, entropy=True, softcap=4.0, logit_scale=1.7),
        VOCAB,
    ),
    "linear_log_probs without entropy": Case(
        "linear_log_probs", LINEAR_LOG_PROBS, linear_log_probs, VOCAB[-1:], outputs=1
    ),
    "linear_divergence": Case(
        "linear_divergence",
        without_chunks(formulas.linear_divergence),
        linear_divergence,
        VOCAB,
        TEACHER,
        flags=DIVERGENCE_FLAGS,
    ),
    "linear_divergence of each token": Case(
        "linear_divergence",
        without_chunks(formulas.linear_divergence),
        partial(linear_divergence, reduction="none", masked=True, softcap=4.0),
        VOCAB[-1:],
        TEACHER,
    ),
}
# split_qkv returns views and computes nothing. linear_group_loss takes a function; test_groups.py
# tests it.
NOT_FUSED = {"split_qkv", "linear_group_loss"}

# Each size is the leading dimensions and the length of a row.
SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    "one row": ((1,), 100),
    "one column": ((9,), 1),
    "odd": ((3,), 33),
    "batch": ((2, 3), 64),
    "more rows than programs": ((40,), 8),
    "more columns than a block": ((2,), 1100),
    "no rows": ((0,), 16),
    "empty batch": ((0, 3), 8),
    "no leading dimension": ((), 17),
}


def differentiable(case: Case) -> list[str]:
    """Return the names of the inputs that can have a gradient."""
    return [
        name
        for name, value in case.inputs((1,), 2).items()
        if isinstance(value, Tensor) and value.is_floating_point() and name not in case.constant
    ]


def leaves(case: Case, inputs: Inputs, place: Any) -> Inputs:
    """Copy the inputs to a place; every input that can have a gradient requires one."""
    device, dtype = place
    wide = torch.promote_types(dtype, torch.float32)
    made = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and not value.is_floating_point():
            made[name] = value.to(device, copy=True)
        elif isinstance(value, Tensor):
            kept = wide if name in case.constant else dtype
            made[name] = value.to(device, kept, copy=True)
            made[name].requires_grad_(name not in case.constant)
    return made


def upstreams(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return a random upstream gradient for every output."""
    return [random(*x.shape, seed=20 + i).to(x) for i, x in enumerate(outputs)]


def gradients(outputs: Sequence[Tensor], made: Inputs, upstream: list[Tensor]) -> list[Tensor]:
    """Return the gradients of all inputs that require one, without waiting for the GPU."""
    used = [(x, y) for x, y in zip(outputs, upstream) if x.requires_grad]
    wanted = [v for v in made.values() if isinstance(v, Tensor) and v.requires_grad]
    return list(torch.autograd.grad([x for x, _ in used], wanted, [y for _, y in used]))


def outputs_and_gradients(function: Callable[..., Any], made: Inputs) -> list[Tensor]:
    """Return an op's outputs, and its gradients for random upstream gradients."""
    outputs = as_tuple(function(**made))
    return [x.detach() for x in outputs] + gradients(outputs, made, upstreams(outputs))
