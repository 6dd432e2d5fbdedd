"""Greedy generation with heads that draft the tokens after the next one (arXiv:2401.10774)."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.generation.generation_config import (
    checked_generation_config,
    resolve_eos_token_ids,
    resolve_repetition_penalty,
)
from ligermodels.generation.prompts import Prompts, batch_prompts
from ligermodels.heads.drafting import Heads, check_heads, passes
from ligermodels.kernels.checks import check_count
from ligermodels.models.base import DecoderModel


class DraftResult(NamedTuple):
    """The result of `generate_drafted`."""

    ids: Tensor  # (1, prompt + new) int64; the stop token is kept
    tokens_per_forward: list[int]  # how many new tokens each forward pass gave, the prompt's first


def generate_drafted(
    model: DecoderModel,
    heads: Heads,
    input_ids: Prompts,
    *,
    max_new_tokens: int = 64,
    eos_token_id: int | Iterable[int] | None = None,
    repetition_penalty: float | None = None,
    callback: Callable[[Tensor], object] | None = None,
) -> DraftResult:
    """Continue one prompt with the likeliest tokens, several for each forward pass.

    The tokens are those of greedy `generate`, where rounding does not decide between two logits: a
    pass over several tokens rounds in another way than passes over one token.

    Args:
        model, heads: the body, and heads or multi-token prediction modules trained on it.
        input_ids: one prompt, as `generate` takes it.
        max_new_tokens, eos_token_id: as in `generate`.
        repetition_penalty: 1, which means none. If generation_config.json has another one, the
            default is an error, because these would not be the tokens of `generate`.
        callback: a function that is called after every pass with its new tokens (new,).
    Raises:
        ValueError: there is more than one prompt, or an argument is wrong.
    """
    ids, drafted = drafted_passes(
        model,
        heads,
        input_ids,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        repetition_penalty=repetition_penalty,
    )
    found = [ids[0]]
    for new in drafted:
        found.append(new)
        if callback is not None:
            callback(new)
    return DraftResult(torch.cat(found)[None], [len(new) for new in found[1:]])


def drafted_passes(
    model: DecoderModel,
    heads: Heads,
    input_ids: Prompts,
    *,
    max_new_tokens: int = 64,
    eos_token_id: int | Iterable[int] | None = None,
    repetition_penalty: float | None = None,
) -> tuple[Tensor, Iterator[Tensor]]:
    """Check the arguments of `generate_drafted`.

    Returns: the prompt (1, seq), and an iterator over the new tokens (new,) of each forward pass.
    """
    check_count("generate", "max_new_tokens", max_new_tokens, 1)
    defaults = checked_generation_config(model)
    penalty = resolve_repetition_penalty(repetition_penalty, defaults)
    if penalty != 1.0:
        raise ValueError(
            f"generate with heads: repetition_penalty={penalty:g}, given or from "
            "generation_config.json; heads do not support a penalty; pass repetition_penalty=1.0"
        )
    stops = resolve_eos_token_ids(eos_token_id, defaults, model.config)
    ids, _ = batch_prompts(input_ids, None, 0, model.config.vocab_size)
    if len(ids) != 1:
        raise ValueError(f"generate with heads: got {len(ids)} prompts; expected one")
    check_heads(model, heads)
    ids = ids.to(model.rotary_emb.inv_freq.device)
    return ids, passes(model, heads, ids, max_new_tokens, stops)
