"""SwiGLU and GeGLU on packed rows."""

import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.base import Case, Function, Implementation, Op, Random, compiled, liger, sizes
from ligermodels import kernels


def _liger(random: Random, rows: int, width: int, name: str) -> dict[str, Implementation]:
    def glu(gate: Tensor, up: Tensor) -> Tensor:
        return getattr(liger, f"liger_{name}")(gate, up)

    return {
        # The halves of packed rows are not contiguous, so Liger copies them.
        "liger": Implementation(lambda gate_up: glu(*gate_up.chunk(2, -1))),
        # Gate and up are separate, as the linears of transformers make them. Their gradients
        # overwrite them.
        "liger (in place)": Implementation(
            glu, lambda: [random.normal(rows, width) for _ in range(2)]
        ),
    }


def _glu(
    random: Random,
    rows: int,
    width: int,
    activation: Function,
    peers: dict[str, Implementation],
    ours: Function,
) -> Case:
    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, 2 * width)],
        {"eager": eager, "torch.compile": compiled(eager), **peers, "ligermodels": ours},
        # Forward reads gate, up and writes y; backward reads gate, up, dy and writes two gradients.
        (3 * one_pass, 8 * one_pass),
    )


def swiglu(random: Random, rows: int, width: int) -> Case:
    peers = _liger(random, rows, width, "swiglu")
    return _glu(random, rows, width, F.silu, peers, kernels.glu)


def geglu(random: Random, rows: int, width: int) -> Case:
    def activation(gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh")

    peers = _liger(random, rows, width, "geglu")
    return _glu(
        random, rows, width, activation, peers, lambda gate_up: kernels.glu(gate_up, "gelu_tanh")
    )


def geglu_erf(random: Random, rows: int, width: int) -> Case:
    """GeGLU with the exact GELU, which Liger does not have."""
    return _glu(random, rows, width, F.gelu, {}, lambda gate_up: kernels.glu(gate_up, "gelu"))


def _op(label: str, build: Function, width: int) -> Op:
    rows = (1, 512, 2048, 32768, 131072)
    return Op(
        label,
        build,
        {"rows": 16, "width": 1024},
        sizes("rows width", (8192, width)),
        sizes("rows width", *((n, width) for n in rows)),
    )


OPS = {
    "swiglu": _op("SwiGLU", swiglu, 14336),
    "geglu": _op("GeGLU (tanh)", geglu, 9216),
    "geglu_erf": _op("GeGLU (erf)", geglu_erf, 9216),
}
