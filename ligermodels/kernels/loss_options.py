"""What the cross entropy ops are given and return: options, tensors, and the checks of both."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from ligermodels.kernels.checks import (
    FLOATING,
    check_count,
    check_linear_bias,
    check_number,
    misfit,
)
from ligermodels.kernels.dispatch import cast_operands, compute_dtype

_OP = "cross entropy"  # the name in messages

REDUCTIONS = ("none", "sum", "mean")

TOKEN_STATS = ("log_probs", "entropy", "correct", "sum_sq_probs", "mean_logits")
"""The statistics of each token that `return_token_stats` may name; True means the first three."""


class LossKeywords(TypedDict, total=False):
    """Keyword arguments of `linear_cross_entropy`, which explains them. None is required."""

    reduction: str
    normalizer: float | Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    temperature: float
    class_weights: Tensor | None
    token_weights: Tensor | None
    chunk_size: int | None
    max_scratch_bytes: int | None
    skip_ignored: bool
    max_valid: int | None
    weight_grad_in_forward: bool
    return_token_stats: bool | Collection[str]
    alternatives: Tensor | None
    top_k: int


LOSS_OPTIONS = frozenset(LossKeywords.__optional_keys__)

HEAD_OPTIONS = LOSS_OPTIONS - {"token_weights", "alternatives"}
"""The options that a loss head may have defaults of."""

LOG_PROB_OPTIONS = frozenset(
    "ignore_index softcap logit_scale temperature chunk_size max_scratch_bytes skip_ignored "
    "max_valid".split()
)
"""The options of an op that returns log-probabilities."""

LOGIT_OPTIONS = LOSS_OPTIONS - frozenset(
    "token_weights chunk_size max_scratch_bytes skip_ignored max_valid "
    "weight_grad_in_forward".split()
)
"""The options of an op that is given logits."""


class CrossEntropyOptions(NamedTuple):
    """Numbers in the formula of the loss. `linear_cross_entropy` explains each."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


class DivergenceOptions(NamedTuple):
    """Numbers in the formula of a divergence, as `reference.divergence_rows` explains it."""

    beta: float | None  # None for the total variation
    softcap: float | None = None
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_scale: float = 1.0


class TokenRequest(NamedTuple):
    """The per-token statistics that a call returns besides the losses."""

    stats: tuple[str, ...] = ()  # names of TOKEN_STATS, in its order
    # (rows, k) int64: classes whose log-probability to return; negative ones are padding.
    alternatives: Tensor | None = None
    top_k: int = 0  # how many of the likeliest classes to return, with their log-probabilities

    @property
    def is_empty(self) -> bool:
        """Whether no statistic is requested."""
        return not self.stats and self.num_picked == 0

    @property
    def num_picked(self) -> int:
        """The number of given and likeliest classes per token, in this order."""
        return self.top_k + (0 if self.alternatives is None else self.alternatives.shape[-1])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the requested fields of `TokenStats`, in their order."""
        return self.stats + (("picked", "picked_log_probs") if self.num_picked else ())

    def bytes_per_token(self, token_bytes: int) -> int:
        """Return the memory per token of the requested statistics; each counts token_bytes / 3."""
        return -(-token_bytes * len(self.stats) // 3) + 64 * self.num_picked


class LossOptions(NamedTuple):
    """All options of one call of the loss head, checked. `of` makes them from `LossKeywords`."""

    reduction: str = "mean"
    normalizer: float | Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    class_weights: Tensor | None = None
    token_weights: Tensor | None = None
    chunk_size: int | None = None
    max_scratch_bytes: int | None = None
    skip_ignored: bool = False
    max_valid: int | None = None
    weight_grad_in_forward: bool = False
    return_token_stats: bool | Collection[str] = False
    alternatives: Tensor | None = None
    top_k: int = 0

    @classmethod
    def of(cls, **keywords: Unpack[LossKeywords]) -> "LossOptions":
        """Check the options, as far as they do not depend on a shape; return Python's numbers.

        The temperature becomes 1, because c tanh(s x / c) / T is (c / T) tanh((s / T) x / (c / T)).

        Raises:
            ValueError: an option has a value that is wrong for every call; the message names it.
        """
        given = cls(**keywords)
        _check_reduction(given.reduction, given.normalizer)
        label_smoothing = check_number(_OP, "label_smoothing", given.label_smoothing)
        if label_smoothing > 1:
            raise misfit(_OP, "at most 1", label_smoothing=label_smoothing)
        if given.max_valid is not None and not given.skip_ignored:
            raise misfit("loss head", "max_valid only with skip_ignored", max_valid=given.max_valid)
        temperature = check_number(_OP, "temperature", given.temperature, above=True)
        logit_scale = check_number(_OP, "logit_scale", given.logit_scale, above=True)
        softcap = given.softcap
        if softcap is not None:
            softcap = check_number(_OP, "softcap", softcap, above=True) / temperature
        return given._replace(
            ignore_index=check_count(_OP, "ignore_index", given.ignore_index, -(2**63)),
            label_smoothing=label_smoothing,
            z_loss=check_number(_OP, "z_loss", given.z_loss),
            softcap=softcap,
            logit_scale=logit_scale / temperature,
            temperature=1.0,
            chunk_size=_count_or_none("chunk_size", given.chunk_size, 1),
            max_scratch_bytes=_count_or_none("max_scratch_bytes", given.max_scratch_bytes, 1),
            max_valid=_count_or_none("max_valid", given.max_valid, 0),
            return_token_stats=_stat_names(given.return_token_stats),
            top_k=check_count(_OP, "top_k", given.top_k, 0),
        )

    @property
    def formula(self) -> CrossEntropyOptions:
        """The numbers in the formula of the loss."""
        return CrossEntropyOptions(
            self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.logit_scale
        )

    def request_of(self, targets: Tensor, vocab: int) -> TokenRequest:
        """Return what is asked of each token, with alternatives as (rows, k).

        Raises:
            ValueError: top_k is larger than the vocabulary, or alternatives do not fit the targets.
            IndexError: an alternative is outside the vocabulary, on CPU in eager mode.
        """
        assert isinstance(self.return_token_stats, tuple), "`of` has checked the names"
        if self.top_k > vocab:
            raise misfit(_OP, f"at most the vocabulary, {vocab}", top_k=self.top_k)
        classes = self.alternatives
        if classes is not None:
            classes = check_alternatives(classes, targets, vocab)
        return TokenRequest(self.return_token_stats, classes, self.top_k)


def check_known(caller: str, options: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError if an option is unknown."""
    # This builds a list because torch 2.11's Dynamo does not trace the difference of two sets.
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{caller}: unknown options {sorted(unknown)}; known: {sorted(known)}")


def _count_or_none(name: str, value: int | None, least: int) -> int | None:
    return None if value is None else check_count("loss head", name, value, least)


def _stat_names(given: bool | Collection[str]) -> tuple[str, ...]:
    """Return the names of the statistics that are asked for, in the order of TOKEN_STATS."""
    if isinstance(given, bool):
        return TOKEN_STATS[:3] if given else ()
    known = isinstance(given, Collection) and not isinstance(given, str)
    if not known or any(name not in TOKEN_STATS for name in given):
        expected = f"True, False or some of the names {', '.join(TOKEN_STATS)}"
        raise misfit(_OP, expected, return_token_stats=given)
    return tuple(name for name in TOKEN_STATS if name in given)


def _check_reduction(reduction: str, normalizer: float | Tensor | None) -> None:
    if reduction not in REDUCTIONS:
        raise misfit(_OP, f"one of {REDUCTIONS}", reduction=reduction)
    if normalizer is None:
        return
    if reduction != "mean":
        raise misfit(_OP, "a normalizer only with reduction='mean'", reduction=reduction)
    if not isinstance(normalizer, Tensor):
        check_number(_OP, "normalizer", normalizer)  # 0 counts as 1
    elif normalizer.dim() != 0:
        raise misfit(_OP, "a number or a 0-d tensor", normalizer=normalizer)


def checked_linear(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = ""
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the operands of a linear head; return them, cast if autocast is enabled.

    Args: prefix: of the names of the arguments, in messages.
    """
    given = {f"{prefix}hidden": hidden, f"{prefix}weight": weight}
    if hidden.dtype not in FLOATING or weight.dtype not in FLOATING:
        raise misfit(op, "floating point tensors of 16 bits or more", **given)
    fits = hidden.dim() > 0 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or weight.shape[1] == 0:
        raise misfit(op, "(..., in) and (vocab, in), with 1 or more columns", **given)
    if any(x is not None and x.device != hidden.device for x in (weight, bias)):
        raise misfit(op, "tensors on one device", **given, bias=bias)
    weight, bias = cast_operands(hidden, weight, bias)
    hidden, _ = cast_operands(hidden, hidden, None)
    if hidden.dtype != weight.dtype:
        expected = "one dtype: cast one, or run under autocast, which does not cast float64"
        raise misfit(op, expected, **given)
    if bias is not None:
        check_linear_bias(op, weight, bias)
    return hidden, weight, bias


def _check_tensor(
    name: str, x: Tensor, shape: Sequence[int], device: torch.device, dtype: Any = None
) -> None:
    """Raise ValueError unless x has this shape, device and, if given, dtype."""
    if x.shape != tuple(shape) or x.device != device or dtype not in (None, x.dtype):
        expected = f"{tuple(shape)} {'' if dtype is None else dtype} on {device}"
        raise misfit(_OP, expected, **{name: x})


def check_classes(
    vocab: int, class_weights: Tensor | None, device: torch.device | None = None
) -> None:
    """Raise ValueError if the vocabulary is empty or class_weights do not fit it."""
    if vocab == 0:
        raise misfit(_OP, "1 class or more", vocabulary=vocab)
    if class_weights is not None:
        _check_tensor("class_weights", class_weights, (vocab,), device or class_weights.device)


def check_targets(
    targets: Tensor,
    shape: torch.Size,
    vocab: int,
    class_weights: Tensor | None,
    ignore_index: int,
    device: torch.device,
) -> None:
    """Raise ValueError if targets or class weights do not fit logits of (*shape, vocab) on device.

    On a CPU in eager mode, a target outside the vocabulary is an IndexError.
    """
    _check_tensor("targets", targets, shape, device, torch.int64)
    check_classes(vocab, class_weights, device)
    if targets.device.type == "cpu" and not torch.compiler.is_compiling() and targets.numel():
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
        if wrong.any():
            position = int(wrong.flatten().nonzero()[0])
            raise IndexError(
                f"cross entropy: target {int(targets.flatten()[position])} at flat position "
                f"{position} is outside the vocabulary of {vocab} and is not "
                f"ignore_index={ignore_index}"
            )


def check_alternatives(classes: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Return the alternatives of tokens as (rows, k).

    Raises:
        ValueError: they do not fit the targets.
        IndexError: one is outside the vocabulary, on CPU in eager mode.
    """
    count = classes.shape[-1] if classes.dim() else 0
    shape = (*targets.shape, max(count, 1))
    _check_tensor("alternatives", classes, shape, targets.device, torch.int64)
    if classes.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = classes >= vocab
        if wrong.any():
            raise IndexError(
                f"cross entropy: alternative {int(classes[wrong][0])} is outside the vocabulary of "
                f"{vocab}"
            )
    return classes.reshape(targets.numel(), count)


def checked_token_weights(token_weights: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the weights of tokens, 0 at ignored targets; raise if they do not fit the targets."""
    _check_tensor("token_weights", token_weights, targets.shape, targets.device)
    return token_weights.detach().masked_fill(targets == ignore_index, 0)


def loss_divisor(targets: Tensor, options: LossOptions, dtype: torch.dtype) -> Tensor:
    """Return the divisor of the summed loss, as a scalar tensor on the targets' device."""
    divisor = given_divisor(options.reduction, options.normalizer, targets.device, dtype)
    if divisor is None:
        return target_weight_sum(targets, options.class_weights, options.ignore_index, dtype)
    return divisor


def given_divisor(
    reduction: str, normalizer: float | Tensor | None, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Return the divisor as a scalar tensor, or None if it is the sum of the targets' weights."""
    if isinstance(normalizer, Tensor):
        total = normalizer.detach().to(device, dtype, non_blocking=True)
        # If all targets of all batches are ignored, the normalizer is 0; the loss is then 0 / 1.
        return torch.where(total == 0, 1.0, total)
    if reduction == "sum" or normalizer is not None:
        # Fill it on the device: a copy from the host would cost a host synchronisation.
        return torch.full((), normalizer or 1.0, dtype=dtype, device=device)
    return None


def target_weight_sum(
    targets: Tensor, class_weights: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum of the targets' class weights as a scalar, or 1 if the sum is 0.

    Without class weights, each target that is not ignored has weight 1.
    """
    if class_weights is None:
        return (targets != ignore_index).sum().clamp_(min=1).to(dtype)
    total = target_weights(targets, class_weights, ignore_index).to(dtype).sum()
    return torch.where(total == 0, 1.0, total)


def target_weights(targets: Tensor, class_weights: Tensor, ignore_index: int) -> Tensor:
    """Return the class weight of each target (rows); 0 if ignored or outside the vocabulary."""
    valid = (targets != ignore_index) & (targets >= 0) & (targets < len(class_weights))
    return torch.where(valid, class_weights[torch.where(valid, targets, 0)], 0.0)


class TokenStats(NamedTuple):
    """Per-token statistics; 0 if the token is ignored, and None if they were not asked for.

    Floats are float32, or float64 for float64 logits. p is softmax(t).
    """

    log_probs: Tensor | None = None  # (rows) log p of the target
    entropy: Tensor | None = None  # (rows) entropy of p in nats
    correct: Tensor | None = None  # (rows) bool: no logit is higher, nor equal at a lower index
    sum_sq_probs: Tensor | None = None  # (rows) sum of p^2; not differentiable
    mean_logits: Tensor | None = None  # (rows) mean of t over the vocabulary; not differentiable
    picked: Tensor | None = None  # (rows, k) int64: given classes, then top_k that forward fills in
    picked_log_probs: Tensor | None = None  # (rows, k) log p of them; 0 for a negative one

    @classmethod
    def empty(cls, rows: int, logits: Tensor, request: TokenRequest) -> "TokenStats | None":
        """Allocate the statistics of `rows` tokens, uninitialised, on the device of `logits`."""
        if request.is_empty:
            return None
        dtype, device = compute_dtype(logits), logits.device
        made = {
            name: torch.empty(rows, dtype=torch.bool if name == "correct" else dtype, device=device)
            for name in request.stats
        }
        if count := request.num_picked:
            picked = torch.zeros((rows, count), dtype=torch.int64, device=device)
            if request.alternatives is not None:
                picked[:, : count - request.top_k] = request.alternatives
            made["picked"] = picked
            made["picked_log_probs"] = torch.empty((rows, count), dtype=dtype, device=device)
        return cls(**made)

    def rows(self, chunk: slice) -> "TokenStats":
        """Return the part of a chunk of tokens."""
        return TokenStats(*(None if x is None else x[chunk] for x in self))

    def fill_likeliest(self, logits: Tensor, top_k: int) -> None:
        """Write the classes of the top_k highest logits of each row behind the given classes."""
        if top_k:
            assert self.picked is not None
            self.picked[:, self.picked.shape[1] - top_k :] = logits.topk(top_k, dim=-1).indices

    def tensors(self) -> list[Tensor]:
        """Return the fields that are not None, in their order."""
        return [x for x in self if x is not None]

    def without_gradient(self) -> list[Tensor]:
        """Return the fields that are not None and are not differentiable."""
        fixed = self.correct, self.sum_sq_probs, self.mean_logits, self.picked
        return [x for x in fixed if x is not None]


class OutputGrads(NamedTuple):
    """The upstream gradients of each row, and what their formulas need from forward."""

    loss: Tensor  # (rows), or (1,) if it is the same for all rows
    stats: TokenStats = TokenStats()  # of each statistic; None has no gradient
    values: TokenStats = TokenStats()  # from forward: entropy and picked

    def rows(self, chunk: slice) -> "OutputGrads":
        """Return the upstream gradients of a chunk of tokens."""
        loss = self.loss if self.loss.numel() == 1 else self.loss[chunk]
        return OutputGrads(loss, self.stats.rows(chunk), self.values.rows(chunk))


def output_grads(
    grad_loss: Tensor | None,
    names: Sequence[str],
    grads: Sequence[Tensor | None],
    values: TokenStats,
    lse: Tensor,
) -> OutputGrads | None:
    """Pack the upstream gradients of each row for `cross_entropy_rows`; None if there are none.

    Args: grads: of the statistics with these names; values: entropy and picked.
    """
    given = {name: grad.contiguous() for name, grad in zip(names, grads) if grad is not None}
    if grad_loss is None and not given:
        return None
    loss = lse.new_zeros(1) if grad_loss is None else grad_loss.contiguous()
    return OutputGrads(loss, TokenStats(**given), values)


class CrossEntropyOutput(NamedTuple):
    """The output of the cross entropy ops, in float32, or in float64 for float64 inputs."""

    loss: Tensor  # scalar, or (...) with reduction "none"; it includes the z-loss
    z_loss: Tensor  # the part of loss that is the z-loss, not differentiable
    token_loss: Tensor  # (...) the loss of each token; with reduction "none" the same as loss
    log_probs: Tensor | None = None  # (...) log softmax(logits) at the target, 0 if ignored
    entropy: Tensor | None = None  # (...) entropy of softmax(logits) in nats, 0 if ignored
    # (...) bool: the target has the highest logit, and the lowest index among equal logits.
    correct: Tensor | None = None
    # The next two are never differentiable.
    sum_sq_probs: Tensor | None = None  # (...) sum of softmax(logits)^2, 0 if ignored
    mean_logits: Tensor | None = None  # (...) mean of the logits over the classes, 0 if ignored
    alternative_log_probs: Tensor | None = None  # (..., k) log softmax(logits) at `alternatives`
    top_ids: Tensor | None = None  # (..., top_k) int64, the classes with the highest logits
    top_log_probs: Tensor | None = None  # (..., top_k) log softmax(logits) at top_ids


def token_output(
    loss: Tensor, z_loss: Tensor, token_loss: Tensor, request: TokenRequest, stats: Iterable[Tensor]
) -> CrossEntropyOutput:
    """Return the output with the statistics that were asked for, given in the request's order."""
    made = dict(zip(request.names, stats))
    given = request.num_picked - request.top_k
    picked, log_probs = made.pop("picked", None), made.pop("picked_log_probs", None)
    if log_probs is not None and request.alternatives is not None:
        made["alternative_log_probs"] = log_probs[..., :given].clone()  # FSDP2 warns of views
    if picked is not None and log_probs is not None and request.top_k:
        made["top_ids"] = picked[..., given:]
        made["top_log_probs"] = log_probs[..., given:].clone()
    return CrossEntropyOutput(loss, z_loss, token_loss, **made)


def reduce_tokens(tokens: CrossEntropyOutput, divisor: Tensor) -> CrossEntropyOutput:
    """Turn the output of reduction "none" into that of "mean", with loss = sum(loss) / divisor.

    Only this loss is differentiable.
    """
    loss, z_loss, _, *stats = tokens
    detached = [None if x is None else x.detach() for x in stats]
    loss_sum, z_loss_sum = loss.sum() / divisor, z_loss.sum() / divisor
    return CrossEntropyOutput(loss_sum, z_loss_sum, loss.detach(), *detached)
