"""Continue prompts token by token, as a batch or as a stream.

Shape legend: B batch, S prompt length, V vocabulary.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ligermodels.errors import short_repr
from ligermodels.generation.cache_memory import check_room
from ligermodels.generation.decode_step import HostCopy, StepDecoder, can_decode, keep, kept_decoder
from ligermodels.generation.draft import DraftModel, drafted_passes
from ligermodels.generation.generation_config import check_names, resolve_rule
from ligermodels.generation.models import DraftHeads
from ligermodels.generation.prefill import chunks, read_prompts
from ligermodels.generation.prompts import Prompts, batch_prompts
from ligermodels.generation.sampling import RuleOptions, Sampler, no_token_error
from ligermodels.kernels.checks import check_count
from ligermodels.layers.gated_delta import GatedDeltaNet
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel
from ligermodels.text.streaming import Decoder, StopStrings, TextStream, until

# From the tokens so far (batch, seq + new) and the float32 logits (batch, vocab), other logits.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
# A cache has room for a multiple of so many tokens, so that it fits the next call, too.
ROOM = 256


class StreamOptions(RuleOptions, total=False):
    """The options that `generate`, `stream` and `stream_text` share; `generate` describes them."""

    heads: DraftHeads | None
    draft_model: DecoderModel | None
    num_drafts: int
    inputs_embeds: Tensor | None
    prefix_lengths: Tensor | None
    memory: Tensor | None
    memory_mask: Tensor | None
    max_new_tokens: int
    logits_processor: LogitsProcessor | None
    stop_strings: Sequence[str]
    attention_mask: Tensor | None
    generator: torch.Generator | None
    cache: KVCache | None


class GenerateOptions(StreamOptions, total=False):
    """The options of `DecoderModel.generate`."""

    callback: Callable[[Tensor], object] | None
    tokenizer: Decoder | None
    return_log_probs: bool


def generate(
    model: DecoderModel,
    input_ids: Prompts | None = None,
    *,
    callback: Callable[[Tensor], object] | None = None,
    tokenizer: Decoder | None = None,
    return_log_probs: bool = False,
    **options: Unpack[StreamOptions],
) -> Any:
    """Continue prompts, with the likeliest tokens or, if `do_sample`, with random draws.

    Args:
        model: any `DecoderModel`.
        input_ids: (batch, seq) or (seq,) integers, or a list of prompts of any lengths. Each prompt
            in a list is a list or a 1-D tensor. The shorter ones are padded on the left.
        inputs_embeds: (batch, seq, hidden), instead of input_ids: the embeddings of the prompts, as
            in `DecoderModel.forward`. Only the new tokens are returned, and only they count for
            repetition_penalty.
        prefix_lengths, memory, memory_mask: as in `DecoderModel.forward`.
        callback: a function that is called after every step with the tokens of that step (batch,).
        heads: trained `MedusaHeads`, or other `DraftHeads`, that draft further tokens, for one
            prompt of input_ids, without a logits_processor or a cache. callback then gets all
            tokens (new,) of a pass. The tokens are those without drafts where rounding does not
            decide between two logits: a pass over several tokens rounds in another way than passes
            over one token. Draws have the distribution of draws without drafts.
        draft_model: a small model with the same tokenizer that drafts tokens instead of heads.
        num_drafts: how many tokens draft_model drafts for each pass of the model, 4 by default.
        max_new_tokens: the maximum number of new tokens, 64 by default. Generation ends earlier if
            every row has stopped, but the cache has room for all of them.
        do_sample: whether to draw tokens. The default is False, even if generation_config.json says
            otherwise.
        tokenizer: the tokenizer of the model, for stop_strings.
        return_log_probs: whether to return the log-probabilities of the new tokens, too.
        temperature, top_k, top_p, min_p: as in `Sampling`, with its defaults. They need do_sample.
        repetition_penalty: as in `Sampling`, at most 10^6. The default is that of
            generation_config.json, then 1.
        presence_penalty, logit_bias: as in `Sampling`, with its defaults.
        logits_processor: a function of the tokens so far (batch, seq + new) and of the float32
            logits (batch, vocab), which returns the logits to use instead.
        eos_token_id: the tokens that end a row. The default is that of generation_config.json, then
            that of the config. With an empty list no token ends a row.
        stop_strings: texts that end a row, too. The token that completes one is kept. They need
            the tokenizer.
        pad_token_id: the token that fills rows after their stop token. The default is found in the
            same order; if there is none, it is the first stop token.
        attention_mask: (batch, seq), 0 for padding, which must be on the left.
        generator: the random generator for the draws, on the model's device.
        cache: a KV cache for batch rows of seq + new - 1 tokens. The default is a new `KVCache`.
            If it holds tokens, they are the first columns of input_ids and are not computed again.

    Returns:
        (batch, seq + new) int64 on the model's device, or (batch, new) for inputs_embeds. The stop
        token is kept. Padding follows it. With return_log_probs, also the log-probabilities of the
        new tokens, (batch, new) float32, of the logits divided by the temperature, without biases,
        penalties and filters; 0 for padding.

    Raises:
        ValueError: a prompt is empty, an id is outside the vocabulary, padding is on the right, or
            options contradict each other, or the cache needs more than the free memory.
        LigerError: the logits of a row hold NaN or infinity, so that there is no next token.
            On a CPU this comes before the token is passed on. On a GPU it comes one step later if
            there are stop tokens, else after the last token.
        CheckpointError: generation_config.json has a value of a wrong type.
    """
    prompt_BS, steps = _start(model, input_ids, tokenizer, return_log_probs, **options)
    columns, log_probs = [prompt_BS], []
    for tokens, values in steps:  # (batch,), or with drafts (new,) of one row
        columns.append(tokens.view(len(prompt_BS), -1))
        if values is not None:
            log_probs.append(values.view(len(prompt_BS), -1))
        if callback is not None:
            callback(tokens)
    found = torch.cat(columns, dim=1)
    return (found, torch.cat(log_probs, dim=1)) if return_log_probs else found


def stream(
    model: DecoderModel,
    input_ids: Prompts | None = None,
    *,
    tokenizer: Decoder | None = None,
    **options: Unpack[StreamOptions],
) -> Iterator[int]:
    """Return an iterator over the new tokens of one prompt, each as soon as it is computed.

    Args: the arguments of `generate`, except `callback` and `return_log_probs`.
    Raises:
        ValueError: as in `generate`, at the call; also if there is more than one prompt.
    """
    prompt_BS, steps = _start(model, input_ids, tokenizer, **options)
    if prompt_BS.shape[0] != 1:
        raise ValueError(
            f"stream: got {prompt_BS.shape[0]} prompts, expected one; for a batch, call "
            "generate(callback=...)"
        )
    return (token for tokens, _ in steps for token in tokens.tolist())


def stream_text(
    model: DecoderModel,
    tokenizer: Decoder,
    input_ids: Prompts | None = None,
    **options: Unpack[StreamOptions],
) -> Iterator[str]:
    """Return an iterator over the new text of one prompt, in pieces that never split a character.

    Special tokens are left out, and so is one of stop_strings and what follows it.

    Args: the arguments of `stream`, and the tokenizer that decodes the tokens.
    """
    tokens = stream(model, input_ids, tokenizer=tokenizer, **options)
    context = [] if input_ids is None else torch.as_tensor(input_ids).flatten().tolist()
    pieces = _text_of(tokens, TextStream(tokenizer, context))
    return until(pieces, options.get("stop_strings", ()))


def _text_of(tokens: Iterator[int], text: TextStream) -> Iterator[str]:
    for token in tokens:
        if piece := text.push(token):
            yield piece
    if piece := text.finish():
        yield piece


def _start(
    model: DecoderModel,
    input_ids: Prompts | None,
    tokenizer: Decoder | None,
    with_log_probs: bool = False,
    *,
    heads: DraftHeads | None = None,
    draft_model: DecoderModel | None = None,
    num_drafts: int = 4,
    inputs_embeds: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    memory: Tensor | None = None,
    memory_mask: Tensor | None = None,
    max_new_tokens: int = 64,
    logits_processor: LogitsProcessor | None = None,
    stop_strings: Sequence[str] = (),
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    cache: KVCache | None = None,
    **rule: Unpack[RuleOptions],
) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor | None]]]:
    """Check the arguments. Return the padded prompts (B, S) and an iterator over the steps.

    For inputs_embeds, the prompts have no columns. Each step has one token for each row, (B,), or
    with drafts the tokens of a pass, (new,), and as many log-probabilities, or None.
    """
    check_names("generate", rule, GenerateOptions.__annotations__)
    config = model.config
    if draft_model is not None:
        if heads is not None:
            raise ValueError("heads and draft_model: pass one of them")
        heads = DraftModel(draft_model, num_drafts)
    check_count("generate", "max_new_tokens", max_new_tokens, 1)
    choice = resolve_rule(model, **rule)
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids and inputs_embeds: pass one of them")
    if inputs_embeds is not None:
        # These stand for the prompts, whose lengths and padding are checked like those of tokens.
        input_ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.int64)
    assert input_ids is not None
    ids_BS, mask_BS = batch_prompts(input_ids, attention_mask, choice.pad, config.vocab_size)
    batch, prompt = ids_BS.shape
    if mask_BS is not None and any(type(x) is GatedDeltaNet for x in model.modules()):
        raise ValueError(
            "generate: a layer of the model is a GatedDeltaNet, which knows no padding; use a "
            "LinearAttention, or pass prompts of one length"
        )
    if cache is None:
        check_room(model, batch, prompt + max_new_tokens)
    if prompt + max_new_tokens > config.max_position_embeddings:
        warnings.warn(
            f"{prompt} prompt tokens and {max_new_tokens} new tokens go beyond "
            f"max_position_embeddings={config.max_position_embeddings}; the model was not trained "
            "on longer sequences",
            stacklevel=3,
        )
    device = model.rotary_emb.inv_freq.device  # These stay on the device if weights are offloaded.
    ids_BS = ids_BS.to(device)
    mask_BS = None if mask_BS is None else mask_BS.to(device)
    past = 0 if cache is None else cache.length
    if past >= prompt:
        raise ValueError(
            f"cache: the cache holds {past} tokens already, but the prompt is only {prompt} long; "
            "pass a prompt of the cached tokens and at least one new token"
        )
    inputs = {"input_ids": ids_BS} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
    inputs = {name: x.to(device)[:, past:] for name, x in inputs.items()}
    more = {"prefix_lengths": prefix_lengths, "memory": memory, "memory_mask": memory_mask}
    inputs |= {name: x.to(device) for name, x in more.items() if x is not None}
    sampler = Sampler(choice, batch, config.vocab_size, device, generator, with_log_probs)
    if choice.repetition_penalty != 1 and inputs_embeds is None:
        for row, ids_S in enumerate(ids_BS):
            sampler.read(row, ids_S if mask_BS is None else ids_S[mask_BS[row] == 1])
    if inputs_embeds is not None:
        ids_BS = ids_BS[:, :0]
    texts = stop_strings_of(stop_strings, tokenizer, ids_BS.tolist())
    if heads is not None:
        others = (cache, logits_processor, mask_BS, inputs_embeds, *more.values())
        if batch != 1 or any(each is not None for each in others):
            raise ValueError(
                f"generate: {batch} prompts; drafts are for one prompt of input_ids without "
                "padding, and take no cache, logits_processor, prefix_lengths or memory; generate "
                "for one prompt at a time, or leave out heads and draft_model"
            )
        heads.check_model(model)
        return ids_BS, drafted_passes(model, heads, ids_BS, max_new_tokens, sampler, texts)
    rows = _Rows(
        *(model, inputs, ids_BS, mask_BS, max_new_tokens, sampler, logits_processor, texts, cache)
    )
    original = config.recomputes_keys_after
    if original is None or cache is not None or inputs_embeds is not None:
        return ids_BS, rows.steps()
    before = original + 1 - prompt  # the tokens of which none is read with the later angles
    return ids_BS, rows.steps() if not 0 < before < max_new_tokens else _in_two(rows, before)


def _in_two(rows: "_Rows", before: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the steps of rows whose keys are all computed again after so many new tokens."""
    first = replace(rows, max_new_tokens=before)
    made = []
    for step in first.steps():
        made.append(step[0].unsqueeze(1))
        yield step
    if len(made) < before or first.sampler.stopped_B.all():
        return
    mask_BS, new_BS = rows.mask_BS, torch.cat(made, 1)
    if mask_BS is not None:
        mask_BS = torch.cat([mask_BS, torch.ones_like(new_BS)], 1)
    ids_BS = torch.cat([rows.ids_BS, new_BS], 1)
    yield from replace(
        rows,
        inputs=rows.inputs | {"input_ids": ids_BS},
        ids_BS=ids_BS,
        mask_BS=mask_BS,
        max_new_tokens=rows.max_new_tokens - before,
        sampler=first.sampler,
    ).steps()


@dataclass
class _Rows:
    """Computes the next tokens of the rows, by forwards of the model or by a `StepDecoder`.

    Args: inputs: the prompts, as the model's forward takes them; mask_BS: 0 for padding on the
        left, for these and the tokens in the cache, or None; texts: finds strings that end a row.
        The others are those of `_start`.
    Attributes:
        fed_B1: what the next step computes from: what the sampler chose, or None for the prompts.
        has_read: whether the cache has the prompts.
    """

    model: DecoderModel
    inputs: dict[str, Tensor]
    ids_BS: Tensor
    mask_BS: Tensor | None
    max_new_tokens: int
    sampler: Sampler
    processor: LogitsProcessor | None
    texts: StopStrings | None
    cache: KVCache | None
    decoder: StepDecoder | None = None
    fed_B1: Tensor | None = None
    has_read: bool = False

    # This is not inference_mode, because its tensors cannot be the input of a training forward.
    @torch.no_grad()
    def steps(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the tokens (batch,) of each step and their log-probabilities, or None."""
        self._begin()
        sampler, texts, on_cpu = self.sampler, self.texts, self.ids_BS.is_cpu
        # If rows can end, a GPU computes a step while the host looks at the one before.
        looks = on_cpu or bool(sampler.rule.stops) or texts is not None
        waiting = deque[tuple[Tensor, Tensor | None, HostCopy | None]]()
        ended: list[int] = []  # the rows whose texts have ended
        try:
            for step in range(self.max_new_tokens):
                tokens_B, log_probs_B = self.next_tokens(), sampler.log_probs_B
                log_probs_B = None if log_probs_B is None else log_probs_B.clone()
                is_last, copy = step + 1 == self.max_new_tokens, None
                if looks or is_last:
                    copy = HostCopy(tokens_B, sampler.stopped_B, sampler.failed_B)
                waiting.append((tokens_B, log_probs_B, copy))
                while len(waiting) > (0 if is_last or on_cpu or not looks else 1):
                    tokens_B, log_probs_B, copy = waiting.popleft()
                    if ended:  # The device may not have known it.
                        tokens_B[ended] = sampler.rule.pad
                        if log_probs_B is not None:
                            log_probs_B[ended] = 0.0
                    over = False
                    if copy is not None:
                        on_host_B, stopped_B, failed_B = copy.wait()
                        if failed_B.any():
                            raise no_token_error(int(failed_B.int().argmax()), step)
                        if texts is not None:
                            ended = texts.push(on_host_B.tolist())
                            sampler.stopped_B[ended] = stopped_B[ended] = True
                        over = bool(stopped_B.all())
                    yield tokens_B, log_probs_B
                    if over:
                        return
        finally:
            if self.decoder is not None:
                keep(self.decoder)

    def _begin(self) -> None:
        """Make the cache and the decoder, and read the prompts that it takes row by row."""
        model, inputs, mask_BS = self.model, self.inputs, self.mask_BS
        is_new, processor = self.cache is None, self.processor
        # Fewer steps take less time than a capture.
        captures = self.max_new_tokens > 4 and can_decode(model, self.cache, set(inputs))
        # Prompts of unequal length, and more than one pass reads, go into the cache row by row.
        packs = captures and is_new and set(inputs) == {"input_ids"}
        if packs and mask_BS is None:
            packs = len(self.ids_BS) > 1 and len(chunks(model, self.ids_BS)) > 1
        if self.cache is None:
            batch, length = next(iter(inputs.values())).shape[:2]
            length += self.max_new_tokens - 1  # The model never reads the last new token.
            if captures and processor is None and (packs or mask_BS is None):
                self.decoder = kept_decoder(model, self.sampler, length)
                length = ROOM * -(-length // ROOM)
            if self.decoder is None:
                self.cache = KVCache.of(model, batch, length)
            else:
                self.cache = self.decoder.cache
                self.sampler = self.decoder.sampler or self.sampler
        if captures and self.decoder is None:
            chooses = self.sampler if processor is None else None
            self.decoder = StepDecoder(model, self.cache, chooses, None if packs else mask_BS)
        if packs:
            assert self.decoder is not None
            if mask_BS is None:
                mask_BS = torch.ones_like(self.ids_BS)
            prompts = [row[mask == 1] for row, mask in zip(self.ids_BS, mask_BS)]
            read_prompts(model, self.cache, range(batch), prompts)
            self.fed_B1, self.has_read = self.ids_BS[:, -1:], True
            self.decoder.ends_B.copy_(mask_BS.sum(-1) - 1)

    def next_tokens(self) -> Tensor:
        """Return the next token of each row: (batch,) int64.

        Raises:
            ValueError: logits_processor has returned something else than logits of their shape.
        """
        decoder = self.decoder if self.has_read else None
        if decoder is not None and self.processor is None:
            tokens_B, self.fed_B1 = decoder(self.fed_B1).clone(), None
            return tokens_B
        logits_BV = self._logits() if decoder is None else decoder(self.fed_B1)
        if self.decoder is not None and not self.has_read:
            self.decoder.ends_B.fill_(self.decoder.cache.length)
        self.has_read = True
        if self.processor is not None:
            shape, logits_BV = logits_BV.shape, self.processor(self.ids_BS, logits_BV)
            if not isinstance(logits_BV, Tensor) or logits_BV.shape != shape:
                raise ValueError(
                    f"logits_processor: it returned {short_repr(logits_BV)}; expected logits of "
                    f"shape {tuple(shape)}"
                )
        tokens_B = self.sampler(logits_BV)
        self.fed_B1 = tokens_B.unsqueeze(1)
        if self.processor is not None:
            self.ids_BS = torch.cat([self.ids_BS, self.fed_B1], dim=1)
        return tokens_B

    def _logits(self) -> Tensor:
        """Return the float32 logits (batch, vocab) after the last tokens, or after the prompts."""
        if self.fed_B1 is None:
            inputs = self.inputs
            if set(inputs) == {"input_ids"}:
                *parts, last = chunks(self.model, inputs["input_ids"])
                for part in parts:
                    self._forward({"input_ids": inputs["input_ids"][:, part]})
                inputs = {"input_ids": inputs["input_ids"][:, last]}
        else:
            kept = {name: x for name, x in self.inputs.items() if name.startswith("memory")}
            inputs = {"input_ids": self.fed_B1, **kept}
            if self.mask_BS is not None:
                self.mask_BS = torch.cat([self.mask_BS, torch.ones_like(self.fed_B1)], dim=1)
        return self.model.head.logits(self._forward(inputs)[:, -1:])[:, -1].float()

    def _forward(self, inputs: dict[str, Tensor]) -> Any:
        assert self.cache is not None
        positions_BS = mask_BS = None
        if self.mask_BS is not None:
            new = next(iter(inputs.values())).shape[1]
            mask_BS = self.mask_BS[:, : self.cache.length + new]
            positions_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)[:, -new:]
        return self.model(
            **inputs, position_ids=positions_BS, attention_mask=mask_BS, cache=self.cache
        )


def stop_strings_of(
    strings: Sequence[str], tokenizer: Decoder | None, contexts: list[list[int]]
) -> StopStrings | None:
    """Return what finds the strings in the rows, or None if there are none.

    Raises:
        ValueError: there is no tokenizer, or `strings` is one string.
    """
    if not strings:
        return None
    if tokenizer is None or isinstance(strings, str):
        raise ValueError("stop_strings: pass a list of strings, and the model's tokenizer")
    return StopStrings(tokenizer, strings, contexts)
