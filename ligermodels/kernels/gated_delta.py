"""The gated delta rule: a linear attention whose state forgets and is corrected."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import DeltaInputs, DeltaRule, check_documents, check_gated_delta
from ligermodels.kernels.dispatch import (
    apply,
    autocast_dtype,
    compute_dtype,
    refuse_double_backward,
    select,
    without_autocast,
)

_OP = "gated_delta"


class DeltaFunction(torch.autograd.Function):
    """The rule of the tensors of `DeltaRule`, or with `sizes` of what `gated_delta_layer` makes.

    Args: sizes: key_heads and key_dim. Then the tensors are those of `DeltaInputs`, and the state.
    """

    @staticmethod
    def forward(
        ctx: Any, op: str, scale: float, sizes: tuple[int, int] | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.ops = select("gated_delta_inputs", tensors[0]), select("gated_delta", tensors[0])
        ctx.options = op, scale, sizes
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        rule = _rule(ctx.ops[0], sizes, tensors)
        return ctx.ops[1].gated_delta_forward(rule, scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (op, scale, sizes), tensors = ctx.options, ctx.saved_tensors
        refuse_double_backward(op)
        rule = _rule(ctx.ops[0], sizes, tensors)
        grad_out = torch.zeros_like(rule.v) if grad_out is None else grad_out
        with without_autocast(grad_out):
            *grads, initial = ctx.ops[1].gated_delta_backward(rule, scale, grad_out, grad_final)
            del rule
            if sizes is not None:
                inputs = DeltaInputs(*tensors[:-1])
                grads = ctx.ops[0].gated_delta_inputs_backward(inputs, grads)
        return None, None, None, *grads, None, initial if ctx.needs_input_grad[-1] else None


def _rule(ops: Any, sizes: tuple[int, int] | None, tensors: Sequence[Tensor]) -> DeltaRule:
    """Return what the rule reads, which backward computes again."""
    if sizes is not None:
        made = ops.gated_delta_inputs_forward(DeltaInputs(*tensors[:-1]), *sizes)
        tensors = *made, *tensors[-2:]
    return DeltaRule(*tensors)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the gated delta rule, and the state after each document.

    The state S of a head, (dk, dv), is zero at the start of a document. Each token computes
    S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = scale S^T q.

    Backward keeps the inputs alone, and computes the states again. Both compute in chunks of 64
    tokens. Sums are float32, and so is what the tokens of a chunk give to each other; states are
    float32, rounded to the dtype of q where a product reads them.

    Args:
        q, k: (batch, seq, key heads, dk). The rule is stable if each k has a length of at most 1.
        v: (batch, seq, value heads, dv), in q's dtype. Under autocast, all three are cast. Value
            head h reads key head h // (value heads / key heads).
        g, beta: (batch, seq, value heads) floating point, the logarithm of the decay, finite and at
            most 0, and the strength of the correction, from 0 to 1.
        cu_seqlens: (documents + 1,) int32 or int64, where each document begins in all rows joined,
            and their end. By default each row is a document. Some may be empty.
        initial_state: (documents, value heads, dk, dv), the state before each document.
        scale: by default dk^-0.5.
    Returns: (batch, seq, value heads, dv) in q's dtype, and (documents, value heads, dk, dv) in
        float32 (float64 for float64 inputs).
    Raises: ValueError if shapes or dtypes do not fit, or dk is more than 128 in the Triton kernels.
    Source: arXiv:2412.06464.
    """
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    tensors = q, k, v, g, beta
    check_gated_delta(_OP, tensors)
    check_documents(_OP, q, cu_seqlens, initial_state, (v.shape[2], q.shape[3], v.shape[3]))
    starts = row_starts(q, cu_seqlens)
    if initial_state is not None:
        initial_state = initial_state.to(compute_dtype(q))
    rows = [x.flatten(0, 1) for x in tensors]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        out, state = apply(DeltaFunction, _OP, scale, None, *rows, starts, initial_state)
    return out.view(v.shape), state


def row_starts(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return where each document begins, by default each row of x (batch, seq, ...), and the end.

    It is in int32, and counts the tokens of all rows joined.
    """
    if cu_seqlens is not None:
        return cu_seqlens.int()
    return torch.arange(x.shape[0] + 1, device=x.device, dtype=torch.int32) * x.shape[1]
