"""Drafts of the tokens after the next one, and the forward passes that check them.

Each pass checks the drafts of the pass before: those that greedy generation would have chosen are
accepted, so the tokens are those of greedy generation, in fewer passes (arXiv:2401.10774).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ligermodels.heads.medusa import MedusaHeads
from ligermodels.heads.multi_token import MultiTokenModel
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel

Heads = MedusaHeads | MultiTokenModel


def check_heads(model: DecoderModel, heads: Heads) -> None:
    """Raise ValueError unless the heads fit the model."""
    if isinstance(heads, MultiTokenModel) and heads.model is not model:
        raise ValueError("generate with heads: the modules belong to another model")
    if isinstance(heads, MedusaHeads):
        theirs = heads.head(0).vocab_size, heads.hidden_size
        own = model.head.vocab_size, model.config.hidden_size
        if theirs != own:
            raise ValueError(
                f"generate with heads: they are for a vocabulary of {theirs[0]} and hidden states "
                f"of {theirs[1]}, but the model has {own[0]} and {own[1]}"
            )


@torch.no_grad()
def passes(
    model: DecoderModel, heads: Heads, prompt: Tensor, max_new_tokens: int, stops: list[int]
) -> Iterator[Tensor]:
    """Yield the new tokens (new,) of each forward pass, at least one.

    Args: prompt: (1, seq) int64; max_new_tokens: of all passes; stops: the ids that end the text.
    """
    ahead, left = heads.num_drafts, max_new_tokens
    # A pass may write this many tokens that are rejected.
    longest = prompt.shape[1] + max_new_tokens + ahead
    cache = KVCache.of(model, 1, longest, extra=ahead)
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
