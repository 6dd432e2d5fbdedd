"""The ops of a linear head: its logits exist in chunks that fit a byte budget. Start here.

`linear_loss` checks the tensors, plans the chunks, and calls the autograd Function that suits the
plan; autograd.py has the Functions and the loops over chunks. chunk_plan.py says which rows are
computed and how many logits exist at once, groups.py has the losses of whole sequences, and
vocab_shard.py what ranks exchange that have the vocabulary together.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import Unpack

from ligermodels.kernels.checks import misfit
from ligermodels.kernels.dispatch import compute_dtype, real_device, without_autocast
from ligermodels.kernels.linear_cross_entropy import chunk_plan
from ligermodels.kernels.linear_cross_entropy.autograd import (
    GradsInForward,
    Head,
    LogitsGradInForward,
    LossArgs,
    NeedsGrad,
    RecomputeInBackward,
)
from ligermodels.kernels.linear_cross_entropy.vocab_shard import VocabShard, sum_gradient
from ligermodels.kernels.loss_options import (
    LOG_PROB_OPTIONS,
    LOSS_OPTIONS,
    CrossEntropyOutput,
    LossKeywords,
    LossOptions,
    TokenRequest,
    check_known,
    check_targets,
    checked_linear,
    checked_token_weights,
    loss_divisor,
    reduce_tokens,
    token_output,
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    vocab_shard: VocabShard | None = None,
    **options: Unpack[LossKeywords],
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
        options: the keywords from here on; `loss_options.LossOptions` has their defaults, which
            change nothing.
        reduction: "mean", the default, divides the summed loss by the normalizer, "sum" does not
            divide it, and "none" returns the loss of each token, which is 0 if the target is
            ignored.
        normalizer: a number >= 0 (0 counts as 1) or a 0-d tensor, only for "mean". By default it is
            the number of targets that are not ignored, or the sum of their class weights. It gets
            no gradient.
        ignore_index: the target, by default -100, of tokens that do not count in the loss or the
            gradients.
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
            rank. All ranks return the same values, and the whole gradient of hidden. There can
            be no top_k and no alternatives.
    Returns: `CrossEntropyOutput`. With "mean" and "sum" only the loss is differentiable; with
        "none" so are log-probabilities and the entropy. If all targets are ignored, the loss is 0
        and the gradients are zero. The weight gradient is summed in float32.
    Raises:
        TypeError: an option is unknown.
        ValueError: a shape, dtype or option is wrong, or the budget is too small.
        RuntimeError: skip_ignored without max_valid under torch.compile or CUDA graph capture.
        IndexError: a target is outside the vocabulary, on CPU in eager mode; on a GPU the loss of
            that row is NaN.
    """
    check_known("linear_cross_entropy", options, LOSS_OPTIONS)
    return linear_loss(hidden, weight, targets, bias, LossOptions.of(**options), vocab_shard)


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    shard: VocabShard | None = None,
) -> CrossEntropyOutput:
    """Compute `linear_cross_entropy` with options that are already checked."""
    one_loss = options.reduction != "none"
    head = make_head(hidden, weight, targets, bias, options, one_loss, shard=shard)
    if not one_loss:
        # Only backward knows the upstream gradient of each token's loss.
        return token_outputs(head, targets)
    args = head.args
    divisor = loss_divisor(targets, options, compute_dtype(head.hidden))
    if options.max_valid is not None:
        too_many = (targets != options.ignore_index).sum() > min(options.max_valid, targets.numel())
        divisor = torch.where(too_many, float("nan"), divisor)
    if not args.plan.grads_in_forward:
        # The budget cannot hold gradients between the passes.
        return reduce_tokens(token_outputs(head, targets), divisor)
    strategy: type[torch.autograd.Function] = GradsInForward
    if (
        args.plan.vocab_block is None
        and args.one_chunk
        and not options.weight_grad_in_forward
        and _saves_logits_grad(head.weight, len(args.targets), args.needs_grad, shard)
    ):
        strategy = LogitsGradInForward
    with without_autocast(head.hidden):
        loss, z, *tokens = strategy.apply(*head[:3], args._replace(divisor=divisor))
    token_loss, *stats = _scattered(tokens, head, targets)
    return token_output(loss, z, token_loss, args.request, stats)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    entropy: bool = False,
    vocab_shard: VocabShard | None = None,
    **options: Unpack[LossKeywords],
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
        vocab_shard, options: as in `linear_cross_entropy`.
    Returns: log-probabilities (...) and entropy (...) or None, in float32 (float64 for float64
        inputs). Both are 0 if the target is ignored.
    Raises:
        TypeError: an option is unknown.
        ValueError: a shape, dtype or option is wrong, or the budget is too small.
        RuntimeError: skip_ignored without max_valid under torch.compile or CUDA graph capture.
        IndexError: a target is outside the vocabulary, on CPU in eager mode; on a GPU the values
            of that row are NaN.
    """
    check_known("linear_log_probs", options, LOG_PROB_OPTIONS)
    given = log_prob_options(entropy, **options)
    return token_log_probs(linear_loss(hidden, weight, targets, bias, given, vocab_shard))


def log_prob_options(entropy: bool, **options: Unpack[LossKeywords]) -> LossOptions:
    """Return the options of `linear_log_probs`, as those of a loss."""
    options["return_token_stats"] = ("log_probs", "entropy") if entropy else ()
    options["reduction"] = "none"
    return LossOptions.of(**options)


def token_log_probs(out: CrossEntropyOutput) -> tuple[Tensor, Tensor | None]:
    """Return log p of each target and the entropy, or None, of an output with reduction "none"."""
    if out.log_probs is None:
        # Without smoothing and z-loss the loss is -log p. 0 - x is never -0, unlike -x.
        return 0.0 - out.loss, None
    return out.log_probs, out.entropy


def token_outputs(head: Head, targets: Tensor) -> CrossEntropyOutput:
    """Return the loss and the statistics of each token; backward takes any upstream gradients."""
    with without_autocast(head.hidden):
        loss, z_loss, *stats = _scattered(RecomputeInBackward.apply(*head), head, targets)
        if head.args.token_weights is not None:
            (weights,) = _scattered([head.args.token_weights], head, targets)
            loss, z_loss = loss * weights, z_loss * weights
    return token_output(loss, z_loss, loss, head.args.request, stats)


def _scattered(rows: Iterable[Tensor], head: Head, targets: Tensor) -> list[Tensor]:
    """Scatter values of the gathered rows to the targets' shape."""
    index, ignore_index = head.args.row_index, head.args.options.ignore_index
    return [chunk_plan.scatter(x, index, targets, ignore_index) for x in rows]


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
    shape = hidden.shape[:-1]
    hidden, weight, bias = checked_linear("loss head", hidden, weight, bias)
    vocab = len(weight) if shard is None else shard.vocab
    ignore_index, token_weights = options.ignore_index, options.token_weights
    check_targets(targets, shape, vocab, options.class_weights, ignore_index, hidden.device)
    request = options.request_of(targets, vocab)
    if shard is not None:
        if request.num_picked:
            expected = "neither for a vocabulary split over ranks; head.logits has all classes"
            raise misfit(
                "loss head", expected, top_k=options.top_k, alternatives=options.alternatives
            )
        hidden = sum_gradient(hidden, shard.group)
    needs_grad = NeedsGrad.of(hidden, weight, bias)
    index, row_targets = chunk_plan.valid_rows(targets, options)
    if token_weights is not None:
        weights = checked_token_weights(token_weights, targets, ignore_index)
        weights = weights.flatten().to(compute_dtype(hidden))
        token_weights = chunk_plan.gather(weights[:, None], index)[:, 0]
    if index is not None and request.alternatives is not None:
        inside = index.clamp(max=max(targets.numel() - 1, 0))
        request = request._replace(alternatives=request.alternatives[inside])
    plan = _plan(
        *(hidden, weight, targets.numel(), len(row_targets), needs_grad, request, options),
        *(one_loss, may_save_logits_grad, shard),
    )
    if torch.compiler.is_compiling():
        # If the last chunk has one row, the compiler makes the number of rows a constant. torch
        # 2.11 can trace that only before the Function whose outputs have this length.
        last = chunk_plan.chunks(len(row_targets), plan.chunk_size)[-1]
        if last.stop - last.start == 1:
            pass  # evaluating the condition is enough
    args = LossArgs(
        targets=row_targets,
        row_index=index,
        class_weights=options.class_weights,
        token_weights=token_weights,
        divisor=None,
        options=options.formula,
        plan=plan,
        needs_grad=needs_grad,
        request=request,
        shard=shard,
    )
    return Head(hidden.reshape(-1, weight.shape[1]), weight, bias, args)


def _saves_logits_grad(
    weight: Tensor, rows: int, needs_grad: NeedsGrad, shard: VocabShard | None
) -> bool:
    """Return whether forward saves the gradient of logits of a single chunk for backward.

    Otherwise it saves the gradient of the weight, and backward makes a scaled copy of it. Saving
    the gradient of the logits avoids this copy. On a GPU it must also take less memory than the
    gradient of the weight.
    """
    return needs_grad.weight and (
        real_device(weight.device).type == "cpu"
        or rows <= min(weight.shape[1], _classes(weight, shard))
    )


def _classes(weight: Tensor, shard: VocabShard | None) -> int:
    """Return the number of classes that the work is planned for.

    The ranks of a shard plan for the rank with most classes, so that all have the same plan.
    """
    return len(weight) if shard is None else shard.most_classes


def _plan(
    hidden: Tensor,
    weight: Tensor,
    tokens: int,
    rows: int,
    needs_grad: NeedsGrad,
    request: TokenRequest,
    options: LossOptions,
    one_loss: bool,
    may_save_logits_grad: bool,
    shard: VocabShard | None,
) -> chunk_plan.ChunkPlan:
    """Return the chunk plan of a call in which `rows` of the `tokens` targets get logits."""
    # float16 could overflow, and in the other dtypes the sum has the weight's dtype already.
    rounds = one_loss and options.weight_grad_in_forward and weight.dtype == torch.bfloat16
    if options.chunk_size is not None:
        return chunk_plan.ChunkPlan(options.chunk_size, round_weight_grad=rounds)
    vocab, width, skip = _classes(weight, shard), weight.shape[1], options.skip_ignored
    narrow, wide = hidden.element_size(), compute_dtype(hidden).itemsize
    copies, row_copies = chunk_plan.wide_copies(hidden, request)
    ahead = 0
    if shard is not None:
        copies = max(copies, chunk_plan.shard_copies(options, request))
        # `token_loop` computes the next chunk's logits while the ranks exchange.
        ahead = (vocab + (width if skip else 0)) * narrow
    saved_weight = single_chunk = 0
    may_save_logits_grad = may_save_logits_grad and not options.weight_grad_in_forward
    if needs_grad.weight and hidden.dtype == torch.float16:
        single_chunk = vocab * width * wide  # the weight gradient is computed in float32
    elif one_loss and may_save_logits_grad and _saves_logits_grad(weight, rows, needs_grad, shard):
        single_chunk = rows * width * narrow  # the scaled hidden states
    elif one_loss and needs_grad.weight:
        saved_weight = vocab * width * narrow
    # Forward saves the hidden gradient and one more row for padding; backward returns a scaled
    # copy. (hidden.nbytes does not work under torch.compile with a symbolic number of rows.)
    saved_hidden = (hidden.numel() + width) * narrow if one_loss and needs_grad.hidden else 0
    sizes = chunk_plan.Sizes(
        rows,
        vocab,
        logit_bytes=narrow + wide * copies,
        hidden_bytes=(width * narrow if skip else 0) + (width * wide if copies else 0),
        accumulator_bytes=vocab * width * wide if needs_grad.weight else 0,
        single_chunk_bytes=single_chunk,
        saved_weight_bytes=saved_weight,
        rounded_weight_bytes=vocab * width * narrow if rounds and needs_grad.weight else 0,
        saved_hidden_bytes=saved_hidden,
        fixed_bytes=chunk_plan.TOKEN_BYTES * tokens * (1 + skip)
        + request.bytes_per_token(chunk_plan.TOKEN_BYTES) * tokens
        + (3 * wide * vocab if needs_grad.bias else 0)
        + row_copies * wide * vocab
        + (0 if hidden.is_contiguous() else hidden.numel() * narrow),
        ahead_bytes=ahead,
    )
    plan = chunk_plan.plan_chunks(sizes, options.max_scratch_bytes)
    return plan._replace(round_weight_grad=rounds)
