"""Choose the next token from logits. All of it is on the device, so a CUDA graph can hold it.

Shape legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypedDict

import torch
from torch import Tensor

from ligermodels.errors import LigerError, short_repr
from ligermodels.kernels.checks import check_count

# At this temperature a draw takes the likeliest token. Closer to 0, the logits would overflow.
_LEAST_TEMPERATURE = 1e-20
_LARGEST = torch.finfo(torch.float32).max


class RuleOptions(TypedDict, total=False):
    """The options of `generate` that choose tokens and end rows: those of `Sampling`, by name."""

    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    eos_token_id: int | Iterable[int] | None
    pad_token_id: int | None


@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is chosen: the likeliest one, or a random draw.

    The steps are in this order: bias, penalties, temperature, top-k, top-p, min-p.

    Attributes:
        do_sample: whether to draw the token. If False, the likeliest token is taken.
        temperature: the number that divides the logits. Close to 0, a draw takes the likeliest
            token.
        top_k: how many of the likeliest tokens a draw may choose from. None means all.
        top_p: the sum of probabilities up to which the likeliest tokens are kept. None means all.
        min_p: a draw leaves out tokens that are less likely than min_p times the likeliest one
            (arXiv:2407.01082). None means that it leaves out none.
        repetition_penalty: the number that divides the positive logits and multiplies the negative
            ones of tokens that the row already contains (arXiv:1909.05858, section 4.1).
        presence_penalty: the number that is subtracted from the logits of tokens that were already
            generated in the row.
        logit_bias: numbers that are added to the logits of tokens, {token id: number}. With -inf, a
            token is never chosen.
        stops: the tokens that end a row.
        pad: the token of a row that has ended.
    Raises:
        ValueError: a number is out of range, or it has no effect because the choice is greedy.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stops: Sequence[int] = ()
    pad: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, Real) and 0 < self.temperature < math.inf):
            raise ValueError(
                f"temperature={self.temperature!r}: the temperature must be a finite number above "
                "0; do_sample=False is greedy"
            )
        if self.top_k is not None:
            check_count("generate", "top_k", self.top_k, 1)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 < value <= 1):
                raise ValueError(
                    f"{name}={value!r}: the number must be above 0 and at most 1, or None for all "
                    "tokens"
                )
        if not (isinstance(self.presence_penalty, Real) and math.isfinite(self.presence_penalty)):
            raise ValueError(f"presence_penalty={self.presence_penalty!r}: expected a number")
        filters = (self.temperature, self.top_k, self.top_p, self.min_p)
        if not self.do_sample and filters != (1.0, None, None, None):
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}, "
                f"min_p={self.min_p}: these have no effect on a greedy choice; pass do_sample=True"
            )

    def tempered(self, logits_BV: Tensor) -> Tensor:
        """Return the logits (B, V) divided by the temperature."""
        temperature = min(max(self.temperature, _LEAST_TEMPERATURE), _LARGEST)
        logits_BV = logits_BV / float(temperature)
        return logits_BV.clamp(max=_LARGEST) if temperature < 1 else logits_BV

    def filter(self, logits_BV: Tensor) -> Tensor:
        """Return the logits (B, V) divided by the temperature, with -inf for excluded tokens.

        Top-p keeps the likeliest tokens, up to and including the one with which the sum of their
        probabilities reaches `top_p` (arXiv:1904.09751).
        """
        logits_BV = self.tempered(logits_BV)
        if self.top_k is not None:
            kept = torch.topk(logits_BV, min(self.top_k, logits_BV.shape[-1])).values
            logits_BV = logits_BV.masked_fill(logits_BV < kept[:, -1:], -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ascending, order = logits_BV.sort()
            below = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            below[:, -1] = False
            logits_BV = logits_BV.masked_fill(below.scatter(-1, order, below), -torch.inf)
        if self.min_p is not None:
            least = logits_BV.amax(-1, keepdim=True) + math.log(self.min_p)
            logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
        return logits_BV

    def log_probs(self, logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
        """Return the log-probabilities of tokens (B,), of the logits by the temperature."""
        tempered_BV = self.tempered(logits_BV)
        return tempered_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1) - tempered_BV.logsumexp(-1)

    def next_tokens(self, logits_BV: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return one token for each row of the float32 logits, (B,)."""
        if not self.do_sample:
            return logits_BV.argmax(-1)
        return draw(self.filter(logits_BV).softmax(-1), generator)


def draw(probabilities_BV: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return one token for each row, (B,), and overwrite the probabilities.

    It is the same draw as torch.multinomial's, which would wait for the device.
    """
    waits = torch.empty_like(probabilities_BV).exponential_(generator=generator)
    return probabilities_BV.div_(waits).argmax(-1)


def no_token_error(row: int, step: int) -> LigerError:
    """Return the error for logits from which no token can be chosen."""
    return LigerError(
        f"generate: the logits of row {row} are NaN or infinite, at new token {step} or before, so "
        "that there is no likeliest token; check the weights, and load the model in bfloat16 or "
        "float32 if it is in float16"
    )


class Sampler:
    """The choice of tokens for the rows of a batch, with what it must remember of each row.

    Its tensors are changed in place, so that a CUDA graph that holds a call goes on where the last
    replay stopped.

    Args:
        rule: how a token is chosen.
        batch: B.
        vocab_size: V.
        device: the logits' device.
        generator: the random generator of the draws.
        with_log_probs: whether to compute the log-probabilities of the tokens.

    Attributes:
        stopped_B: which rows have ended.
        failed_B: which rows had NaN or infinity among the logits before they ended.
        log_probs_B: the log-probabilities of the last tokens, or None: float32, of the logits
            divided by the temperature, before biases, penalties and filters; 0 for padding.
    Raises:
        ValueError: logit_bias has a token outside the vocabulary, or NaN or +inf, or forbids all
            tokens, or the generator is on another device.
    """

    def __init__(
        self,
        rule: Sampling,
        batch: int,
        vocab_size: int,
        device: torch.device,
        generator: torch.Generator | None = None,
        with_log_probs: bool = False,
    ) -> None:
        if generator is not None and getattr(generator, "device", device).type != device.type:
            raise ValueError(
                f"generator: it is on {generator.device}, and the model is on {device}; make the "
                "generator on the model's device"
            )
        self.rule, self.generator = rule, generator
        # A table, because torch.isin sorts many ids, which waits for the device.
        is_stop = torch.zeros(vocab_size, dtype=torch.bool)
        is_stop[[token for token in rule.stops if 0 <= token < vocab_size]] = True
        self.is_stop_V = is_stop.to(device)
        self.stopped_B = torch.zeros(batch, dtype=torch.bool, device=device)
        self.failed_B = torch.zeros_like(self.stopped_B)
        self.log_probs_B = torch.zeros(batch, device=device) if with_log_probs else None
        self.bias_V = (
            None if rule.logit_bias is None else _bias(rule.logit_bias, vocab_size, device)
        )
        # The tokens of a row, and those of them that were generated.
        seen = self.stopped_B.new_zeros(batch, vocab_size)
        self.seen_BV = seen if rule.repetition_penalty != 1 else None
        self.new_BV = seen.clone() if rule.presence_penalty else None

    def read(self, row: int, prompt_S: Tensor) -> None:
        """Forget what was in a row, and remember the tokens of a new prompt (S,)."""
        self.stopped_B[row] = False
        self.failed_B[row] = False
        if self.new_BV is not None:
            self.new_BV[row] = False
        if self.seen_BV is not None:
            self.seen_BV[row] = False
            self.seen_BV[row, prompt_S] = True

    def chooses_like(self, other: Sampler) -> bool:
        """Return whether another sampler has the same rule for as many rows."""
        return (
            (self.rule, self.generator) == (other.rule, other.generator)
            and len(self.stopped_B) == len(other.stopped_B)
            and (self.log_probs_B is None) == (other.log_probs_B is None)
        )

    def take(self, other: Sampler) -> None:
        """Take what another sampler with the same rule remembers of its rows."""
        for name, value in vars(other).items():
            if isinstance(value, Tensor):
                getattr(self, name).copy_(value)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Return the next token of each row, (B,), from float32 logits.

        A row whose logits hold NaN or infinity gets some token, and is in `failed_B`.
        """
        broken_B = ~logits_BV.amax(-1).isfinite()
        self.failed_B |= broken_B & ~self.stopped_B
        changed_BV = self.changed(logits_BV)
        if self.rule.do_sample:  # A draw from NaN would have no end.
            changed_BV = changed_BV.masked_fill(broken_B.unsqueeze(1), 0.0)
        tokens_B = self.rule.next_tokens(changed_BV, self.generator)
        if self.log_probs_B is not None:
            found_B = self.rule.log_probs(logits_BV, tokens_B)
            self.log_probs_B.copy_(found_B.masked_fill(self.stopped_B, 0.0))
        self.remember(tokens_B.unsqueeze(1))
        tokens_B = tokens_B.masked_fill(self.stopped_B, self.rule.pad)
        if self.rule.stops:
            self.stopped_B |= self.is_stop_V[tokens_B]
        return tokens_B

    def remember(self, tokens_BN: Tensor) -> None:
        """Add tokens (B, N) to those that the penalties hold for."""
        for given_BV in (self.seen_BV, self.new_BV):
            if given_BV is not None:
                given_BV.scatter_(1, tokens_BN, True)

    def changed(self, logits_BV: Tensor, drafts_K: Tensor | None = None) -> Tensor:
        """Return the logits with biases and penalties.

        Args: drafts_K: the logits are those of one row, before the first draft and after each.
        """
        rule, seen_BV, new_BV = self.rule, self.seen_BV, self.new_BV
        if drafts_K is not None:
            seen_BV, new_BV = _with_drafts(seen_BV, drafts_K), _with_drafts(new_BV, drafts_K)
        if self.bias_V is not None:
            logits_BV = logits_BV + self.bias_V
        if seen_BV is not None:
            penalty = rule.repetition_penalty
            penalised = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
            if penalty < 1:
                penalised = penalised.clamp(max=_LARGEST)
            logits_BV = torch.where(seen_BV, penalised, logits_BV)
        if new_BV is not None:
            logits_BV = logits_BV - new_BV * float(rule.presence_penalty)
        return logits_BV


def _with_drafts(given_1V: Tensor | None, drafts_K: Tensor) -> Tensor | None:
    """Return the tokens that a row has at each draft and after the last, (K + 1, V)."""
    if given_1V is None:
        return None
    given_QV = given_1V.repeat(len(drafts_K) + 1, 1)
    for i in range(len(drafts_K)):
        given_QV[i + 1 :].index_fill_(1, drafts_K[i : i + 1], True)
    return given_QV


def _bias(given: Mapping[int, float], vocab_size: int, device: torch.device) -> Tensor:
    """Return the numbers that are added to the logits, (V,) float32."""
    bias = torch.zeros(vocab_size)
    if not isinstance(given, Mapping):
        raise ValueError(f"logit_bias={short_repr(given)}: expected {{token id: number}}")
    for token, number in given.items():
        is_id = isinstance(token, Integral) and 0 <= token < vocab_size
        if not (is_id and isinstance(number, Real) and number < math.inf):
            raise ValueError(
                f"logit_bias={{{token!r}: {number!r}}}: expected a token id below {vocab_size} "
                "and a number below infinity"
            )
        bias[token] = number
    if not bool((bias > -math.inf).any()):
        raise ValueError("logit_bias: it forbids all tokens; leave at least one")
    return bias.to(device)
