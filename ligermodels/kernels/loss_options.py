"""Options of the cross entropy ops, checks of them, and types that the ops share."""

from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict

from ligermodels.kernels.checks import check_count
from ligermodels.kernels.dtypes import compute_dtype

REDUCTIONS = ("none", "sum", "mean")

TOKEN_STATS = ("log_probs", "entropy", "correct", "sum_sq_probs", "mean_logits")
"""The statistics of each token that `return_token_stats` may name; True means the first three."""


class LossKeywords(TypedDict, total=False):
    """Keyword arguments of `linear_cross_entropy` that a head may have defaults of."""

    reduction: str
    normalizer: float | Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    temperature: float
    class_weights: Tensor | None
    chunk_size: int | None
    max_scratch_bytes: int | None
    skip_ignored: bool
    max_valid: int | None
    weight_grad_in_forward: bool
    return_token_stats: bool | Collection[str]
    top_k: int


LOSS_OPTIONS = LossKeywords.__optional_keys__

LOG_PROB_OPTIONS = frozenset(
    "ignore_index softcap logit_scale temperature chunk_size max_scratch_bytes skip_ignored "
    "max_valid".split()
)
"""The options that `linear_log_probs` has, too, besides `entropy`."""


class CrossEntropyOptions(NamedTuple):
    """Numbers in the formula of the loss. `linear_cross_entropy` explains each."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def at_temperature(self, temperature: float) -> "CrossEntropyOptions":
        """Return the options with which the logits t become t / temperature.

        c tanh(s x / c) / T is (c / T) tanh((s / T) x / (c / T)), so no kernel knows a temperature.
        """
        if temperature == 1:
            return self
        softcap = None if self.softcap is None else self.softcap / temperature
        return self._replace(softcap=softcap, logit_scale=self.logit_scale / temperature)


class DivergenceOptions(NamedTuple):
    """Numbers in the formula of a divergence, as `reference.divergence_rows` explains it."""

    beta: float | None  # None for the total variation
    softcap: float | None = None
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_scale: float = 1.0


class ChunkOptions(NamedTuple):
    """Options of a loss head's computation, which change the loss only by rounding."""

    chunk_size: int | None = None
    max_scratch_bytes: int | None = None
    skip_ignored: bool = False
    max_valid: int | None = None
    weight_grad_in_forward: bool = False


class LossOptions(NamedTuple):
    """All options of one call of the loss head, checked. `of` makes them from keywords."""

    formula: CrossEntropyOptions
    chunking: ChunkOptions
    request: "TokenRequest"
    reduction: str
    normalizer: float | Tensor | None
    class_weights: Tensor | None
    token_weights: Tensor | None

    @classmethod
    def of(
        cls,
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
    ) -> "LossOptions":
        """Check the keywords of `linear_cross_entropy`, as far as they do not depend on a shape.

        Raises:
            ValueError: an option has a value that is wrong for every call; the message names it.
        """
        formula = _formula(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
        _check_reduction(reduction, normalizer)
        chunking = _chunking(
            chunk_size, max_scratch_bytes, skip_ignored, max_valid, weight_grad_in_forward
        )
        return cls(
            formula,
            chunking,
            token_request(return_token_stats, top_k, alternatives),
            reduction,
            normalizer,
            class_weights,
            token_weights,
        )

    @property
    def ignore_index(self) -> int:
        """The target that is ignored."""
        return self.formula.ignore_index


def check_switches(**switches: bool) -> None:
    """Raise ValueError unless each is True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"cross entropy: {name}={value!r}; expected True or False")


def _formula(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> CrossEntropyOptions:
    """Return the options at the temperature, as Python numbers."""
    temperature = _number("temperature", temperature)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"cross entropy: temperature={temperature} must be positive and finite")
    whole = isinstance(ignore_index, (int, Integral)) and not isinstance(ignore_index, bool)
    if not whole or not -(2**63) <= ignore_index < 2**63:
        raise ValueError(
            f"cross entropy: ignore_index={ignore_index!r}; expected an integer of 64 bits"
        )
    label_smoothing = _number("label_smoothing", label_smoothing)
    z_loss, logit_scale = _number("z_loss", z_loss), _number("logit_scale", logit_scale)
    softcap = None if softcap is None else _number("softcap", softcap)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cross entropy: label_smoothing={label_smoothing} must be in [0, 1]")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"cross entropy: z_loss={z_loss} must not be negative or infinite")
    if not 0 < logit_scale < float("inf"):
        raise ValueError(f"cross entropy: logit_scale={logit_scale} must be positive and finite")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"cross entropy: softcap={softcap} must be positive and finite, or None")
    options = CrossEntropyOptions(int(ignore_index), label_smoothing, z_loss, softcap, logit_scale)
    return options.at_temperature(temperature)


def _check_reduction(reduction: str, normalizer: float | Tensor | None) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross entropy: reduction={reduction!r}; expected one of {REDUCTIONS}")
    if normalizer is None:
        return
    if reduction != "mean":
        raise ValueError(
            f"cross entropy: normalizer requires reduction='mean', but reduction={reduction!r}; "
            "remove the normalizer"
        )
    if isinstance(normalizer, Tensor):
        if normalizer.dim() != 0 or normalizer.is_complex():
            raise ValueError(
                f"cross entropy: normalizer {tuple(normalizer.shape)} {normalizer.dtype}; expected "
                "a number or a real 0-d tensor"
            )
    elif (
        isinstance(normalizer, bool)
        or not isinstance(normalizer, Real)  # also numpy's numbers
        or not 0 <= normalizer < float("inf")
    ):
        raise ValueError(
            f"cross entropy: normalizer={normalizer!r}; expected a number >= 0 (0 counts as 1)"
        )


def _number(name: str, value: float) -> float:
    if isinstance(value, Tensor):
        raise ValueError(
            f"cross entropy: {name} is a tensor; expected a number. To train a scale of the "
            "logits, multiply hidden by it"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, Real) and not isinstance(value, bool):  # numpy's numbers
        return float(value)
    raise ValueError(f"cross entropy: {name}={value!r}; expected a number")


def _chunking(
    chunk_size: int | None,
    max_scratch_bytes: int | None,
    skip_ignored: bool,
    max_valid: int | None,
    weight_grad_in_forward: bool,
) -> ChunkOptions:
    """Return the options as Python ints; raise ValueError for a value wrong for every call."""
    check_switches(skip_ignored=skip_ignored, weight_grad_in_forward=weight_grad_in_forward)
    if chunk_size is not None:
        chunk_size = check_count("loss head", "chunk_size", chunk_size, 1)
    if max_scratch_bytes is not None:
        max_scratch_bytes = check_count("loss head", "max_scratch_bytes", max_scratch_bytes, 1)
    if max_valid is not None:
        if not skip_ignored:
            raise ValueError(
                f"loss head: max_valid={max_valid} bounds the rows taken under skip_ignored, but "
                "skip_ignored is False; set skip_ignored=True"
            )
        max_valid = check_count("loss head", "max_valid", max_valid, 0)
    return ChunkOptions(
        chunk_size, max_scratch_bytes, skip_ignored, max_valid, weight_grad_in_forward
    )


def check_classes(vocab: int, class_weights: Tensor | None) -> None:
    """Raise ValueError if the vocabulary is empty or class_weights do not fit it."""
    if vocab == 0:
        raise ValueError("cross entropy: the vocabulary has 0 classes; expected 1 or more")
    if class_weights is None:
        return
    if class_weights.shape != (vocab,):
        raise ValueError(
            f"cross entropy: class_weights {tuple(class_weights.shape)}; expected ({vocab},)"
        )
    if class_weights.is_complex():
        raise ValueError(
            f"cross entropy: class_weights are {class_weights.dtype}; expected real numbers"
        )


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


class TokenRequest(NamedTuple):
    """The per-token statistics that a call returns besides the losses."""

    stats: tuple[str, ...] = ()  # names of TOKEN_STATS, in its order
    alternatives: Tensor | None = (
        None  # (rows, k) int64: classes whose log-probability to return; negative ones are padding
    )
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


def token_request(
    return_token_stats: bool | Collection[str], top_k: int, alternatives: Tensor | None = None
) -> TokenRequest:
    """Check which per-token statistics a call asks for.

    Raises:
        ValueError: return_token_stats is not True, False or names of TOKEN_STATS, or top_k is not
            a number of classes.
    """
    if isinstance(return_token_stats, bool):
        names: tuple[str, ...] = TOKEN_STATS[:3] if return_token_stats else ()
    else:
        given = return_token_stats
        known = isinstance(given, Collection) and not isinstance(given, str)
        if not known or any(name not in TOKEN_STATS for name in given):
            raise ValueError(
                f"cross entropy: return_token_stats={given!r}; expected True, False or some of "
                f"the names {', '.join(TOKEN_STATS)}"
            )
        names = tuple(name for name in TOKEN_STATS if name in given)
    return TokenRequest(names, alternatives, check_count("cross entropy", "top_k", top_k, 0))


class TokenStats(NamedTuple):
    """Per-token statistics; 0 if the token is ignored, and None if they were not asked for.

    Floats are float32, or float64 for float64 logits. p is softmax(t).
    """

    log_probs: Tensor | None = None  # (rows) log p of the target
    entropy: Tensor | None = None  # (rows) entropy of p in nats
    correct: Tensor | None = None  # (rows) bool: no logit is higher, nor equal at a lower index
    sum_sq_probs: Tensor | None = None  # (rows) sum of p^2
    mean_logits: Tensor | None = None  # (rows) mean of t over the vocabulary
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
        return [x for x in (self.correct, self.picked) if x is not None]


class OutputGrads(NamedTuple):
    """The upstream gradients of each row, and what their formulas need from forward."""

    loss: Tensor  # (rows), or (1,) if it is the same for all rows
    stats: TokenStats = TokenStats()  # of each statistic; None has no gradient
    values: TokenStats = TokenStats()  # from forward: entropy, sum_sq_probs and picked

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

    Args: grads: of the statistics with these names; values: entropy, sum_sq_probs and picked.
    """
    given = {name: grad.contiguous() for name, grad in zip(names, grads) if grad is not None}
    if grad_loss is None and not given:
        return None
    loss = lse.new_zeros(1) if grad_loss is None else grad_loss.contiguous()
    return OutputGrads(loss, TokenStats(**given), values)
