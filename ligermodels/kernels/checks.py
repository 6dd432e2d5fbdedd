"""What the ops ask of their tensors and options before they touch them.

Each check raises ValueError. Its message names the op and the argument, the shapes or the value,
and what is expected.
"""

import operator
from typing import NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASTING_MODES = ("llama", "gemma")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


class NormOptions(NamedTuple):
    """The options of an RMS norm; `rms_norm` explains each."""

    eps: float
    offset: float
    casting_mode: str


def check_floating(op: str, name: str, x: Tensor) -> None:
    """Refuse integers, and floats of 8 bits, which no op calculates with."""
    if x.dtype not in FLOATING:
        raise ValueError(
            f"{op}: {name} is {x.dtype}; expected a floating point tensor of 16 bits or more"
        )


def check_count(op: str, name: str, value: object, least: int) -> int:
    """Return the value as an int, numpy's integers too; refuse less than `least`, and the rest."""
    count = value
    if not isinstance(value, (int, Tensor)):
        try:
            count = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            count = None
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{op}: {name}={value!r}; expected an integer of {least} or more")
    return count


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Refuse a tensor without a last dimension, or of integers."""
    check_floating(op, name, x)
    if x.dim() == 0:
        raise ValueError(f"{op}: {name} is 0-dimensional; expected (..., hidden)")


def check_row_parameter(op: str, name: str, parameter: Tensor, x_name: str, x: Tensor) -> None:
    """Refuse a weight or a bias that is not one number for each column of x."""
    check_floating(op, name, parameter)
    if parameter.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} {tuple(parameter.shape)} does not fit {x_name} {tuple(x.shape)}; "
            f"expected ({x.shape[-1]},)"
        )


def check_residual(op: str, x: Tensor, residual: Tensor) -> None:
    """Refuse a residual of another shape than x: a kernel would read beyond it."""
    check_floating(op, "residual", residual)
    if x.shape != residual.shape:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape; "
            "expected one shape"
        )


def check_rms_norm(
    op: str,
    x: Tensor,
    weight: Tensor,
    casting_mode: str,
    x_name: str = "x",
    weight_name: str = "weight",
) -> None:
    """Refuse a weight that does not fit x, and an unknown casting_mode."""
    check_rows(op, x_name, x)
    check_row_parameter(op, weight_name, weight, x_name, x)
    if casting_mode not in CASTING_MODES:
        raise ValueError(
            f"{op}: casting_mode={casting_mode!r}; expected {' or '.join(map(repr, CASTING_MODES))}"
        )


def check_glu(op: str, gate_up: Tensor, activation: str) -> None:
    """Refuse rows that are not two halves, and an unknown activation."""
    check_floating(op, "gate_up", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"{op}: gate_up {tuple(gate_up.shape)} needs an even last dimension; expected "
            "(..., 2 * intermediate)"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: activation={activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}"
        )


def check_rope(
    op: str, shape: torch.Size, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[int, int]:
    """Return both numbers of heads as ints.

    Refuse less than one query head or a negative number of key heads, packed rows of another shape
    than those heads make with the head_dim of cos, and a cos or sin that does not fit the rows.
    """
    # Not their sum alone: a kernel would write heads that are not there.
    num_heads = check_count(op, "num_heads", num_heads, 1)
    num_kv_heads = check_count(op, "num_kv_heads", num_kv_heads, 0)
    check_floating(op, "cos", cos)
    check_floating(op, "sin", sin)
    if len(shape) != 3 or cos.ndim != 3 or cos.shape[-1] == 0:
        raise ValueError(
            f"{op}: packed rows {tuple(shape)} and cos {tuple(cos.shape)}; expected "
            "(batch, seq, columns) and (batch or 1, seq, head_dim / 2) of 1 or more"
        )
    if sin.shape != cos.shape:
        raise ValueError(
            f"{op}: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape; expected "
            "one shape"
        )
    batch, seq, columns = shape
    head_dim = 2 * cos.shape[-1]
    if columns != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"{op}: {columns} packed columns are not ({num_heads} + 2 * {num_kv_heads}) heads "
            f"of {head_dim}, the head_dim of cos {tuple(cos.shape)}"
        )
    if cos.shape[0] not in (1, batch) or cos.shape[1] != seq:
        raise ValueError(
            f"{op}: cos {tuple(cos.shape)} does not fit {batch} rows of {seq} tokens; "
            f"expected ({batch} or 1, {seq}, {head_dim // 2})"
        )
    return num_heads, num_kv_heads


def check_linear_weight(op: str, x_name: str, x: Tensor, width: int, weight: Tensor) -> None:
    """Refuse a linear's weight that does not take `width` columns, which are made from x."""
    check_floating(op, "weight", weight)
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} does not fit {x_name} {tuple(x.shape)}; expected "
            f"(out, {width})"
        )


def check_linear_bias(op: str, weight: Tensor, bias: Tensor) -> None:
    """Refuse a bias of another length or dtype than the weight of its linear."""
    if bias.shape != weight.shape[:1] or bias.dtype != weight.dtype:
        raise ValueError(
            f"{op}: bias {tuple(bias.shape)} {bias.dtype} does not fit weight "
            f"{tuple(weight.shape)} {weight.dtype}; expected ({len(weight)},) {weight.dtype}"
        )
