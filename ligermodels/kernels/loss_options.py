"""Options of the cross entropy ops, checks of them, and types that the ops share."""

from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict

from ligermodels.kernels.checks import check_count
from ligermodels.kernels.dtypes import compute_dtype

REDUCTIONS = ("none", "sum", "mean")


class LogProbOptions(TypedDict, total=False):
    """Keyword arguments of `linear_log_probs`, except `entropy`. See its docstring."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    chunk_size: int | None
    max_scratch_bytes: int | None
    skip_ignored: bool
    max_valid: int | None


class LossOptions(LogProbOptions, total=False):
    """Keyword arguments of `linear_cross_entropy`. See its docstring."""

    reduction: str
    normalizer: float | Tensor | None
    label_smoothing: float
    z_loss: float
    class_weights: Tensor | None
    return_token_stats: bool


LOG_PROB_OPTIONS = LogProbOptions.__optional_keys__
LOSS_OPTIONS = LossOptions.__optional_keys__


class CrossEntropyOptions(NamedTuple):
    """Numbers in the formula of the loss. `linear_cross_entropy` explains each."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


class ChunkOptions(NamedTuple):
    """How a loss head computes its loss. These options change the loss only by rounding."""

    chunk_size: int | None = None
    max_scratch_bytes: int | None = None
    skip_ignored: bool = False
    max_valid: int | None = None


def split_options(given: LossOptions) -> tuple[CrossEntropyOptions, ChunkOptions]:
    """Check the given options, add defaults and split them into the two groups.

    Raises:
        ValueError: an option has a value that is wrong for every call.
    """
    options = check_options(
        CrossEntropyOptions(*_values(given, CrossEntropyOptions)),
        given.get("reduction", "mean"),
        given.get("normalizer"),
        return_token_stats=given.get("return_token_stats", False),
    )
    return options, check_chunk_options(*_values(given, ChunkOptions))


def _values(given: LossOptions, group: type[CrossEntropyOptions] | type[ChunkOptions]) -> list:
    return [given.get(name, group._field_defaults[name]) for name in group._fields]


def check_options(
    options: CrossEntropyOptions,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    **switches: bool,
) -> CrossEntropyOptions:
    """Return the options as Python numbers; raise ValueError for a value wrong for every call."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"cross entropy: {name}={value!r}; expected True or False")
    ignore_index, label_smoothing, z_loss, softcap, logit_scale = options
    whole = isinstance(ignore_index, (int, Integral)) and not isinstance(ignore_index, bool)
    if not whole or not -(2**63) <= ignore_index < 2**63:
        raise ValueError(
            f"cross entropy: ignore_index={ignore_index!r}; expected an integer of 64 bits"
        )
    ignore_index = int(ignore_index)
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
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross entropy: reduction={reduction!r}; expected one of {REDUCTIONS}")
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    if normalizer is None:
        return options
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
    return options


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


def check_chunk_options(
    chunk_size: int | None,
    max_scratch_bytes: int | None,
    skip_ignored: bool,
    max_valid: int | None,
) -> ChunkOptions:
    """Return the options as Python ints; raise ValueError for a value wrong for every call."""
    if not isinstance(skip_ignored, bool):
        raise ValueError(f"cross entropy: skip_ignored={skip_ignored!r}; expected True or False")
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
    return ChunkOptions(chunk_size, max_scratch_bytes, skip_ignored, max_valid)


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


def loss_divisor(
    targets: Tensor,
    reduction: str,
    normalizer: float | Tensor | None,
    class_weights: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the divisor of the summed loss, as a scalar tensor on the targets' device."""
    divisor = given_divisor(reduction, normalizer, targets.device, dtype)
    if divisor is None:
        return target_weight_sum(targets, class_weights, ignore_index, dtype)
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
    """Statistics of each token besides its loss, each of (rows); 0 if the token is ignored."""

    log_probs: Tensor  # log softmax(t) at the target, float32, or float64 for float64 logits
    entropy: Tensor  # entropy of softmax(t) in nats, in the dtype of log_probs
    correct: Tensor  # bool: the target has the highest logit, and the lowest index among equals

    @classmethod
    def empty(cls, rows: int, logits: Tensor) -> "TokenStats":
        """Allocate the statistics of `rows` tokens, uninitialised, on the device of `logits`."""
        dtype, device = compute_dtype(logits), logits.device
        return cls(
            torch.empty(rows, dtype=dtype, device=device),
            torch.empty(rows, dtype=dtype, device=device),
            torch.empty(rows, dtype=torch.bool, device=device),
        )


class OutputGrads(NamedTuple):
    """The upstream gradients of the loss, log-probability and entropy of each row."""

    loss: Tensor  # (rows), or (1,) if it is the same for all rows
    log_probs: Tensor | None = None  # (rows)
    entropy: Tensor | None = None  # (rows)
    entropy_value: Tensor | None = None  # (rows) entropy from forward; its gradient depends on it

    def rows(self, chunk: slice) -> "OutputGrads":
        """Return the upstream gradients of a chunk of tokens."""
        loss = self.loss if self.loss.numel() == 1 else self.loss[chunk]
        if self.log_probs is None and self.entropy is None:
            return OutputGrads(loss)
        return OutputGrads(loss, *(None if x is None else x[chunk] for x in self[1:]))
