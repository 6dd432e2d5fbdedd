"""Plain PyTorch: the gated delta rule of a layer, token by token, with its convolution and norm."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import DeltaInputs
from ligermodels.kernels.dispatch import cast
from ligermodels.kernels.reference.gated_delta_inputs import gated_delta_inputs_forward
from ligermodels.kernels.reference.output_gate import output_gate_forward


def gated_delta_decode_forward(
    projected: Tensor,
    weights: tuple[Tensor, ...],
    state: tuple[Tensor, Tensor],
    key_heads: int,
    key_dim: int,
    eps: float,
) -> Tensor:
    """Return (batch, seq, heads * dv), and write the state after the tokens into `state`.

    The arguments are those of `kernels.gated_delta_decode`.
    """
    (*weights_of_inputs, norm_weight), (rows, memory) = weights, state
    (batch, seq), (past, channels), heads = projected.shape[:2], rows.shape[1:], memory.shape[1]
    widths = channels, heads * memory.shape[3], heads, heads
    qkv, z, b, a = projected.split(widths, -1)
    joined = torch.cat((rows, qkv), 1)
    rows.copy_(joined[:, seq:])
    b, a = (torch.cat((x.new_zeros(batch, past, heads), x), 1).flatten(0, 1) for x in (b, a))
    starts = torch.arange(batch + 1, device=qkv.device) * (past + seq)
    inputs = DeltaInputs(joined.flatten(0, 1), b, a, *(*weights_of_inputs, starts))
    made = gated_delta_inputs_forward(inputs, key_heads, key_dim)
    wide = (cast(x, memory.dtype).unflatten(0, (batch, -1))[:, past:] for x in made)
    q, k, v, g, beta = wide
    q, k = (x.repeat_interleave(heads // key_heads, 2) for x in (q, k))
    outs = []
    for i in range(seq):
        memory.mul_(g[:, i].exp()[..., None, None])
        old = (k[:, i, :, None] @ memory)[..., 0, :]
        change = beta[:, i, :, None] * (v[:, i] - old)
        memory.add_(k[:, i, :, :, None] * change[..., None, :])
        outs.append((q[:, i, :, None] @ memory)[..., 0, :] * key_dim**-0.5)
    out = cast(torch.stack(outs, 1), qkv.dtype)
    return output_gate_forward(out, z.view_as(out), norm_weight, "silu", eps).flatten(2)
