"""The loss of a linear head, computed in chunks of logits that fit a byte budget. Start here.

A call checks its options and tensors, gathers the rows that count, makes a chunk plan, runs a
strategy and scatters the values of each row back to the targets' shape. The other modules, in the
order of a call: valid_rows.py gathers and scatters rows; chunk_plan.py splits the work to fit the
budget; strategies.py has one autograd Function for each way to compute the gradients; loops.py
computes losses and gradients chunk by chunk.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from ligermodels.kernels.autocast import cast_operands, without_autocast
from ligermodels.kernels.checks import check_floating, check_linear_bias
from ligermodels.kernels.cross_entropy import (
    CrossEntropyOutput,
    check_request,
    check_targets,
    checked_token_weights,
    reduce_tokens,
    token_output,
)
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.linear_cross_entropy import chunk_plan
from ligermodels.kernels.linear_cross_entropy.loops import Head, LossArgs, NeedsGrad
from ligermodels.kernels.linear_cross_entropy.strategies import (
    GradsInForward,
    HiddenGradInForward,
    LogitsGradInForward,
    RecomputeInBackward,
)
from ligermodels.kernels.linear_cross_entropy.valid_rows import (
    gather,
    gather_targets,
    scatter,
    valid_rows,
)
from ligermodels.kernels.linear_cross_entropy.vocab_shard import (
    SumGradient,
    VocabShard,
    wide_copies,
)
from ligermodels.kernels.loss_options import (
    LossOptions,
    TokenRequest,
    check_switches,
    loss_divisor,
)
from ligermodels.kernels.simulation import real_device


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
    temperature: float = 1.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    chunk_size: int | None = None,
    max_scratch_bytes: int | None = None,
    skip_ignored: bool = False,
    max_valid: int | None = None,
    weight_grad_in_forward: bool = False,
    return_token_stats: bool | Collection[str] = False,
    alternatives: Tensor | None = None,
    top_k: int = 0,
    vocab_shard: VocabShard | None = None,
) -> CrossEntropyOutput:
    """Compute the cross entropy of a linear head within a memory budget.

    The logits are softcap(logit_scale * (hidden weight^T + bias)), with softcap(x) = c tanh(x / c)
    as in Gemma 2. Label smoothing and class weights follow `torch.nn.functional.cross_entropy`. The
    loss includes the z-loss, z * logsumexp(logits)^2 for each token (PaLM, arXiv:2204.02311).

    Args:
        hidden: (..., in), floating point.
        weight: (vocab, in), in hidden's dtype (autocast casts both).
        targets: (...) int64. targets[i] is the class of hidden[i]: this function shifts nothing.
        bias: (vocab), in weight's dtype.
        reduction: "mean" divides the summed loss by the normalizer, "sum" does not divide it, and
            "none" returns the loss of each token, which is 0 if the target is ignored.
        normalizer: a number >= 0 (0 counts as 1) or a 0-d tensor, only for "mean". By default it is
            the number of targets that are not ignored, or the sum of their class weights. It gets
            no gradient.
        ignore_index: the target of tokens that do not count in the loss or the gradients.
        temperature: divides the logits, after the softcap.
        class_weights: (vocab). They get no gradient.
        token_weights: (...) factors of the loss of each token, such as advantages. They get no
            gradient, and the normalizer does not depend on them. Those of ignored tokens are not
            looked at.
        chunk_size: the number of rows whose logits exist at once (twice as many with vocab_shard);
            it overrides the budget.
        max_scratch_bytes: the most memory to use besides inputs, outputs and gradients. It must
            hold at least a row of logits and 64 bytes for each token (64 more for
            return_token_stats, and 64 more for skip_ignored). If it cannot hold a float32 sum of
            the weight gradient (vocab * in * 4 bytes) and enough rows, the weight gradient takes
            one more matrix product. If it cannot hold twice the hidden gradient, which forward
            saves for backward, the hidden gradient also takes one more. By default the budget is
            the float32 sum, 2^30 bytes of logits (or all logits, if they take at most twice the
            sum) and the gradients that forward saves. The budget includes the copy of a sliced
            hidden. It does not include the tensors that autocast casts or the copies that autograd
            makes for a transposed leaf. The plain PyTorch path also makes several float32 copies
            of a row of logits, and the budget includes them.
        skip_ignored: whether the matrix products skip the rows whose target is ignored. Without
            max_valid, this costs one host synchronisation, and raises an error under torch.compile
            and CUDA graph capture.
        max_valid: for skip_ignored, an upper bound, known on the host, on the number of targets
            that are not ignored. The matrix products have this many rows. If the bound is too
            small, CPU eager mode raises an error; otherwise the loss is NaN.
        weight_grad_in_forward: whether forward saves the weight gradient in the weight's dtype
            (float16: in float32), and no logits. The heads of one model then keep little at once.
            If max_scratch_bytes cannot hold it beside the float32 sum, backward computes it.
        return_token_stats: the names of the per-token statistics to return: "log_probs",
            "entropy", "correct", "sum_sq_probs" and "mean_logits". True means the first three.
            A statistic that is not named costs nothing.
        alternatives: (..., k) int64 classes of each token whose log-probabilities to return. Where
            one is negative, its log-probability is 0.
        top_k: how many of each token's likeliest classes to return, with their log-probabilities.
            Finding them reads the logits once more.
        vocab_shard: for a vocabulary that is split over ranks: weight and bias are this rank's
            classes, and everything else is the same on all ranks. max_scratch_bytes is for each
            rank. All ranks return the same values, and the whole gradient of hidden. top_k must
            be 0.
    Returns: `CrossEntropyOutput`. With "mean" and "sum" only the loss is differentiable; with
        "none" so are all floating point statistics. If all targets are ignored, the loss is 0 and
        the gradients are zero. The weight gradient is summed in float32.
    Raises:
        ValueError: a shape, dtype or option is wrong, or the budget is too small.
        RuntimeError: skip_ignored without max_valid under torch.compile or CUDA graph capture.
        IndexError: a target is outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    options = LossOptions.of(
        reduction=reduction,
        normalizer=normalizer,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        class_weights=class_weights,
        token_weights=token_weights,
        chunk_size=chunk_size,
        max_scratch_bytes=max_scratch_bytes,
        skip_ignored=skip_ignored,
        max_valid=max_valid,
        weight_grad_in_forward=weight_grad_in_forward,
        return_token_stats=return_token_stats,
        alternatives=alternatives,
        top_k=top_k,
    )
    return linear_loss(hidden, weight, targets, bias, options, vocab_shard)


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    shard: VocabShard | None = None,
) -> CrossEntropyOutput:
    """Compute `linear_cross_entropy` with options that are already checked."""
    chunking = options.chunking
    one_loss = options.reduction != "none"
    head = make_head(hidden, weight, targets, bias, options, one_loss, shard=shard)
    if not one_loss:
        # Only backward knows the upstream gradient of each token's loss.
        return token_outputs(head, targets)
    dtype = compute_dtype(head.hidden)
    divisor = loss_divisor(targets, options, dtype)
    if chunking.max_valid is not None:
        too_many = (targets != options.ignore_index).sum() > min(
            chunking.max_valid, targets.numel()
        )
        divisor = torch.where(too_many, float("nan"), divisor)

    rows, plan = len(head.args.targets), head.args.plan
    if not plan.grads_in_forward:
        # The budget cannot hold gradients between the passes.
        return reduce_tokens(token_outputs(head, targets), divisor)
    strategy: type[torch.autograd.Function] = GradsInForward
    if plan.vocab_block is not None:
        # The budget cannot hold a float32 sum of the weight gradient over chunks of tokens.
        strategy = HiddenGradInForward
    elif (
        not chunking.weight_grad_in_forward
        and rows <= plan.chunk_size
        and _saves_logits_grad(rows, head.weight, _classes(weight, shard), head.args.needs_grad)
    ):
        # All logits fit in one chunk, and it is better to save their gradient than the weight's.
        strategy = LogitsGradInForward
    with without_autocast(head.hidden):
        loss, z, *tokens = strategy.apply(*head[:3], head.args._replace(divisor=divisor))
    token_loss, *stats = _scattered(tokens, head, targets)
    return token_output(loss, z, token_loss, head.args.request, stats)


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
    temperature: float = 1.0,
    chunk_size: int | None = None,
    max_scratch_bytes: int | None = None,
    skip_ignored: bool = False,
    max_valid: int | None = None,
    vocab_shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log p of each target and the entropy of p = softmax(t), both differentiable.

    Preference and policy losses are computed from these two. Backward recomputes the logits chunk
    by chunk; forward and backward together take four matrix products.

    t = softcap(logit_scale * (hidden weight^T + bias)) / temperature.
    d log p_y / d t_j = [j = y] - p_j. The entropy is H = -sum p_j log p_j in nats, and
    d H / d t_j = -p_j (log p_j + H). A class whose logit is -infinity has probability 0 and adds
    nothing to the entropy or the gradients.

    Args:
        hidden: (..., in), floating point.
        weight: (vocab, in), in hidden's dtype (autocast casts both).
        targets: (...) int64. targets[i] is the class of hidden[i]: this function shifts nothing.
        bias: (vocab), in weight's dtype.
        entropy: whether to return the entropy.
        ignore_index, softcap, logit_scale, temperature, chunk_size, max_scratch_bytes,
            skip_ignored, max_valid, vocab_shard: as in `linear_cross_entropy`.
    Returns: log-probabilities (...) and entropy (...) or None, in float32 (float64 for float64
        inputs). Both are 0 if the target is ignored.
    Raises:
        ValueError: a shape, dtype or option is wrong, or the budget is too small.
        RuntimeError: skip_ignored without max_valid under torch.compile or CUDA graph capture.
        IndexError: a target is outside the vocabulary, on CPU in eager mode; on a GPU the values
            of that row are NaN.
    """
    check_switches(entropy=entropy)
    options = LossOptions.of(
        reduction="none",
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        chunk_size=chunk_size,
        max_scratch_bytes=max_scratch_bytes,
        skip_ignored=skip_ignored,
        max_valid=max_valid,
        return_token_stats=("log_probs", "entropy") if entropy else False,
    )
    return token_log_probs(linear_loss(hidden, weight, targets, bias, options, vocab_shard))


def token_log_probs(out: CrossEntropyOutput) -> tuple[Tensor, Tensor | None]:
    """Return log p of each target and the entropy, or None, of an output with reduction "none"."""
    if out.log_probs is None:
        # Without smoothing and z-loss the loss is -log p. 0 - x is never -0, unlike -x.
        return 0.0 - out.loss, None
    return out.log_probs, out.entropy


def token_outputs(head: Head, targets: Tensor) -> CrossEntropyOutput:
    """Return the loss and the statistics of each token; backward takes any upstream gradients."""
    with without_autocast(head.hidden):
        tokens = RecomputeInBackward.apply(*head)
        loss, z_loss, *stats = _scattered(tokens, head, targets)
        if head.args.token_weights is not None:
            weights = scatter(
                head.args.token_weights,
                head.args.row_index,
                targets,
                head.args.options.ignore_index,
            )
            loss, z_loss = loss * weights, z_loss * weights
    return token_output(loss, z_loss, loss, head.args.request, stats)


def _scattered(rows: Iterable[Tensor], head: Head, targets: Tensor) -> list[Tensor]:
    """Scatter values of the gathered rows to the targets' shape."""
    index, ignore_index = head.args.row_index, head.args.options.ignore_index
    return [scatter(x, index, targets, ignore_index) for x in rows]


def make_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    one_loss: bool,
    may_save_logits_grad: bool = True,
    shard: VocabShard | None = None,
) -> Head:
    """Check and cast the tensors of a call, gather its rows and make a chunk plan.

    Args: as in `linear_cross_entropy`. one_loss: whether forward may compute gradients and save
        them for backward; may_save_logits_grad: whether it may save the gradient of the logits
        instead of those of hidden and weight.
    Raises: as `linear_cross_entropy`.
    """
    formula, chunking, request, _, _, class_weights, token_weights = options
    vocab = None if shard is None else shard.vocab
    hidden, weight, bias = _checked(
        hidden, weight, targets, bias, class_weights, options.ignore_index, vocab
    )
    if shard is not None:
        if request.top_k:
            raise ValueError(
                f"loss head: top_k={request.top_k} is not available for a vocabulary that is split "
                "over ranks; compute the likeliest classes from head.logits"
            )
        hidden = SumGradient.apply(hidden, shard.group)
    grad = torch.is_grad_enabled()
    needs_grad = NeedsGrad(
        hidden=grad and hidden.requires_grad,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )
    request = check_request(request, targets, vocab or len(weight))
    row_targets = targets.flatten()
    index = valid_rows(row_targets, options.ignore_index, chunking)
    if token_weights is not None:
        weights = checked_token_weights(token_weights, targets, options.ignore_index)
        weights = weights.flatten().to(compute_dtype(hidden))
        token_weights = weights if index is None else gather(weights[:, None], index)[:, 0]
    if index is not None and request.alternatives is not None:
        inside = index.clamp(max=max(len(row_targets) - 1, 0))
        request = request._replace(alternatives=request.alternatives[inside])
    row_targets = gather_targets(row_targets, index, options.ignore_index)
    rows = len(row_targets)
    # float16 could overflow, and in the other dtypes the sum has the weight's dtype already.
    rounds = one_loss and chunking.weight_grad_in_forward and weight.dtype == torch.bfloat16
    if chunking.chunk_size is not None:
        plan = chunk_plan.ChunkPlan(chunking.chunk_size)
    else:
        skip = chunking.skip_ignored
        sizes = _sizes(
            hidden,
            weight,
            _classes(weight, shard),
            targets.numel(),
            rows,
            needs_grad,
            skip,
            request,
            one_loss,
            may_save_logits_grad and not chunking.weight_grad_in_forward,
            0 if shard is None else wide_copies(formula, request),
        )
        if shard is not None:
            # `token_loop` computes the next chunk's logits while the ranks exchange.
            columns = sizes.vocab + (weight.shape[1] if skip else 0)
            sizes = sizes._replace(ahead_bytes=columns * hidden.element_size())
        if rounds and needs_grad.weight:
            rounded = sizes.vocab * weight.shape[1] * weight.element_size()
            sizes = sizes._replace(rounded_weight_bytes=rounded)
        plan = chunk_plan.plan_chunks(sizes, chunking.max_scratch_bytes)
    if torch.compiler.is_compiling():
        # If the last chunk has one row, the compiler makes the number of rows a constant. torch
        # 2.11 can trace that only before the Function whose outputs have this length.
        last = chunk_plan.chunks(rows, plan.chunk_size)[-1]
        if last.stop - last.start == 1:
            pass  # evaluating the condition is enough
    args = LossArgs(
        targets=row_targets,
        row_index=index,
        class_weights=class_weights,
        token_weights=token_weights,
        divisor=None,
        options=formula,
        plan=plan._replace(round_weight_grad=rounds),
        needs_grad=needs_grad,
        request=request,
        shard=shard,
    )
    return Head(hidden.reshape(-1, weight.shape[1]), weight, bias, args)


def _checked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None,
    ignore_index: int,
    vocab_of_all_ranks: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check all tensors of a call; return hidden, weight and bias, cast if autocast is enabled."""
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
    vocab = vocab if vocab_of_all_ranks is None else vocab_of_all_ranks
    check_targets(targets, shape, vocab, class_weights, ignore_index, hidden.device)
    check_floating("loss head", "hidden", hidden)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.device != hidden.device:
            raise ValueError(
                f"loss head: {name} is on {parameter.device} and hidden is on {hidden.device}; "
                "move one of them to the device of the other"
            )
    weight, bias = cast_operands(hidden, weight, bias)
    hidden, _ = cast_operands(hidden, hidden, None)
    if hidden.dtype != weight.dtype:
        # Autocast does not cast float64.
        way = "" if torch.float64 in (hidden.dtype, weight.dtype) else ", or run under autocast"
        raise ValueError(
            f"loss head: hidden is {hidden.dtype} and weight is {weight.dtype}; cast one{way}"
        )
    if bias is not None:
        check_linear_bias("loss head", weight, bias)
    return hidden, weight, bias


def _classes(weight: Tensor, shard: VocabShard | None) -> int:
    """Return the number of classes that the work is planned for.

    The ranks of a shard plan for the rank with most classes, so that all have the same plan.
    """
    return len(weight) if shard is None else shard.most_classes


def _saves_logits_grad(rows: int, weight: Tensor, vocab: int, needs_grad: NeedsGrad) -> bool:
    """Return whether forward saves the gradient of logits of a single chunk for backward.

    Otherwise it saves the gradient of the weight, and backward makes a scaled copy of it. Saving
    the gradient of the logits avoids this copy. On a GPU it must also take less memory than the
    gradient of the weight.
    """
    return needs_grad.weight and (
        real_device(weight.device).type == "cpu" or rows <= min(weight.shape[1], vocab)
    )


def _sizes(
    hidden: Tensor,
    weight: Tensor,
    vocab: int,
    tokens: int,
    rows: int,
    needs_grad: NeedsGrad,
    skip_ignored: bool,
    request: TokenRequest,
    one_loss: bool,
    may_save_logits_grad: bool,
    least_copies: int,
) -> chunk_plan.Sizes:
    """Return the sizes for the chunk plan. `rows` of the `tokens` targets get `vocab` logits.

    Args: least_copies: how many copies of the logits in `compute_dtype` exist at least.
    """
    width = weight.shape[1]
    narrow, wide = hidden.element_size(), compute_dtype(hidden).itemsize
    copies, row_copies = chunk_plan.wide_copies(hidden, request)
    copies = max(copies, least_copies)
    saved_weight = single_chunk = 0
    if needs_grad.weight and hidden.dtype == torch.float16:
        single_chunk = vocab * width * wide  # the weight gradient is computed in float32
    elif one_loss and may_save_logits_grad and _saves_logits_grad(rows, weight, vocab, needs_grad):
        single_chunk = rows * width * narrow  # the scaled hidden states
    elif one_loss and needs_grad.weight:
        saved_weight = vocab * width * narrow
    # Forward saves the hidden gradient and one more row for padding; backward returns a scaled
    # copy. (hidden.nbytes does not work under torch.compile with a symbolic number of rows.)
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
        fixed_bytes=chunk_plan.TOKEN_BYTES * tokens * (1 + skip_ignored)
        + request.bytes_per_token(chunk_plan.TOKEN_BYTES) * tokens
        + (3 * wide * vocab if needs_grad.bias else 0)
        + row_copies * wide * vocab
        + (0 if hidden.is_contiguous() else hidden.numel() * narrow),
    )
