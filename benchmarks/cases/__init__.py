"""The ops under measurement: for each, inputs of a size, implementations, and what it must move.

Bytes are the fewest that the op can move, each input read and each output written once a pass;
what is saved between the passes counts, statistics and weights of a row's width do not.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.cases.base import Absent, Case, Implementation, Random
from benchmarks.cases.glu import geglu, geglu_erf, swiglu
from benchmarks.cases.linears import glu_linear, norm_linear, norm_qkv_rope
from benchmarks.cases.losses import (
    cross_entropy,
    cross_entropy_softcap,
    linear_cross_entropy,
    linear_cross_entropy_budget,
    linear_cross_entropy_ignored,
    linear_cross_entropy_none,
    linear_cross_entropy_stats,
    linear_log_probs,
)
from benchmarks.cases.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from benchmarks.cases.ropes import qk_norm_rope, rope

__all__ = ["OPS", "Absent", "Case", "Implementation", "Op", "Random"]


@dataclasses.dataclass
class Op:
    """How to build an op, and at which sizes to measure it.

    host: one small size, where the device is never what is waited for; None to leave it out.
    table: the sizes of the table. sweep: those of the plots, on top.
    rounds: how often to measure on the device, there and back; of each time the best counts.
    """

    build: Callable[..., Case]
    host: dict[str, Any] | None
    table: list[dict[str, Any]]
    sweep: list[dict[str, Any]]
    rounds: int = 1


def _sizes(names: str, *values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), value, strict=True)) for value in values]


def _norm(build: Callable[..., Case], table: list[int]) -> Op:
    widths = [width for width in (576, 2048, 4096, 8192, 16384) if width not in table]
    return Op(
        build,
        {"rows": 16, "width": 1024},
        _sizes("rows width", *((16384, width) for width in table)),
        _sizes("rows width", *((16384, w) for w in widths), *((n, 4096) for n in ROWS)),
    )


def _glu(build: Callable[..., Case], width: int) -> Op:
    rows = (1, 512, 2048, 32768, 131072)
    return Op(
        build,
        {"rows": 16, "width": 1024},
        _sizes("rows width", (8192, width)),
        _sizes("rows width", *((n, width) for n in rows)),
    )


def _heads(build: Callable[..., Case], *table: tuple[int, ...]) -> Op:
    tokens = (1, 1024, 4096, 16384, 131072)
    return Op(
        build,
        dict(zip(_HEADS.split(), (1, 16, 8, 2, 64))),
        _sizes(_HEADS, *table),
        _sizes(_HEADS, *((1, seq, 32, 8, 128) for seq in tokens)),
    )


ROWS = (1, 256, 131072)
_HEADS = "batch seq heads kv_heads head_dim"
_QKV = "batch seq width heads kv_heads head_dim"
_HEAD = "rows width vocab"
MIB = 2**20

OPS = {
    "rms_norm": _norm(rms_norm, [2048, 4096, 8192]),
    "add_rms_norm": _norm(add_rms_norm, [4096]),
    "layer_norm": _norm(layer_norm, [4096]),
    "add_layer_norm": _norm(add_layer_norm, [4096]),
    "swiglu": _glu(swiglu, 14336),
    "geglu": _glu(geglu, 9216),
    "geglu_erf": _glu(geglu_erf, 9216),
    "rope": _heads(rope, (2, 8192, 32, 8, 128)),
    "qk_norm_rope": _heads(qk_norm_rope, (2, 8192, 32, 8, 128), (1, 8192, 8, 4, 256)),
    "norm_linear": Op(
        norm_linear,
        {"rows": 16, "width": 256, "out": 1024},
        _sizes("rows width out", (8192, 4096, 28672)),
        _sizes("rows width out", *((rows, 4096, 28672) for rows in (1, 1024, 131072))),
        rounds=4,
    ),
    "norm_qkv_rope": Op(
        norm_qkv_rope,
        dict(zip(_QKV.split(), (1, 16, 256, 8, 2, 64))),
        _sizes(_QKV, (1, 8192, 4096, 32, 8, 128)),
        _sizes(_QKV, *((1, seq, 4096, 32, 8, 128) for seq in (1, 1024, 131072))),
        rounds=4,
    ),
    "glu_linear": Op(
        glu_linear,
        {"rows": 16, "width": 1024, "out": 256},
        _sizes("rows width out", (8192, 14336, 4096)),
        _sizes("rows width out", *((rows, 14336, 4096) for rows in (1, 1024, 131072))),
        rounds=4,
    ),
    "cross_entropy": Op(
        cross_entropy,
        {"rows": 16, "vocab": 1024},
        _sizes("rows vocab", (8192, 128256)),
        _sizes(
            "rows vocab",
            *((8192, vocab) for vocab in (32000, 151936, 262208)),
            *((rows, 128256) for rows in (1, 1024, 4096, 32768, 131072)),
        ),
    ),
    "cross_entropy_softcap": Op(
        cross_entropy_softcap, None, _sizes("rows vocab", (8192, 128256)), []
    ),
    "linear_cross_entropy": Op(
        linear_cross_entropy,
        {"rows": 512, "width": 256, "vocab": 1024},
        _sizes(
            _HEAD,
            (8192, 4096, 128256),
            (32768, 4096, 128256),
            (8192, 2304, 256000),
            (16384, 2048, 128256),
        ),
        _sizes(
            _HEAD,
            *((8192, 2048, vocab) for vocab in (32000, 128256, 262208)),
            *((8192, width, 128256) for width in (576, 16384)),
            *((rows, 2048, 128256) for rows in (1, 1024, 4096, 131072)),
        ),
    ),
    "linear_cross_entropy_ignored": Op(
        linear_cross_entropy_ignored,
        None,
        [],
        _sizes(
            _HEAD + " ignored", *((8192, 4096, 128256, share) for share in (0.0, 0.5, 0.8, 0.9))
        ),
    ),
    "linear_cross_entropy_budget": Op(
        linear_cross_entropy_budget,
        None,
        [],
        _sizes(
            _HEAD + " max_scratch_bytes",
            *(
                (8192, 4096, 128256, budget)
                for budget in (32 * MIB, 128 * MIB, 512 * MIB, 2048 * MIB, None)
            ),
        ),
    ),
    "linear_cross_entropy_none": Op(
        linear_cross_entropy_none,
        {"rows": 512, "width": 256, "vocab": 1024},
        _sizes(_HEAD, (8192, 4096, 128256)),
        [],
    ),
    "linear_cross_entropy_stats": Op(
        linear_cross_entropy_stats,
        {"rows": 512, "width": 256, "vocab": 1024},
        _sizes(_HEAD, (8192, 4096, 128256)),
        [],
    ),
    "linear_log_probs": Op(
        linear_log_probs,
        {"rows": 512, "width": 256, "vocab": 1024, "entropy": False},
        _sizes(_HEAD + " entropy", (8192, 4096, 128256, False), (8192, 4096, 128256, True)),
        [],
    ),
}
