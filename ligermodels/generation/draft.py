"""Generation in passes that check drafts of the next tokens, several tokens for each pass.

Heads on the model (arXiv:2401.10774, arXiv:2412.19437) or a small model draft the tokens. A pass of
the model over all of them says which it would have chosen itself, so the tokens are those of
generation without drafts, or with draws, as likely as those (arXiv:2302.01318).

Shape legend: S prompt length, K drafts, Q = K + 1 tokens of a pass, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from ligermodels.generation.decode_step import HostCopy, Replayed, can_decode
from ligermodels.generation.models import Drafter, DraftHeads
from ligermodels.generation.sampling import Sampler, draw, no_token_error
from ligermodels.kernels.checks import check_count
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel
from ligermodels.models.kernel_report import decoding_obstacle
from ligermodels.text.streaming import StopStrings


@torch.no_grad()
def drafted_passes(
    model: DecoderModel,
    heads: DraftHeads,
    prompt: Tensor,
    max_new_tokens: int,
    sampler: Sampler,
    texts: StopStrings | None,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the new tokens (new,) of each forward pass, at least one, and their log-probabilities.

    Args: prompt: (1, seq) int64; max_new_tokens: of all passes; sampler: it chooses the tokens, and
        names those that end the text; texts: finds strings that end it, too.
    """
    count = heads.num_drafts
    # The device runs one pass ahead of what the host knows, and passes write the keys of drafts.
    longest = prompt.shape[1] + max_new_tokens + 3 * (count + 1)
    cache = KVCache.of(model, 1, longest, extra=count)
    decoder: _DraftDecoder | None = None
    known, states = prompt, []
    running = deque[tuple[Tensor, Tensor | None, HostCopy]]()
    left, ahead = max_new_tokens, int(prompt.is_cuda)
    while True:
        if decoder is not None:
            made, log_probs = decoder.replay()
        else:
            states.append(model(known[:, cache.length :], cache=cache))
            logits = model.head.logits(states[-1][0, -1:])
            made, log_probs = _checked(logits, known[0, :0], None, sampler)
            known = torch.cat((known, made[None, 2:]), 1)
        made, log_probs = made.clone(), None if log_probs is None else log_probs.clone()
        running.append((made, log_probs, HostCopy(made)))
        # Some drafters look back at as many tokens; until then, each pass gives one.
        if decoder is None and cache.length > count:
            decoder = _DraftDecoder(model, heads, cache, longest, sampler)
            decoder.draft(torch.cat(states, 1), known, decoder.ends_1)
        while len(running) > ahead:
            made, log_probs, on_host = running.popleft()
            new, failed, *tokens = on_host.wait()[0].tolist()
            if failed:
                raise no_token_error(0, max_new_tokens - left + new - 1)
            new = min(new, left)
            for i, token in enumerate(tokens[:new], 1):
                if token in sampler.rule.stops or (texts is not None and texts.push([token])):
                    new = left = i
                    break
            left -= new
            yield made[2 : 2 + new], None if log_probs is None else log_probs[:new]
            if not left:
                return


class _DraftDecoder(Replayed):
    """Checks drafts and makes new ones, in a CUDA graph if possible.

    Args: model, heads: as in `drafted_passes`; cache: it holds the prompt; longest: the tokens
        that it has room for; sampler: as in `drafted_passes`.
    Attributes:
        ids_1Q: the last token, which is not in the cache, and the drafts of those after it.
        given_KV: the probabilities that they were drawn with; None if they were not drawn.
        ends_1: how many tokens are in the cache.
    """

    def __init__(
        self, model: DecoderModel, heads: DraftHeads, cache: KVCache, longest: int, sampler: Sampler
    ) -> None:
        captures = (
            can_decode(model, cache, {"input_ids"})
            and type(heads).__module__.startswith("ligermodels.")
            and decoding_obstacle(cast(nn.Module, heads)) is None
        )
        device = model.rotary_emb.inv_freq.device
        super().__init__(device, sampler.generator, captures)
        self.model, self.cache, self.sampler = model, cache, sampler
        self.drafter = heads.drafter(longest, sampler)
        self.ids_1Q = torch.zeros(1, heads.num_drafts + 1, dtype=torch.int64, device=device)
        self.given_KV: Tensor | None = None
        self.ends_1 = torch.full((1,), cache.length, device=device)

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Return what `_checked` does for this pass."""
        queries = self.ids_1Q.shape[1]
        self.ends_1.add_(queries)
        with self.cache.step_at(self.ends_1):
            hidden = self.model(self.ids_1Q, cache=self.cache)
        logits_QV = self.model.head.logits(hidden[0])
        made, log_probs = _checked(logits_QV, self.ids_1Q[0, 1:], self.given_KV, self.sampler)
        right = made[:1]
        self.ends_1.add_(right - queries)
        self.draft(hidden, torch.cat((self.ids_1Q[:, :1], made[None, 2:]), 1), right)
        return made, log_probs

    def draft(self, hidden: Tensor, tokens: Tensor, right: Tensor) -> None:
        """Make the drafts of the next pass: see `Drafter`."""
        drafts_1K, given_KV = self.drafter(hidden, tokens, right, self.ends_1)
        self.ids_1Q.copy_(torch.cat((tokens.index_select(1, right), drafts_1K), 1))
        if given_KV is not None:
            self.given_KV = given_KV if self.given_KV is None else self.given_KV.copy_(given_KV)


def _checked(
    logits_QV: Tensor, drafts_K: Tensor, given_KV: Tensor | None, sampler: Sampler
) -> tuple[Tensor, Tensor | None]:
    """Choose the tokens after the last token and after each draft, as far as the drafts are right.

    A draft is right with the probability min(1, p / q), where p is the model's and q the one that
    it was drawn with. The first wrong one is replaced by a draw from max(0, p - q), and after right
    ones there is a draw from p (arXiv:2302.01318, algorithm 2).

    Args: given_KV: q for all tokens; None if the drafts were not drawn.
    Returns: (2 + Q,) int64: the number of new tokens; 1 if the logits of one of them hold NaN or
        infinity, else 0; and the tokens, of which those after the new ones mean nothing. Also the
        tokens' log-probabilities (Q,), if the sampler computes them.
    """
    rule, generator = sampler.rule, sampler.generator
    given_logits_QV = logits_QV.float()
    broken_Q = ~given_logits_QV.amax(-1).isfinite()
    logits_QV = sampler.changed(given_logits_QV, drafts_K)
    if rule.do_sample:  # A draw from NaN would have no end.
        logits_QV = logits_QV.masked_fill(broken_Q[:, None], 0.0)
    if given_KV is None:
        # A draw from p equals the draft with probability p, and else is one of the other tokens.
        tokens_Q = rule.next_tokens(logits_QV, generator)
        right_K = tokens_Q[:-1] == drafts_K
    else:
        p_QV, of_drafts = rule.filter(logits_QV).softmax(-1), drafts_K[:, None]
        p_K, q_K = (x.gather(1, of_drafts)[:, 0] for x in (p_QV[:-1], given_KV))
        right_K = torch.rand(p_K.shape, generator=generator, device=p_K.device) * q_K < p_K
        p_QV[:-1] = (p_QV[:-1] - given_KV).clamp(min=0)
        tokens_Q = draw(p_QV, generator)
        tokens_Q[:-1] = torch.where(right_K, drafts_K, tokens_Q[:-1])
    new = right_K.long().cumprod(0).sum() + 1
    places = torch.arange(len(tokens_Q), device=tokens_Q.device)
    failed = (broken_Q & (places < new)).any()
    sampler.remember(tokens_Q.where(places < new, tokens_Q[0])[None])
    log_probs = None if sampler.log_probs_B is None else rule.log_probs(given_logits_QV, tokens_Q)
    return torch.cat((torch.stack((new, failed.long())), tokens_Q)), log_probs


class DraftModel(nn.Module):
    """A small model that drafts tokens for a large one with the same tokenizer.

    Args: model: the small model; num_drafts: how many tokens it drafts for each pass of the other.
    """

    def __init__(self, model: DecoderModel, num_drafts: int = 4) -> None:
        super().__init__()
        self.model = model
        self.num_drafts = check_count("generate", "num_drafts", num_drafts, 1)

    def check_model(self, model: DecoderModel) -> None:
        """Raise ValueError unless the large model has the same vocabulary, on the same device."""
        own, theirs = self.model.head.vocab_size, model.head.vocab_size
        if own != theirs:
            raise ValueError(
                f"draft_model: its vocabulary has {own} tokens, and the model's has {theirs}; a "
                "draft model must have the model's tokenizer"
            )
        device, other = (x.rotary_emb.inv_freq.device for x in (self.model, model))
        if device != other:
            raise ValueError(f"draft_model: it is on {device}, and the model is on {other}")

    def drafter(self, max_length: int, sampler: Sampler) -> Drafter:
        """Return what drafts tokens: see `Drafter`."""
        return _ModelDrafter(self, max_length, sampler)


class _ModelDrafter:
    """The small model with a cache.

    The last draft was never read, so each call first reads the last two tokens.
    """

    def __init__(self, drafts: DraftModel, max_length: int, sampler: Sampler) -> None:
        self.model, self.count, self.sampler = drafts.model, drafts.num_drafts, sampler
        self.cache = KVCache.of(self.model, 1, max_length, extra=self.count)

    def __call__(
        self, hidden: Tensor, tokens: Tensor, right: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        rule = self.sampler.rule
        if not self.cache.length:
            self.model(tokens[:, :-1], cache=self.cache)
        fed = tokens.index_select(1, right + torch.arange(-1, 1, device=right.device))
        drafts, given = [], []
        for i in range(self.count):
            with self.cache.step_at(ends + 1 + i):
                hidden = self.model(fed, cache=self.cache)
            logits_1V = self.model.head.logits(hidden[:, -1]).float()
            if rule.do_sample:
                given.append(rule.filter(logits_1V).softmax(-1))
                drafts.append(draw(given[-1].clone(), self.sampler.generator)[None])
            else:
                drafts.append(logits_1V.argmax(-1, keepdim=True))
            fed = drafts[-1]
        return torch.cat(drafts, 1), torch.cat(given) if given else None
