"""Greedy generation with heads that draft the tokens after the next one (arXiv:2401.10774).

Each pass checks the drafts of the pass before: those that greedy generation would have chosen are
accepted, so the tokens are those of greedy generation, in fewer passes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ligermodels.generation.generation_config import (
    checked_generation_config,
    resolve_eos_token_ids,
    resolve_repetition_penalty,
)
from ligermodels.generation.models import DraftHeads, LanguageModel
from ligermodels.generation.prompts import Prompts, batch_prompts
from ligermodels.kernels.checks import check_count
from ligermodels.layers.kv_cache import KVCache


@dataclass(frozen=True)
class DraftOptions:
    """The options of a generation with heads.

    Attributes:
        max_new_tokens, eos_token_id: as in `generate`.
        repetition_penalty: 1, which means none. If generation_config.json has another one, the
            default is an error, because these would not be the tokens of `generate`.
    """

    max_new_tokens: int = 64
    eos_token_id: int | Iterable[int] | None = None
    repetition_penalty: float | None = None


class DraftResult(NamedTuple):
    """The result of `generate_drafted`."""

    ids: Tensor  # (1, prompt + new) int64; the stop token is kept
    tokens_per_forward: list[int]  # how many new tokens each forward pass gave, the prompt's first


def generate_drafted(
    model: LanguageModel,
    heads: DraftHeads,
    input_ids: Prompts,
    *,
    callback: Callable[[Tensor], object] | None = None,
    **options: Any,
) -> DraftResult:
    """Continue one prompt with the likeliest tokens, several for each forward pass.

    The tokens are those of greedy `generate`, where rounding does not decide between two logits: a
    pass over several tokens rounds in another way than passes over one token.

    Args:
        model, heads: the body, and heads or multi-token prediction modules trained on it.
        input_ids: one prompt, as `generate` takes it.
        callback: a function that is called after every pass with its new tokens (new,).
        options: those of `DraftOptions`.
    Raises:
        ValueError: there is more than one prompt, or an argument is wrong.
    """
    ids, passes = drafted_passes(model, heads, input_ids, DraftOptions(**options))
    found = [ids[0]]
    for new in passes:
        found.append(new)
        if callback is not None:
            callback(new)
    return DraftResult(torch.cat(found)[None], [len(new) for new in found[1:]])


def drafted_passes(
    model: LanguageModel, heads: DraftHeads, input_ids: Prompts, options: DraftOptions
) -> tuple[Tensor, Iterator[Tensor]]:
    """Check the arguments of `generate_drafted`.

    Returns: the prompt (1, seq), and an iterator over the new tokens (new,) of each forward pass.
    """
    check_count("generate", "max_new_tokens", options.max_new_tokens, 1)
    defaults = checked_generation_config(model)
    penalty = resolve_repetition_penalty(options.repetition_penalty, defaults)
    if penalty != 1.0:
        raise ValueError(
            f"generate with heads: repetition_penalty={penalty:g}, given or from "
            "generation_config.json; heads do not support a penalty; pass repetition_penalty=1.0"
        )
    stops = resolve_eos_token_ids(options.eos_token_id, defaults, model.config)
    ids, _ = batch_prompts(input_ids, None, 0, model.config.vocab_size)
    if len(ids) != 1:
        raise ValueError(f"generate with heads: got {len(ids)} prompts; expected one")
    heads.check_model(model)
    ids = ids.to(model.rotary_emb.inv_freq.device)
    return ids, _passes(model, heads, ids, options.max_new_tokens, stops)


@torch.no_grad()
def _passes(
    model: LanguageModel, heads: DraftHeads, prompt: Tensor, max_new_tokens: int, stops: list[int]
) -> Iterator[Tensor]:
    """Yield the new tokens (new,) of each forward pass, at least one.

    Args: prompt: (1, seq) int64; max_new_tokens: of all passes; stops: the ids that end the text.
    """
    ahead, left = heads.num_drafts, max_new_tokens
    # A pass may write this many tokens that are rejected.
    longest = prompt.shape[1] + max_new_tokens + ahead
    cache = KVCache.of(cast(nn.Module, model), 1, longest, extra=ahead)
    draft = heads.drafter(longest)
    fed, known = prompt, prompt.shape[1]  # the first `known` of the tokens fed are not drafts
    while True:
        hidden = model(fed, cache=cache)
        chosen = model.head.logits(hidden[:, known - 1 :]).argmax(-1)[0]
        agrees = (chosen[:-1] == fed[0, known:]).long()
        accepted = int(agrees.cumprod(0).sum())
        cache.truncate(cache.length - (len(agrees) - accepted))
        new = _until_stop(chosen[: accepted + 1], stops, left)
        yield new
        left -= len(new)
        if not left or int(new[-1]) in stops:
            return
        # The tokens that were fed and are right, and the token after each of them.
        right = known + accepted
        after = torch.cat((fed[0, 1:right], new[-1:]))[None]
        fed = torch.cat((new[-1:][None], draft(hidden[:, :right], after)), 1)
        known = 1


def _until_stop(tokens: Tensor, stops: list[int], most: int) -> Tensor:
    """Return the tokens up to the first stop token, and at most `most`."""
    tokens = tokens[:most]
    for i, token in enumerate(tokens.tolist()):
        if token in stops:
            return tokens[: i + 1]
    return tokens
