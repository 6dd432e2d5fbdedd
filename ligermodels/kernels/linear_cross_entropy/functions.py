"""The loss of a linear head: no more logits exist at once than a byte budget holds. Start here.

A call checks its options and tensors, gathers the rows that count, makes a chunk plan, chooses a
strategy and scatters what the strategy says of each token. The rest of the package, in the order of
a call: valid_rows.py gathers and scatters; chunk_plan.py cuts the work to its budget; strategies.py
has one autograd Function for each way to come by the gradients; loops.py does the work.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ligermodels.kernels.autocast import cast_operands, without_autocast
from ligermodels.kernels.checks import check_floating, check_linear_bias
from ligermodels.kernels.cross_entropy import CrossEntropyOutput, check_targets, reduce_tokens
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.linear_cross_entropy import chunk_plan
from ligermodels.kernels.linear_cross_entropy.loops import Head, LossArgs, NeedsGrad
from ligermodels.kernels.linear_cross_entropy.strategies import (
    GradsInForward,
    HiddenGradInForward,
    LogitsGradInForward,
    RecomputeInBackward,
)
from ligermodels.kernels.linear_cross_entropy.valid_rows import gather_targets, scatter, valid_rows
from ligermodels.kernels.loss_options import (
    ChunkOptions,
    CrossEntropyOptions,
    check_chunk_options,
    check_options,
    loss_divisor,
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weights: Tensor | None = None,
    chunk_size: int | None = None,
    max_scratch_bytes: int | None = None,
    skip_ignored: bool = False,
    max_valid: int | None = None,
    return_token_stats: bool = False,
) -> CrossEntropyOutput:
    """Cross entropy of softcap(logit_scale * (hidden weight^T + bias)) within a scratch budget.

    softcap(x) = c tanh(x / c) (Gemma 2). Label smoothing and class weights follow
    `torch.nn.functional.cross_entropy`. The z-loss, z * logsumexp(logits)^2 for each token (PaLM,
    arXiv:2204.02311), is part of the loss.

    Args:
        hidden: (..., in), float.
        weight: (vocab, in), hidden's dtype (autocast casts both).
        targets: (...) int64, aligned with hidden: nothing is shifted here.
        bias: (vocab), weight's dtype.
        reduction: "mean" divides the sum by the normalizer, "sum" by nothing, "none" gives a loss
            for each token, 0 where the target is ignored.
        normalizer: a number >= 0 (0 counts as 1) or a 0-d tensor for "mean". By default it is the
            exact number of valid targets, or with class weights the sum of theirs. It is not
            differentiated.
        ignore_index: the target that counts for nothing.
        class_weights: (vocab), not differentiated.
        chunk_size: rows of logits at a time; it overrides the budget.
        max_scratch_bytes: most memory to hold beyond inputs, outputs and gradients. The least is a
            row of logits and 64 bytes for each token (64 more for return_token_stats, and 64 more
            for skip_ignored). Where the budget does not hold a float32 sum of the weight gradient
            (vocab * in * 4 bytes) and enough rows, that gradient costs one more product; where it
            does not hold twice the hidden gradient, which forward would save for backward, the
            hidden gradient costs one more, too. By default it is that sum and 2^30 bytes of logits,
            or all logits where they take at most twice the sum, and the gradients that forward
            saves. A copy of a sliced hidden counts; what autocast casts does not, nor what autograd
            copies for a transposed leaf. On a CPU plain PyTorch makes several wide copies of a row
            of logits, which count, too.
        skip_ignored: whether to leave the rows whose target is ignored out of the matrix products.
            Finding them costs one host synchronisation, and is refused under torch.compile and
            graph capture, unless max_valid is given.
        max_valid: for skip_ignored, an upper bound on the number of targets that are not ignored,
            known on the host; products are made for as many rows. Too small a bound is an error on
            CPU in eager mode; elsewhere the loss is NaN.
        return_token_stats: whether to give the log-probability, entropy and correctness of each
            token as well.
    Returns: `CrossEntropyOutput`. With "mean" and "sum" only the loss is differentiable; with
        "none" the log-probabilities and the entropy are as well. Where all targets are ignored, the
        loss is 0 and the gradients are zero. The weight gradient is accumulated in float32.
    Raises:
        ValueError: shapes, dtypes or options that do not fit, a budget too small.
        RuntimeError: skip_ignored without max_valid under torch.compile or graph capture.
        IndexError: a target outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_options(options, reduction, normalizer, return_token_stats=return_token_stats)
    chunking = check_chunk_options(chunk_size, max_scratch_bytes, skip_ignored, max_valid)
    one_loss = reduction != "none"
    head = _head(
        hidden,
        weight,
        targets,
        bias,
        class_weights,
        options,
        chunking,
        return_token_stats,
        one_loss,
    )
    if not one_loss:
        # The gradients of each token's loss are unknown until backward.
        return _token_outputs(head, targets)
    dtype = compute_dtype(head.hidden)
    divisor = loss_divisor(targets, reduction, normalizer, class_weights, ignore_index, dtype)
    if chunking.max_valid is not None:
        too_many = (targets != ignore_index).sum() > min(chunking.max_valid, targets.numel())
        divisor = torch.where(too_many, float("nan"), divisor)

    rows, plan = len(head.args.targets), head.args.plan
    if not plan.grads_in_forward:
        # There is no room to save gradients between the passes.
        return reduce_tokens(_token_outputs(head, targets), divisor)
    strategy: type[torch.autograd.Function] = GradsInForward
    if plan.vocab_block is not None:
        # There is no room for a float32 sum of the weight gradient over chunks of tokens.
        strategy = HiddenGradInForward
    elif _few_rows(rows, head.weight, head.args.needs_grad) and rows <= plan.chunk_size:
        # All logits fit in one chunk and are smaller than a weight gradient to save and scale.
        strategy = LogitsGradInForward
    with without_autocast(head.hidden):
        loss, z, *tokens = strategy.apply(*head[:3], head.args._replace(divisor=divisor))
    return CrossEntropyOutput(loss, z, *_scattered(tokens, head, targets))


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

    These are what preference and policy losses are made of. Backward computes the logits again,
    chunk by chunk: four matrix products in all.

    t = softcap(logit_scale * (hidden weight^T + bias)). d log p_y / d t_j = [j = y] - p_j, and with
    H = -sum p_j log p_j, the entropy in nats, d H / d t_j = -p_j (log p_j + H). A class at
    -infinity has probability 0 and adds nothing to either.

    Args:
        hidden: (..., in), float.
        weight: (vocab, in), hidden's dtype (autocast casts both).
        targets: (...) int64, aligned with hidden: nothing is shifted here.
        bias: (vocab), weight's dtype.
        entropy: whether to give the entropy, too.
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
    check_options(options, entropy=entropy)
    chunking = check_chunk_options(chunk_size, max_scratch_bytes, skip_ignored, max_valid)
    head = _head(hidden, weight, targets, bias, None, options, chunking, entropy, False)
    out = _token_outputs(head, targets)
    if out.log_probs is None:
        # Without smoothing and z-loss the loss is -log p; 0 - x leaves no -0 where it is ignored.
        return 0.0 - out.loss, None
    return out.log_probs, out.entropy


def _token_outputs(head: Head, targets: Tensor) -> CrossEntropyOutput:
    """Everything of each token, differentiable for any gradients with respect to it."""
    with without_autocast(head.hidden):
        tokens = RecomputeInBackward.apply(*head)
        loss, z_loss, *stats = _scattered(tokens, head, targets)
    return CrossEntropyOutput(loss, z_loss, loss, *stats)


def _scattered(rows: Iterable[Tensor], head: Head, targets: Tensor) -> list[Tensor]:
    """Values of each row, in the shape of the targets."""
    index, ignore_index = head.args.row_index, head.args.options.ignore_index
    return [scatter(x, index, targets, ignore_index) for x in rows]


def _head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None,
    options: CrossEntropyOptions,
    chunking: ChunkOptions,
    with_stats: bool,
    one_loss: bool,
) -> Head:
    """The head and its rows, checked, cast, and with a chunk plan.

    Args: as in `linear_cross_entropy`, options and chunking checked; with_stats, whether
        log-probabilities, entropy and correctness are asked for; one_loss, whether forward may make
        gradients and save them for backward.
    Raises: as there.
    """
    hidden, weight, bias = _checked(
        hidden, weight, targets, bias, class_weights, options.ignore_index
    )
    grad = torch.is_grad_enabled()
    needs_grad = NeedsGrad(
        hidden=grad and hidden.requires_grad,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )
    row_targets = targets.flatten()
    index = valid_rows(row_targets, options.ignore_index, chunking)
    row_targets = gather_targets(row_targets, index, options.ignore_index)
    rows = len(row_targets)
    if chunking.chunk_size is not None:
        plan = chunk_plan.ChunkPlan(chunking.chunk_size)
    else:
        skip = chunking.skip_ignored
        sizes = _sizes(
            hidden, weight, targets.numel(), rows, needs_grad, skip, with_stats, one_loss
        )
        plan = chunk_plan.plan_chunks(sizes, chunking.max_scratch_bytes)
    if torch.compiler.is_compiling():
        # A last chunk of one row makes the length a constant. torch 2.11 traces that only where
        # it shows before the Function whose outputs have the length.
        last = chunk_plan.chunks(rows, plan.chunk_size)[-1]
        if last.stop - last.start == 1:
            pass  # to ask is enough
    args = LossArgs(row_targets, index, class_weights, None, options, plan, needs_grad, with_stats)
    return Head(hidden.reshape(-1, weight.shape[1]), weight, bias, args)


def _checked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden, weight and bias, which fit each other and the targets, as autocast casts them."""
    if hidden.dim() == 0 or weight.dim() != 2:
        raise ValueError(
            f"loss head: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}; expected "
            "(..., in) and (vocab, in)"
        )
    vocab, width = weight.shape
    if hidden.shape[-1] != width or width == 0:
        raise ValueError(
            f"loss head: hidden {tuple(hidden.shape)} and weight "
            f"{tuple(weight.shape)}; expected the same last dimension, of 1 or more"
        )
    shape = hidden.shape[:-1]
    check_targets(targets, shape, vocab, class_weights, ignore_index, hidden.device)
    check_floating("loss head", "hidden", hidden)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.device != hidden.device:
            raise ValueError(
                f"loss head: {name} is on {parameter.device}, hidden on {hidden.device}; move one"
            )
    weight, bias = cast_operands(hidden, weight, bias)
    hidden, _ = cast_operands(hidden, hidden, None)
    if hidden.dtype != weight.dtype:
        # Autocast leaves float64 alone.
        way = "" if torch.float64 in (hidden.dtype, weight.dtype) else ", or run under autocast"
        raise ValueError(
            f"loss head: hidden is {hidden.dtype} and weight {weight.dtype}; cast one{way}"
        )
    if bias is not None:
        check_linear_bias("loss head", weight, bias)
    return hidden, weight, bias


def _few_rows(rows: int, weight: Tensor, needs_grad: NeedsGrad) -> bool:
    """Whether the logits of all rows, and their hidden states, take no more than the weight.

    Forward then saves those for backward, and no gradient of the weight.
    """
    vocab, width = weight.shape
    return needs_grad.weight and rows <= min(width, vocab)


def _sizes(
    hidden: Tensor,
    weight: Tensor,
    tokens: int,
    rows: int,
    needs_grad: NeedsGrad,
    skip_ignored: bool,
    with_stats: bool,
    one_loss: bool,
) -> chunk_plan.Sizes:
    """What the head takes of each kind of memory, for `rows` of its `tokens`."""
    vocab, width = weight.shape
    narrow, wide = hidden.element_size(), compute_dtype(hidden).itemsize
    copies = chunk_plan.wide_copies(hidden, with_stats)
    saved_weight = single_chunk = 0
    if needs_grad.weight and hidden.dtype == torch.float16:
        single_chunk = vocab * width * wide  # its weight gradient comes in float32
    elif one_loss and _few_rows(rows, weight, needs_grad):
        single_chunk = rows * width * narrow  # the rows, scaled
    elif one_loss and needs_grad.weight:
        saved_weight = vocab * width * narrow
    # What forward makes is saved until backward hands out scaled copies, with a row to spare for
    # padding. (Not hidden.nbytes: torch.compile has none for a number of rows that is a symbol.)
    saved_hidden = (hidden.numel() + width) * narrow if one_loss and needs_grad.hidden else 0
    return chunk_plan.Sizes(
        rows,
        vocab,
        logit_bytes=narrow + wide * copies,
        hidden_bytes=(width * narrow if skip_ignored else 0) + (width * wide if copies else 0),
        accumulator_bytes=vocab * width * wide if needs_grad.weight else 0,
        single_chunk_bytes=single_chunk,
        saved_weight_bytes=saved_weight,
        saved_hidden_bytes=saved_hidden,
        fixed_bytes=chunk_plan.TOKEN_BYTES * tokens * (1 + with_stats + skip_ignored)
        + (3 * wide * vocab if needs_grad.bias else 0)
        + (0 if hidden.is_contiguous() else hidden.numel() * narrow),
    )
