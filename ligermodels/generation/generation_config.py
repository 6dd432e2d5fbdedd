"""Resolve generation settings from arguments, generation_config.json and the model's config."""

import operator
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ligermodels.converters.files import GENERATION_CONFIG_NAME, is_token_id
from ligermodels.errors import CheckpointError, did_you_mean, short_repr
from ligermodels.generation.sampling import Sampling
from ligermodels.kernels.checks import check_count
from ligermodels.models.base import DecoderModel


def _are_token_ids(value: Any) -> bool:
    return all(map(is_token_id, value if isinstance(value, list) else [value]))


_MAX_PENALTY = 10**6
_PENALTY = f"a positive number of at most {_MAX_PENALTY}"


def _is_penalty(value: Any) -> bool:
    return isinstance(value, (int, float)) and value is not True and 0 < value <= _MAX_PENALTY


# The keys that are read. Each has a function that tests a value, and the words for a good value.
_READ: dict[str, tuple[Callable[[Any], bool], str]] = {
    "eos_token_id": (_are_token_ids, "an integer or a list of integers"),
    "pad_token_id": (is_token_id, "an integer"),
    "repetition_penalty": (_is_penalty, _PENALTY),
}
# The keys with which transformers chooses other tokens, also in a greedy search.
_NOT_IMPLEMENTED = (
    *("num_beams", "penalty_alpha", "dola_layers", "guidance_scale", "sequence_bias"),
    *("no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "stop_strings", "watermarking_config"),
)
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, [], {})


def _checked_config(model: DecoderModel) -> dict[str, Any]:
    """Return the generation_config.json that a model was loaded with, or {} if it had none.

    This warns of settings that are not implemented.

    Raises:
        CheckpointError: a value that is used has the wrong type.
    """
    found, path = model.source.generation_config, model.source.folder or Path()
    path /= GENERATION_CONFIG_NAME
    for key, (holds, expected) in _READ.items():
        if found.get(key) is not None and not holds(found[key]):
            raise CheckpointError(
                f"{path}: {key!r} is {short_repr(found[key])}, expected {expected}"
            )
    if left_out := [name for name in _NOT_IMPLEMENTED if found.get(name) not in _NEUTRAL]:
        warnings.warn(
            f"{path}: these settings are not implemented and have no effect: {', '.join(left_out)}",
            stacklevel=5,  # This is the caller of `generate`.
        )
    return found


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an option that there is not, as Python does, but with a suggestion."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def resolve_rule(
    model: DecoderModel,
    *,
    repetition_penalty: float | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    **rule: Any,
) -> Sampling:
    """Return how tokens are chosen, which of them end a row, and the token for padding.

    What is not given is that of generation_config.json, and then that of the model's config. After
    that, padding is the first stop token or 0.

    Args: rule: further arguments of `Sampling`. The others are as in `generate`.
    Raises: as `generate`, of these arguments.
    """
    config, file, vocab_size = model.config, _checked_config(model), model.config.vocab_size
    penalty = _first(repetition_penalty, file.get("repetition_penalty"), 1.0)
    if not _is_penalty(penalty):
        raise ValueError(
            f"repetition_penalty={short_repr(penalty)}: the penalty must be {_PENALTY}; 1 means "
            "none"
        )
    found = _first(eos_token_id, file.get("eos_token_id"), config.eos_token_id, [])
    try:
        stops = [operator.index(token) for token in ([found] if isinstance(found, int) else found)]
    except TypeError:
        raise ValueError(f"eos_token_id={found!r}: expected a token id or several ids") from None
    if beyond := [token for token in stops if abs(token) >= 2**63]:
        raise ValueError(
            f"eos_token_id={short_repr(beyond[0])}: expected a token id of at most 64 bits"
        )
    if pad_token_id is not None:
        pad = check_count("generate", "pad_token_id", pad_token_id, 0)
        if pad >= vocab_size:
            raise ValueError(
                f"pad_token_id={pad}: the id is outside the vocabulary of {vocab_size} tokens"
            )
    else:
        # In old configs -1 means no token. Then 0 works too: the padding of prompts is masked.
        named = (file.get("pad_token_id"), config.pad_token_id, *stops)
        pad = next((i for i in named if i is not None and 0 <= i < vocab_size), 0)
    return Sampling(**rule, repetition_penalty=float(penalty), stops=stops, pad=pad)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
