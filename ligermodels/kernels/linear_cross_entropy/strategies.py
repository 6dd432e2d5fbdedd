"""The strategies of the loss head: in which pass it computes each gradient, and what it saves.

Each strategy is an autograd Function of (hidden, weight, bias, args); hidden, weight and bias get
gradients. The first three strategies return one loss, sum(loss) / divisor. The last one returns
the loss of each token. `linear_cross_entropy` in functions.py chooses the strategy.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.autocast import without_autocast
from ligermodels.kernels.dispatch import refuse_double_backward, select
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.linear_cross_entropy.loops import (
    Head,
    LossArgs,
    NeedsGrad,
    add_product,
    begin,
    finish,
    token_loop,
    vocab_loop,
)
from ligermodels.kernels.linear_cross_entropy.valid_rows import gather, zeros_to_scatter_into
from ligermodels.kernels.loss_options import (
    OutputGrads,
    TokenStats,
    output_grads,
    target_weights,
)


class GradsInForward(torch.autograd.Function):
    """Compute all gradients in forward, while the logits exist; backward scales them.

    Both passes together take three matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: LossArgs
    ) -> tuple[Tensor, ...]:
        head = Head(hidden, weight, bias, args)
        grad_output, late_scale = _forward_scale(head)
        stats = TokenStats.empty(len(args.targets), hidden, args.request)
        made = token_loop(head, args.needs_grad, grad_output, stats=stats)
        grad_weight = made.grad_weight
        if grad_weight is not None and args.plan.round_weight_grad:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(made.grad_hidden, grad_weight, made.grad_bias, late_scale)
        ctx.dtype = hidden.dtype
        return _mean(ctx, head, made.loss, made.z_loss, stats)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("loss head")
        if grad_output is None:
            return (None,) * 4
        *grads, late_scale = ctx.saved_tensors
        scale = grad_output if late_scale is None else grad_output * late_scale
        return *(scaled_grad(grad, scale, ctx.dtype) for grad in grads), None


class LogitsGradInForward(torch.autograd.Function):
    """Save the gradient of the logits in forward; backward computes the other gradients from it.

    This is for a single chunk. On a GPU the chunk has at most min(in, vocab) tokens, whose logits
    take no more memory than the weight. Both passes together take three matrix products, and no
    tensor of the weight's size is scaled.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: LossArgs
    ) -> tuple[Tensor, ...]:
        head = Head(hidden, weight, bias, args)
        grad_output, late_scale = _forward_scale(head)
        stats = TokenStats.empty(len(args.targets), hidden, args.request)
        everything = slice(0, len(args.targets))
        begun = begin(head, everything, True)
        loss, z_loss, _, grad_logits = finish(head, everything, begun, grad_output, stats=stats)
        needed_weight = weight if args.needs_grad.hidden else None
        ctx.save_for_backward(hidden, needed_weight, args.row_index, grad_logits, late_scale)
        ctx.needs_bias = args.needs_grad.bias
        return _mean(ctx, head, loss, z_loss, stats)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("loss head")
        if grad_output is None:
            return (None,) * 4
        hidden, weight, index, grad_logits, late_scale = ctx.saved_tensors
        scale = grad_output if late_scale is None else grad_output * late_scale
        ops, dtype = select("cross_entropy", hidden), hidden.dtype
        grad_hidden = grad_bias = None
        with without_autocast(hidden):
            rows = gather(hidden, index)
            if dtype == torch.float16:
                # Scaled float16 rows could overflow or underflow, so scale the float32 product.
                grad_weight = ops.scaled(add_product(None, grad_logits.t(), rows), scale, dtype)
            else:
                grad_weight = grad_logits.t() @ ops.scaled(rows, scale, dtype)
            del rows
            if weight is not None:
                grad_hidden = ops.scaled(grad_logits @ weight, scale, dtype)
                if index is not None:
                    padded = zeros_to_scatter_into(hidden).index_copy_(0, index, grad_hidden)
                    grad_hidden = padded[: len(hidden)]
            if ctx.needs_bias:
                bias_sum = grad_logits.sum(0, dtype=compute_dtype(hidden))
                grad_bias = ops.scaled(bias_sum, scale, dtype)
        return grad_hidden, grad_weight, grad_bias, None


class HiddenGradInForward(torch.autograd.Function):
    """Compute the gradient of hidden in forward; `vocab_loop` computes the others in backward.

    This is for a budget that cannot hold a float32 sum of the weight gradient. Both passes together
    take four matrix products, because backward recomputes the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: LossArgs
    ) -> tuple[Tensor, ...]:
        head = Head(hidden, weight, bias, args)
        grad_output, late_scale = _forward_scale(head)
        stats = TokenStats.empty(len(args.targets), hidden, args.request)
        needs_grad = NeedsGrad(hidden=args.needs_grad.hidden)
        made = token_loop(head, needs_grad, grad_output, stats=stats)
        _save_head(ctx, head, made.lse, made.grad_hidden, late_scale)
        return _mean(ctx, head, made.loss, made.z_loss, stats)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("loss head")
        if grad_output is None:
            return (None,) * 4
        head, lse, grad_hidden, late_scale = _saved_head(ctx)
        scale = grad_output if late_scale is None else grad_output * late_scale
        grad_hidden = scaled_grad(grad_hidden, scale, head.hidden.dtype)
        with without_autocast(head.hidden):
            grads = OutputGrads(_weighted((grad_output / head.args.divisor).view(1), head.args))
            grad_weight, grad_bias = vocab_loop(head, grads, lse)
        return grad_hidden, grad_weight, grad_bias, None


class RecomputeInBackward(torch.autograd.Function):
    """Compute the loss and the statistics of each token, for any upstream gradients.

    Backward recomputes the logits and computes all gradients. Both passes together take four matrix
    products, or five if `vocab_loop` computes the weight gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: LossArgs
    ) -> tuple[Tensor, ...]:
        head = Head(hidden, weight, bias, args)
        stats = TokenStats.empty(len(args.targets), hidden, args.request)
        made = token_loop(head, NeedsGrad(), stats=stats)
        stats = TokenStats() if stats is None else stats
        _save_head(ctx, head, made.lse, stats.entropy, stats.sum_sq_probs, stats.picked)
        ctx.names = args.request.names
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(made.z_loss, *stats.without_gradient())
        return made.loss, made.z_loss, *stats.tensors()

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor | None, _: None, *grad_stats: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("loss head")
        if grad_loss is None and all(grad is None for grad in grad_stats):
            return (None,) * 4
        head, lse, entropy, sum_sq_probs, picked = _saved_head(ctx)
        needs_grad, dtype = head.args.needs_grad, head.weight.dtype
        values = TokenStats(entropy=entropy, sum_sq_probs=sum_sq_probs, picked=picked)
        grad_output = output_grads(grad_loss, ctx.names, grad_stats, values, lse)
        assert grad_output is not None, "some output has a gradient"
        grad_hidden = grad_weight = grad_bias = None
        with without_autocast(head.hidden):
            if head.args.plan.vocab_block is None:
                made = token_loop(head, needs_grad, grad_output, lse)
                grad_hidden = made.grad_hidden
                grad_weight = None if made.grad_weight is None else made.grad_weight.to(dtype)
                grad_bias = None if made.grad_bias is None else made.grad_bias.to(dtype)
            else:
                if needs_grad.hidden:
                    only_hidden = NeedsGrad(hidden=True)
                    grad_hidden = token_loop(head, only_hidden, grad_output, lse).grad_hidden
                grad_weight, grad_bias = vocab_loop(head, grad_output, lse)
        return grad_hidden, grad_weight, grad_bias, None


def _mean(
    ctx: Any, head: Head, loss: Tensor, z_loss: Tensor, stats: TokenStats | None
) -> tuple[Tensor, ...]:
    """Return the outputs of a strategy with one loss. Only this loss is differentiable."""
    loss, z_loss = _weighted(loss, head.args), _weighted(z_loss, head.args)
    mean, z_mean, _ = select("cross_entropy", loss).mean_loss(loss, z_loss, head.args.divisor)
    made = [] if stats is None else stats.tensors()
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(z_mean, loss, *made)
    return mean, z_mean, loss, *made


def _weighted(x: Tensor, args: LossArgs) -> Tensor:
    """Multiply a number of each row, or one of all rows, by the rows' weights, if there are any."""
    return x if args.token_weights is None else x * args.token_weights


def _save_head(ctx: Any, head: Head, *others: Tensor | None) -> None:
    """Save the inputs of the logits, and other tensors, for `_saved_head` in backward."""
    # Autograd checks that saved tensors were not modified, and frees them after backward.
    hidden, weight, bias, args = head
    *tensors, options, plan, needs_grad, request, shard = args
    ctx.settings = (options, plan, needs_grad, request._replace(alternatives=None), shard)
    ctx.save_for_backward(hidden, weight, bias, *tensors, *others)


def _saved_head(ctx: Any) -> tuple[Any, ...]:
    hidden, weight, bias, targets, index, weights, factors, divisor, *others = ctx.saved_tensors
    args = LossArgs(targets, index, weights, factors, divisor, *ctx.settings)
    return Head(hidden, weight, bias, args), *others


def scaled_grad(grad: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Scale out of place, because backward may run twice over a retained graph."""
    return None if grad is None else select("cross_entropy", grad).scaled(grad, scale, dtype)


def _forward_scale(head: Head) -> tuple[OutputGrads | None, Tensor | None]:
    """Return the scale of the gradients in forward, and the factor that is left for backward.

    Forward scales with 1 / divisor and leaves no factor (None), except for float16, where gradients
    of a mean over many tokens would underflow. There forward keeps them near 1, and backward
    multiplies with the rest, together with the loss scale of float16 training.
    """
    divisor = head.args.divisor
    assert divisor is not None, "a strategy with one loss has a divisor"
    if not any(head.args.needs_grad):
        return None, None
    if head.hidden.dtype != torch.float16:
        return OutputGrads(_weighted((1 / divisor).view(1), head.args)), None
    bound = _gradient_bound(head.args, divisor)
    return OutputGrads(_weighted((1 / bound).view(1), head.args)), bound / divisor


def _gradient_bound(args: LossArgs, like: Tensor) -> Tensor:
    """Estimate the largest gradient of a row's loss with respect to its logits.

    It is about the logit scale, times a class weight if there are class weights. The result is a
    scalar with the dtype and device of `like`.
    """
    _, label_smoothing, _, _, logit_scale = args.options
    bound = torch.full_like(like, logit_scale)
    if len(args.targets) == 0:
        return bound
    if args.token_weights is not None:
        bound = bound * args.token_weights.abs().amax()
    if args.class_weights is None:
        return torch.where(bound == 0, 1.0, bound)
    weights = args.class_weights.to(like.dtype).abs()
    largest = target_weights(args.targets, weights, args.options.ignore_index).amax()
    bound = bound * ((1 - label_smoothing) * largest + label_smoothing * weights.mean())
    return torch.where(bound == 0, 1.0, bound)
