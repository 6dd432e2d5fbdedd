"""Checks of the tensors and options of the ops.

Each check raises ValueError. The message names the op and the arguments, the shapes or the values,
and what is expected (`misfit`).
"""

import operator
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASTING_MODES = ("llama", "gemma")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
MAX_DELTA_KEY_DIM = 128  # what the Triton kernels of the gated delta rule take


class NormOptions(NamedTuple):
    """The options of an RMS norm. `rms_norm` explains each."""

    eps: float
    offset: float
    casting_mode: str


class ClampedSwiGLU(NamedTuple):
    """The activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), of clamped values.

    The gate is at most `limit`, and up is in [-limit, limit].
    """

    alpha: float = 1.702
    limit: float = 7.0


class Routing(NamedTuple):
    """The options of `routing`, which explains each; eps is added to a sum of scores."""

    score: str
    normalize: bool
    scale: float
    eps: float


class DeltaInputs(NamedTuple):
    """The tensors of `gated_delta_layer`, which explains them, with all rows joined."""

    qkv: Tensor
    b: Tensor
    a: Tensor
    weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    cu_seqlens: Tensor


class DeltaRule(NamedTuple):
    """The tensors of `gated_delta`, which explains them, with all rows joined."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    cu_seqlens: Tensor
    initial_state: Tensor | None


def misfit(op: str, expected: str, **given: object) -> ValueError:
    """Return the error of arguments that do not fit, which names a tensor's shape and dtype."""
    named = (
        f"{name} {tuple(x.shape)} {x.dtype} on {x.device}"
        if isinstance(x, Tensor)
        else f"{name}={x!r}"
        for name, x in given.items()
    )
    return ValueError(f"{op}: {', '.join(named)}; expected {expected}")


def check_floating(op: str, name: str, x: Tensor) -> None:
    """Raise if x has integers or 8-bit floats, because no op supports them."""
    if x.dtype not in FLOATING:
        raise misfit(op, "a floating point tensor of 16 bits or more", **{name: x})


def check_count(op: str, name: str, value: object, least: int) -> int:
    """Return a Python or numpy integer as an int; raise for other types or values below `least`."""
    count = value
    if not isinstance(value, (int, Tensor)):
        try:
            count = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            count = None
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise misfit(op, f"an integer of {least} or more", **{name: value})
    return count


def check_number(op: str, name: str, value: object, *, above: bool = False) -> float:
    """Return a Python or numpy number of at least 0 as a float; raise for others, and for infinity.

    Args: above: whether 0 is refused, too.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
    if not isinstance(number, float) or not 0 <= number < float("inf") or (above and number == 0):
        expected = f"a finite number of {'more than' if above else 'at least'} 0"
        raise misfit(op, expected, **{name: value})
    return number


def check_token_ids(name: str, ids: Tensor, vocab_size: int) -> Tensor:
    """Return ids for a lookup that refuses those outside the vocabulary; raise if they are wrong.

    Only eager mode on a CPU looks at the values: on a GPU this would be a synchronisation. There an
    id outside becomes the next one outside, on which the lookup ends in a device-side assertion.
    Left alone, a lookup in eager mode would read only the low 32 bits of the id, and a compiled one
    may count negative ids from the end.

    Raises:
        ValueError: the type or dtype is wrong.
        IndexError: an id is outside the vocabulary, on a CPU in eager mode.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name} is a {kind}; expected token ids, a tensor of torch.int64")
    if torch.compiler.is_compiling():
        return torch.where(ids < 0, vocab_size, ids)
    if ids.device.type == "cuda":
        return ids.clamp(-1, vocab_size)
    # A subclass of Tensor, such as a fake tensor, may have no values to look at.
    if type(ids) is not Tensor or ids.device.type != "cpu":
        return ids
    if ids.numel() and any(not 0 <= int(end) < vocab_size for end in torch.aminmax(ids)):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        raise IndexError(
            f"{name}: token {int(outside[0])} is outside the vocabulary of {vocab_size}"
        )
    return ids


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Raise if x has no last dimension or is not floating point."""
    check_floating(op, name, x)
    if x.dim() == 0:
        raise misfit(op, "(..., hidden)", **{name: x})


def check_row_parameter(op: str, name: str, parameter: Tensor, x_name: str, x: Tensor) -> None:
    """Raise if a weight or bias does not have one number for each column of x."""
    check_floating(op, name, parameter)
    if parameter.shape != x.shape[-1:]:
        raise misfit(op, f"{name} ({x.shape[-1]},)", **{name: parameter, x_name: x})


def check_residual(op: str, x: Tensor, residual: Tensor) -> None:
    """Raise if the residual differs from x in shape: a kernel would read out of bounds."""
    if residual.dtype not in FLOATING:
        check_floating(op, "residual", residual)
    if x.shape != residual.shape:
        raise misfit(op, "the same shape", x=x, residual=residual)


def check_rms_norm(
    op: str,
    x: Tensor,
    weight: Tensor,
    casting_mode: str,
    x_name: str = "x",
    weight_name: str = "weight",
) -> None:
    """Raise if the weight does not fit x or casting_mode is unknown."""
    # One condition takes less time than a call for each.
    fits = x.dtype in FLOATING and weight.dtype in FLOATING and weight.shape == x.shape[-1:]
    if not fits or not weight.dim():
        check_rows(op, x_name, x)
        check_row_parameter(op, weight_name, weight, x_name, x)
    if casting_mode not in CASTING_MODES:
        raise misfit(op, f"one of {CASTING_MODES}", casting_mode=casting_mode)


def check_output_gate(
    op: str,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    activation: str,
    weight_name: str = "weight",
) -> None:
    """Raise if the gate of a layer's heads or the weight of their norm does not fit them."""
    check_floating(op, "x", x)
    check_floating(op, "gate", gate)
    if x.dim() != 4 or gate.shape != x.shape:
        raise misfit(op, "(batch, seq, heads, head_dim) twice", x=x, gate=gate)
    if weight is not None:
        check_row_parameter(op, weight_name, weight, "x", x)
    if activation not in ("sigmoid", "silu"):
        raise misfit(op, "'sigmoid' or 'silu'", activation=activation)


def check_glu(op: str, gate_up: Tensor, activation: str) -> None:
    """Raise if the last dimension of gate_up is not even or the activation is unknown."""
    check_floating(op, "gate_up", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise misfit(op, "(..., 2 * intermediate)", gate_up=gate_up)
    check_activation(op, activation)


def check_routing(op: str, experts: int, top_k: int, score: str, scale: float) -> float:
    """Return scale as a float; raise if an option of `routing` is wrong."""
    if check_count(op, "top_k", top_k, 1) > experts:
        raise misfit(op, f"at most the {experts} experts", top_k=top_k)
    if score not in ("softmax", "sigmoid"):
        raise misfit(op, "'softmax' or 'sigmoid'", score=score)
    return check_number(op, "scale", scale, above=True)


def check_groups(op: str, experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    """Raise if experts cannot be chosen from so many groups."""
    kept = check_count(op, "topk_group", topk_group, 1)
    if experts % check_count(op, "n_group", n_group, 1) or kept > n_group:
        expected = f"groups of equal size of {experts} experts, and topk_group of at most n_group"
        raise misfit(op, expected, n_group=n_group, topk_group=kept)
    if top_k > experts // n_group * kept:
        expected = f"at most the {experts // n_group * kept} experts of {kept} of {n_group} groups"
        raise misfit(op, expected, top_k=top_k)


def check_expert_mlp(
    op: str,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str | ClampedSwiGLU,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    """Raise if the tensors of a mixture of experts do not fit each other.

    Raises:
        ValueError: a shape, a dtype or the activation is wrong.
        IndexError: there is no expert of a number, on a CPU in eager mode.
    """
    check_floating(op, "x", x)
    check_floating(op, "weights", weights)
    operands = {"x": x, "gate_up_weight": gate_up, "down_weight": down}
    fits = down.dim() == 3 and x.dim() > 0 and x.shape[-1] == down.shape[1]
    if not fits or gate_up.shape != (len(down), 2 * down.shape[2], down.shape[1]):
        expected = "(..., hidden), (experts, 2 * inner, hidden) and (experts, hidden, inner)"
        raise misfit(op, expected, **operands)
    if not x.dtype == gate_up.dtype == down.dtype:
        raise misfit(op, "one dtype", **operands)
    if experts.dtype not in (torch.int32, torch.int64):
        raise misfit(op, "torch.int32 or torch.int64", experts=experts)
    check_experts(op, experts, len(down))
    if weights.shape != experts.shape or weights.shape[:-1] != x.shape[:-1] or not weights.dim():
        raise misfit(
            op, f"{(*x.shape[:-1], 'top_k')} for both", weights=weights, experts=experts, x=x
        )
    count, hidden, inner = down.shape
    for name, bias, width in (
        ("gate_up_bias", gate_up_bias, 2 * inner),
        ("down_bias", down_bias, hidden),
    ):
        if bias is not None and (bias.shape != (count, width) or bias.dtype != x.dtype):
            raise misfit(op, f"{name} {(count, width)} {x.dtype}", **{name: bias}, **operands)
    check_expert_activation(op, activation)


def check_experts(op: str, experts: Tensor, count: int) -> None:
    """Raise IndexError if there is no expert of a number, on a CPU in eager mode."""
    if experts.is_cpu and type(experts) is Tensor and not torch.compiler.is_compiling():
        outside = experts[(experts < 0) | (experts >= count)]
        if outside.numel():
            raise IndexError(f"{op}: expert {int(outside[0])} is none of {count} experts")


def check_gated_delta(op: str, tensors: tuple[Tensor, ...]) -> None:
    """Raise if the tensors of the gated delta rule do not fit each other."""
    q, k, v, g, beta = tensors
    for name, tensor in zip(DeltaRule._fields, tensors, strict=False):
        check_floating(op, name, tensor)
    fits = q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[:2] == v.shape[:2]
    fits = fits and g.shape == beta.shape == v.shape[:3] and q.dtype == k.dtype == v.dtype
    if not fits or 0 in q.shape[2:] or v.shape[2] % q.shape[2]:
        expected = (
            "(batch, seq, key heads, dk) twice and (batch, seq, value heads, dv), with a multiple "
            "of the key heads, of one dtype, and (batch, seq, value heads) twice"
        )
        raise misfit(op, expected, q=q, k=k, v=v, g=g, beta=beta)


def check_documents(
    op: str, x: Tensor, cu_seqlens: Tensor | None, state: Tensor | None, sizes: tuple[int, ...]
) -> None:
    """Raise if documents do not fill x (batch, seq, ...), or a state does not fit them.

    The values of cu_seqlens are looked at only on a CPU in eager mode: a GPU would have to wait.

    Args: sizes: the shape of the state of a document.
    """
    documents, tokens = len(x), x.shape[0] * x.shape[1]
    if cu_seqlens is not None:
        fits = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)
        fits = fits and cu_seqlens.dim() == 1 and cu_seqlens.device == x.device
        if fits and type(cu_seqlens) is Tensor and x.is_cpu and not torch.compiler.is_compiling():
            ends = cu_seqlens.tolist()
            fits = ends == sorted(ends) and [*ends[:1], *ends[-1:]] == [0, tokens]
        if not fits:
            expected = f"(documents + 1,) int32 or int64 on {x.device}, rising from 0 to {tokens}"
            raise misfit(op, f"{expected}, the tokens of all rows", cu_seqlens=cu_seqlens)
        documents = len(cu_seqlens) - 1
    if state is not None:
        check_floating(op, "initial_state", state)
        if state.shape != (documents, *sizes) or state.device != x.device:
            raise misfit(op, f"{(documents, *sizes)} on {x.device}", initial_state=state)


def check_activation(op: str, activation: str) -> None:
    """Raise if no gated MLP has this activation."""
    if activation not in ACTIVATIONS:
        raise misfit(op, f"one of {ACTIVATIONS}", activation=activation)


def check_expert_activation(op: str, activation: str | ClampedSwiGLU) -> None:
    """Raise if no MLP of an expert has this activation, or a number of it is not positive."""
    if isinstance(activation, ClampedSwiGLU):
        check_number(op, "activation.alpha", activation.alpha, above=True)
        check_number(op, "activation.limit", activation.limit, above=True)
    else:
        check_activation(op, activation)


def check_rope(
    op: str, shape: torch.Size, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[int, int]:
    """Return both numbers of heads as ints.

    Raise if there is no query head or a negative number of key heads, if packed rows of `shape` do
    not hold these heads, if the angles are more than half of a head's elements, or if cos or sin
    does not fit the rows.
    """
    # Check each number, not only the sum, because a kernel writes each kind of head by its number.
    num_heads = check_count(op, "num_heads", num_heads, 1)
    num_kv_heads = check_count(op, "num_kv_heads", num_kv_heads, 0)
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.dtype not in FLOATING:
            check_floating(op, name, angles)
    fits = (
        len(shape) == cos.ndim == 3 and cos.shape[0] in (1, shape[0]) and cos.shape[1] == shape[1]
    )
    if not fits or sin.shape != cos.shape:
        expected = "(batch, seq, columns) and (batch or 1, seq, rotated / 2) twice"
        raise misfit(op, expected, packed_rows=tuple(shape), cos=cos, sin=sin)
    heads = num_heads + 2 * num_kv_heads
    columns = shape[2]
    head_dim = columns // heads  # torch.jit.trace counts in tensors, which have no divmod
    if columns % heads or not head_dim:
        raise ValueError(
            f"{op}: packed rows have {columns} columns; expected a multiple of {heads}: "
            f"{num_heads} query heads + 2 * {num_kv_heads} key/value heads"
        )
    if 2 * cos.shape[-1] > head_dim:
        expected = f"at most {head_dim // 2} angles of heads of {head_dim} ({columns} / {heads})"
        raise misfit(op, expected, cos=cos)
    return num_heads, num_kv_heads


def check_linear_weight(op: str, x_name: str, x: Tensor, width: int, weight: Tensor) -> None:
    """Raise if a linear's weight does not have `width` columns. The message names x."""
    check_floating(op, "weight", weight)
    if weight.dim() != 2 or weight.shape[1] != width:
        raise misfit(op, f"weight (out, {width})", **{"weight": weight, x_name: x})


def check_linear_bias(op: str, weight: Tensor, bias: Tensor) -> None:
    """Raise if a linear's bias does not fit the weight in length and dtype."""
    if bias.shape != weight.shape[:1] or bias.dtype != weight.dtype:
        raise misfit(op, f"bias ({len(weight)},) {weight.dtype}", bias=bias, weight=weight)
