"""Plain PyTorch: the gate on a layer's heads, with their RMS norm or without."""

from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype


def _parts(
    x: Tensor, gate: Tensor, weight: Tensor | None, activation: str, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return x, normalised if there is a weight, 1 / rms or None, act(gate) and its derivative."""
    dtype = compute_dtype(x)
    x, gate = cast(x, dtype), cast(gate, dtype)
    rstd = None if weight is None else (x * x).mean(-1, keepdim=True).add(eps).rsqrt()
    share = gate.sigmoid()
    slope = share * (1 - share)
    if activation == "silu":
        share, slope = gate * share, share + gate * slope
    return x if rstd is None else x * rstd, rstd, share, slope


def output_gate_forward(
    x: Tensor, gate: Tensor, weight: Tensor | None, activation: str, eps: float
) -> Tensor:
    """Return x * act(gate), or rms_norm(x) * act(gate) if there is a weight (head_dim).

    Args: x, gate: (batch, seq, heads, head_dim); activation: "silu" or "sigmoid".
    """
    normed, _, share, _ = _parts(x, gate, weight, activation, eps)
    y = normed * share
    return cast(y if weight is None else y * cast(weight, y.dtype), x.dtype)


def output_gate_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    activation: str,
    eps: float,
    recompute_output: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, gate and weight, and the output computed again, or None.

    The output may take the memory of grad.
    """
    normed, rstd, share, slope = _parts(x, gate, weight, activation, eps)
    wide, scaled, grad_weight = cast(grad, normed.dtype), normed, None
    grad_x = wide * share
    if weight is not None and rstd is not None:
        factor = cast(weight, normed.dtype)
        scaled = normed * factor
        grad_weight = cast((grad_x * normed).sum_to_size(weight.shape), weight.dtype)
        grad_x = grad_x * factor
        grad_x = rstd * (grad_x - normed * (grad_x * normed).mean(-1, keepdim=True))
    y = cast(scaled * share, grad.dtype) if recompute_output else None
    return cast(grad_x, x.dtype), cast(wide * scaled * slope, gate.dtype), grad_weight, y
