"""The last step of a mean loss: sum the losses of all rows and divide, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, launch

MEAN_LOSS = Launches(nvidia=((None, Launch(4096, 8)),), amd=((None, Launch(4096, 8)),))


@triton.jit
def mean_loss_kernel(
    loss_ptr,
    z_loss_ptr,
    targets_ptr,
    class_weights_ptr,
    divisor_ptr,
    mean_ptr,
    z_mean_ptr,
    rows,
    vocab,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """A single program adds all losses, so the order of addition is fixed.

    With targets, it computes and writes the divisor, the sum of their weights. Without targets, it
    reads the divisor.
    """
    loss_sum = tl.zeros((BLOCK,), tl.float32)
    z_sum = tl.zeros((BLOCK,), tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < rows
        loss_sum += tl.load(loss_ptr + row, mask=mask, other=0.0)
        z_sum += tl.load(z_loss_ptr + row, mask=mask, other=0.0)
        if targets_ptr is not None:
            target = tl.load(targets_ptr + row, mask=mask, other=ignore_index)
            valid = target != ignore_index
            if class_weights_ptr is not None:
                valid &= (target >= 0) & (target < vocab)
                weight = tl.load(class_weights_ptr + target, mask=valid, other=0.0)
                weight_sum += weight.to(tl.float32)
            else:
                weight_sum += tl.where(valid, 1.0, 0.0)
    if targets_ptr is not None:
        # If all targets are ignored, the loss is 0 / 1.
        divisor = tl.sum(weight_sum)
        divisor = tl.where(divisor == 0.0, 1.0, divisor)
        tl.store(divisor_ptr, divisor)
    else:
        divisor = tl.load(divisor_ptr)
    # div_rn rounds to nearest; the error of / may be two units in the last place.
    tl.store(mean_ptr, tl.div_rn(tl.sum(loss_sum), divisor))
    tl.store(z_mean_ptr, tl.div_rn(tl.sum(z_sum), divisor))


def mean_loss(
    loss: Tensor,
    z_loss: Tensor,
    divisor: Tensor | None,
    targets: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for `reference.mean_loss`."""
    # Two tensors, because autograd forbids in-place changes of views that a Function returns.
    mean, z_mean = loss.new_empty(()), loss.new_empty(())
    if divisor is None:
        assert targets is not None
        targets, divisor = targets.contiguous(), loss.new_empty(())
    else:
        targets = class_weights = None
    setting = launch(MEAN_LOSS, len(loss))
    mean_loss_kernel[(1,)](
        loss,
        z_loss,
        targets,
        None if class_weights is None else class_weights.contiguous(),
        divisor,
        mean,
        z_mean,
        len(loss),
        0 if class_weights is None else len(class_weights),
        ignore_index,
        BLOCK=setting.block,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return mean, z_mean, divisor
