"""The table of all ops, with which the tests check every op in the same way.

An entry has the op's formula, a function that makes inputs of any size, and the sizes of models.
The tests check each entry for precision, layouts, frozen inputs, autocast, torch.compile, CUDA
graphs, host synchronisation and 64-bit offsets. They also compile its kernels for every
architecture at the sizes of models. `test_grid.py` fails for an op that has no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.kernels.loss_options import TOKEN_STATS
from tests.kernels import formulas
from tests.kernels.checks import as_tuple, placed, random

Inputs = dict[str, Any]


class Case(NamedTuple):
    """An op that is tested with one set of options."""

    op: str  # the op's name in ligermodels.kernels
    formula: Callable[..., Any]  # computes the same in eager PyTorch
    inputs: Callable[..., Inputs]  # takes the leading dimensions and the length of a row
    sizes: tuple[Inputs, ...]  # arguments of `inputs` for sizes of models; the largest is the last
    constant: tuple[str, ...] = ()  # names of float32 inputs that have no gradient
    flags: tuple[Inputs, ...] = ()  # arguments of `inputs` that change a kernel; the last sets all

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(kernels, self.op)


def norm(
    leading: tuple[int, ...], width: int, residual: bool | None = False, **options: Any
) -> Inputs:
    """Make inputs of a norm, with a residual, without the argument, or with a residual of None."""
    made = {
        "x": random(*leading, width, seed=1, scale=3.0),
        "weight": random(width, seed=2),
        # The norm of one column has a gradient of nearly zero: rounding, which eps divides.
        "eps": 1e-5 if width > 1 else 1.0,
        **options,
    }
    given = random(*leading, width, seed=3) if residual else None
    return made if residual is False else made | {"residual": given}


def layer_norm(
    leading: tuple[int, ...], width: int, residual: bool = False, affine: str = "weight bias"
) -> Inputs:
    made = norm(leading, width, residual) | {"bias": random(width, seed=4)}
    return made | {name: None for name in ("weight", "bias") if name not in affine}


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
    leading: tuple[int, ...],
    half: int,
    heads: int = 3,
    kv_heads: int = 2,
    rest: int = 0,
    gated: bool = False,
    **options: Any,
) -> Inputs:
    weights = {f"{name}_weight": random(2 * half + rest, seed=i) for i, name in enumerate("qk")}
    made = rope(leading, half, 2 * heads if gated else heads, kv_heads, rest=rest)
    return made | weights | {"eps": 1e-5, "num_heads": heads, "gated": gated} | options


def glu(leading: tuple[int, ...], width: int, **options: Any) -> Inputs:
    return {"gate_up": random(*leading, 2 * width, seed=7, scale=2.0), **options}


def output_gate(
    leading: tuple[int, ...], width: int, heads: int = 3, normed: bool = True, **options: Any
) -> Inputs:
    x, gate = (random(*batch_and_seq(leading), heads, width, seed=i) for i in (34, 35))
    weight = random(width, seed=36) if normed else None
    return {"x": x, "gate": gate, "weight": weight, **options}


def gate_linear(leading: tuple[int, ...], width: int, bias: bool = True, **options: Any) -> Inputs:
    made = output_gate(leading, width, **options)
    return {**made, "norm_weight": made["weight"], **linear(3 * width, 5, bias)}


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
    **options: Any,
) -> Inputs:
    out = (heads + 2 * kv_heads) * 2 * half
    made = norm_linear(batch_and_seq(leading), width, out, full, **options)
    return made | angles(leading, half) | {"num_heads": heads, "num_kv_heads": kv_heads}


def targets(leading: tuple[int, ...], vocab: int, ignore_index: int = -100) -> Tensor:
    """Make targets that begin with the last class; every third target is ignored."""
    rows = torch.Size(leading).numel()
    made = vocab - 1 - torch.arange(rows) * 7 % vocab
    made[2::3] = ignore_index
    return made.view(leading)


def cross_entropy(leading: tuple[int, ...], vocab: int, **options: Any) -> Inputs:
    """Make inputs. An option that is True and needs a tensor gets one that fits."""
    rows = torch.Size(leading).numel()
    # Some alternatives are equal, some are the target, and some are padding.
    first, likely = torch.arange(rows) * 5 % vocab, targets(leading, vocab).flatten()
    second = (first + torch.arange(rows) % 2) % vocab
    tensors = {
        "class_weights": random(vocab, seed=10).abs() + 0.1,
        "token_weights": random(*leading, seed=14),
        "alternatives": torch.stack((first, second, likely), -1).view(*leading, 3),
    }
    return {
        "logits": random(*leading, vocab, seed=11, scale=2.0),
        "targets": targets(leading, vocab, options.get("ignore_index", -100)),
        **options,
        **{name: x for name, x in tensors.items() if options.get(name) is True},
    }


def linear_cross_entropy(
    leading: tuple[int, ...], vocab: int, width: int = 32, bias: bool = True, **options: Any
) -> Inputs:
    """Make inputs with few hidden columns, which the op processes in several chunks."""
    made = cross_entropy(leading, vocab, **{"chunk_size": 2} | options)
    del made["logits"]
    made["hidden"] = random(*leading, width, seed=12)
    return made | linear(width, vocab, bias)


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


def routing(
    leading: tuple[int, ...],
    experts: int,
    biased: bool = False,
    given: bool = False,
    grouped: bool = False,
    **options: Any,
) -> Inputs:
    top_k = min(experts, 3)
    more: Inputs = {"bias": random(experts, seed=16, scale=0.3)} if biased else {}
    if grouped:
        more["n_group"] = next(n for n in (2, 3, 1) if experts % n == 0)
    if given:
        more["experts"] = random(*leading, experts, seed=17).topk(top_k).indices
    logits = random(*leading, experts, seed=15, scale=2.0)
    return {"logits": logits, "top_k": top_k, **more, **options}


def expert_mlp(
    leading: tuple[int, ...],
    width: int,
    hidden: int = 24,
    experts: int = 5,
    top_k: int = 2,
    biased: bool = False,
    **options: Any,
) -> Inputs:
    """Make inputs of which the first expert has no token, and the last ones have most."""
    biases = {
        "gate_up_bias": random(experts, 2 * width, seed=22),
        "down_bias": random(experts, hidden, seed=23),
    }
    scores = random(*leading, experts, seed=17)
    scores = scores + torch.linspace(0, 2, experts, device=scores.device)
    scores[..., 0] = -9
    return {
        "x": random(*leading, hidden, seed=18),
        "gate_up_weight": random(experts, 2 * width, hidden, seed=19, scale=hidden**-0.5),
        "down_weight": random(experts, hidden, width, seed=21, scale=width**-0.5),
        "weights": scores.softmax(-1).topk(top_k).values,
        "experts": scores.topk(top_k).indices.int(),
        **(biases if biased else {}),
        **options,
    }


def gated_delta(
    leading: tuple[int, ...],
    width: int,
    key_dim: int = 16,
    key_heads: int = 1,
    heads: int = 2,
    given: bool = True,
    most: int = 40,
    **options: Any,
) -> Inputs:
    """Make inputs, with an initial state or without; keys have a length of 1.

    A head's values have at most `most` columns, which is more than a block and faster than more.
    """
    batch, seq = batch_and_seq(leading)
    width = min(width, most)
    q, k = (random(batch, seq, key_heads, key_dim, seed=i) for i in (22, 23))
    made = {
        "q": q,
        "k": k / k.norm(dim=-1, keepdim=True).clamp_min(1e-6),
        "v": random(batch, seq, heads, width, seed=24, scale=0.25),
        "g": -random(batch, seq, heads, seed=25).abs() / 4,
        "beta": random(batch, seq, heads, seed=26).sigmoid(),
        **options,
    }
    state = {"initial_state": random(batch, heads, key_dim, width, seed=27)} if given else {}
    return made | state


def gated_delta_layer(
    leading: tuple[int, ...],
    width: int,
    key_heads: int = 1,
    heads: int = 2,
    key_dim: int = 16,
    most: int = 40,
) -> Inputs:
    batch, seq = batch_and_seq(leading)
    width = min(width, most)
    channels = 2 * key_heads * key_dim + heads * width
    return {
        "qkv": random(batch, seq, channels, seed=28),
        "b": random(batch, seq, heads, seed=29),
        "a": random(batch, seq, heads, seed=30),
        "weight": random(channels, 4, seed=31),
        "a_log": random(heads, seed=32) - 2,
        "dt_bias": random(heads, seed=33),
        "key_heads": key_heads,
        "key_dim": key_dim,
    }


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

ANGLES, WEIGHTS = ("cos", "sin"), ("class_weights",)
GEMMA = {"casting_mode": "gemma", "offset": 1.0}
ALONE, QUERIES = {"affine": ""}, {"kv_heads": 0}
LOSS_OPTIONS = {
    "label_smoothing": 0.2,
    "z_loss": 0.02,
    "softcap": 4.0,
    "logit_scale": 1.7,
    "class_weights": True,
}
# The kernel has variants for these options. The table has all combinations of them, and the
# statistics of each row with no option and with all.
LOSS_FLAGS = tuple(
    {name: LOSS_OPTIONS[name] for name in given}
    for count in range(4)
    for given in combinations(("label_smoothing", "softcap", "class_weights"), count)
)
TOKEN_FLAGS = tuple(
    {"reduction": reduction, "return_token_stats": True, **given}
    for given in ({}, LOSS_OPTIONS)
    for reduction in ("none", "mean")
)
# What can be asked of each token by name, one at a time and all at once.
ASKED_FLAGS = (
    *({"reduction": "none", "return_token_stats": (name,)} for name in TOKEN_STATS[3:]),
    {"reduction": "none", "alternatives": True},
    {
        "reduction": "none",
        "return_token_stats": TOKEN_STATS,
        "alternatives": True,
        "top_k": 1,
        **LOSS_OPTIONS,
    },
)
TEACHER = ("teacher_hidden", "teacher_weight")
DIVERGENCE_FLAGS = tuple(
    {"beta": beta, **options}
    for options in ({}, {"softcap": 4.0, "teacher_softcap": 5.0, "masked": True})
    for beta in (0.0, 1.0, None, 0.3)
)


def cases(
    op: str,
    inputs: Callable[..., Inputs],
    sizes: tuple[Inputs, ...],
    variants: dict[str, Inputs] | None = None,
    **fields: Any,
) -> dict[str, Case]:
    """Return the case of an op, and one for each variant, by name.

    A variant's kernels need no more resources than those of the first case, so it has only the
    largest size.

    Args: variants: for each name, the arguments of `inputs`; fields: further fields of the cases.
    """
    formula = getattr(formulas, op)
    made = {op: Case(op, formula, inputs, sizes, **fields)}
    for name, options in (variants or {}).items():
        size, given = {**sizes[-1], **options}, partial(inputs, **options)
        made[f"{op} {name}"] = Case(op, formula, given, (size,), fields.get("constant", ()))
    return made


EACH_ROW = {**LOSS_OPTIONS, "reduction": "none"}
CASES = {
    **cases("rms_norm", norm, HIDDEN, {"of Gemma": GEMMA}),
    **cases(
        "add_rms_norm",
        partial(norm, residual=True),
        HIDDEN,
        {"without residual": {"residual": None}, "of Gemma": GEMMA},
    ),
    **cases(
        "layer_norm",
        layer_norm,
        HIDDEN,
        {
            "without bias": {"affine": "weight"},
            "without weight": {"affine": "bias"},
            "alone": ALONE,
        },
    ),
    **cases("add_layer_norm", partial(layer_norm, residual=True), HIDDEN, {"alone": ALONE}),
    **cases(
        "glu",
        glu,
        INTERMEDIATE,
        {"with gelu": {"activation": "gelu"}, "with gelu_tanh": {"activation": "gelu_tanh"}},
    ),
    **cases(
        "rope",
        rope,
        HEADS,
        {
            "with angles of each row": {"each_row": True},
            "of a part": {"rest": 32},
            "of a part, interleaved": {"rest": 32, "interleaved": True},
            "interleaved": {"interleaved": True},
            "of queries alone": QUERIES,
        },
        constant=ANGLES,
    ),
    **cases(
        "qk_norm_rope",
        qk_norm_rope,
        HEADS,
        {"of Gemma": GEMMA, "of a part, with a gate": GEMMA | {"rest": 32, "gated": True}},
        constant=ANGLES,
    ),
    **cases("norm_linear", norm_linear, HIDDEN, {"of Gemma": GEMMA, "alone": {"full": False}}),
    **cases(
        "norm_qkv_rope",
        norm_qkv_rope,
        QKV,
        {
            "alone": {"full": False},
            "of Gemma": GEMMA,
            "interleaved": {"interleaved": True},
            "of queries alone": QUERIES,
        },
        constant=ANGLES,
    ),
    **cases(
        "output_gate",
        partial(output_gate, activation="silu"),
        each("width", 128, 256),
        {"without norm": {"normed": False, "activation": "sigmoid"}},
    ),
    **cases(
        "gate_linear",
        partial(gate_linear, activation="silu"),
        each("width", 128, 256),
        {"without norm": {"normed": False, "activation": "sigmoid", "bias": False}},
    ),
    **cases(
        "glu_linear",
        glu_linear,
        INTERMEDIATE,
        {
            "with gelu": {"activation": "gelu"},
            "with gelu_tanh": {"activation": "gelu_tanh", "bias": False},
        },
    ),
    **cases(
        "cross_entropy",
        cross_entropy,
        VOCAB,
        {"of each row": EACH_ROW},
        constant=WEIGHTS,
        flags=LOSS_FLAGS + TOKEN_FLAGS + ASKED_FLAGS,
    ),
    **cases(
        "linear_cross_entropy",
        linear_cross_entropy,
        VOCAB,
        {"with options": LOSS_OPTIONS, "of each row": EACH_ROW},
        constant=WEIGHTS,
        flags=LOSS_FLAGS + TOKEN_FLAGS + ASKED_FLAGS,
    ),
    **cases(
        "linear_log_probs",
        linear_cross_entropy,
        VOCAB,
        {"and entropy": {"entropy": True, "softcap": 4.0, "logit_scale": 1.7}},
    ),
    **cases(
        "linear_divergence",
        linear_divergence,
        VOCAB,
        {"of each token": {"reduction": "none", "masked": True, "softcap": 4.0}},
        constant=TEACHER,
        flags=DIVERGENCE_FLAGS,
    ),
    **cases(
        "routing",
        routing,
        each("experts", 8, 64, 128, 256, 512),
        {
            "normalized": {"normalize": True, "scale": 2.5},
            "of sigmoids": {"score": "sigmoid", "normalize": True, "biased": True},
            "in groups": {"score": "sigmoid", "biased": True, "grouped": True},
            "of given experts": {"normalize": True, "given": True},
        },
        constant=("bias", "experts"),
        flags=({"normalize": True}, {"score": "sigmoid", "normalize": True, "biased": True}),
    ),
    **cases(
        "expert_mlp",
        expert_mlp,
        tuple(
            # Some are odd: those do not fit torch's grouped products.
            {"width": width, "hidden": hidden, "experts": experts, "top_k": top_k}
            for width, hidden, experts, top_k in (
                (64, 64, 8, 2),
                (96, 60, 32, 4),
                (192, 60, 256, 8),
                (60, 32, 512, 8),
                (2048, 60, 8, 2),
                (64, 32, 8, 2),
                (60, 128, 128, 8),
            )
        ),
        {
            "with gelu_tanh": {"activation": "gelu_tanh"},
            # A limit that many values pass, so that their gradients are zero.
            "of gpt-oss": {"activation": ClampedSwiGLU(limit=1.0), "biased": True},
        },
    ),
    **cases(
        "gated_delta",
        gated_delta,
        # The walks of the last one have the columns for many documents, which count heads, too.
        tuple(
            {"width": n, "most": n, "key_dim": n, "heads": heads, "key_heads": key_heads}
            for n, heads, key_heads in ((64, 4, 1), (128, 4, 1), (128, 64, 32))
        ),
        {"from zero": {"given": False, "scale": 0.5}},
    ),
    **cases(
        "gated_delta_layer",
        gated_delta_layer,
        tuple({"width": n, "most": n, "key_dim": n, "heads": 4} for n in (64, 128)),
    ),
}
FIRST = {case.op: name for name, case in reversed(CASES.items())}.values()
"""The first case of each op."""
# The first two return views and compute nothing. linear_group_loss takes a function; test_groups.py
# tests it.
NOT_FUSED = {"split_qkv", "split_gated_qkv", "linear_group_loss"}

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
    return placed(inputs, place, constant=case.constant)


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
