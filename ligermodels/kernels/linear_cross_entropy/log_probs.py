"""Log-probabilities and entropy of tokens under a linear head, without the logits of all of them.

The primitive of preference and policy losses: both are differentiable for any upstream gradient.
Backward computes the logits again, chunk by chunk (four matrix products in all).
"""

from torch import Tensor

from ligermodels.kernels.cross_entropy import check_options
from ligermodels.kernels.linear_cross_entropy.functions import prepare
from ligermodels.kernels.loss_options import CrossEntropyOptions


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    entropy: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_size: int | None = None,
    max_scratch_bytes: int | None = None,
    skip_ignored: bool = False,
    max_valid: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p at each target and the entropy of p = softmax(t), both differentiable.

    t = softcap(logit_scale * (hidden weight^T + bias)). d log p_y / d t_j = [j = y] - p_j, and with
    H = -sum p_j log p_j, the entropy in nats, d H / d t_j = -p_j (log p_j + H). A class at
    -infinity has probability 0 and adds nothing to either.

    Args:
        hidden: (..., in), float.
        weight: (vocab, in), hidden's dtype (autocast casts both).
        targets: (...) int64, aligned with hidden: no shift here.
        bias: (vocab).
        entropy: whether to give it.
        logit_scale: as in `linear_cross_entropy`; one over a sampling temperature.
        ignore_index, softcap, chunk_size, max_scratch_bytes, skip_ignored, max_valid: as in
            `linear_cross_entropy`.
    Returns: log-probabilities (...) and entropy (...) or None, float32 (float64 for float64
        inputs), both differentiable, 0 where the target is ignored.
    Raises:
        ValueError: shapes, dtypes or options that do not fit, a budget too small.
        RuntimeError: skip_ignored without max_valid under torch.compile or graph capture.
        IndexError: a target outside the vocabulary, on CPU in eager mode; on a GPU that row is NaN.
    """
    options = CrossEntropyOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)
    check_options(options, skip_ignored=skip_ignored, entropy=entropy)
    call = prepare(
        hidden,
        weight,
        targets,
        bias,
        None,
        options,
        chunk_size=chunk_size,
        max_scratch_bytes=max_scratch_bytes,
        skip_ignored=skip_ignored,
        max_valid=max_valid,
        gradients_in_forward=False,
        with_stats=entropy,
    )
    out = call.token_outputs()
    if out.log_probs is None:
        # Without smoothing and z-loss the loss is -log p; 0 - x leaves no -0 where it is ignored.
        return 0.0 - out.loss, None
    return out.log_probs, out.entropy
