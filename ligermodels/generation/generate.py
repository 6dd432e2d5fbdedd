"""Continue prompts token by token, as a batch or as a stream.

Shape legend: B batch, S prompt length, V vocabulary.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast, overload

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ligermodels.errors import did_you_mean, short_repr
from ligermodels.generation.decode_step import (
    HostCopy,
    StepDecoder,
    can_decode,
    keep,
    kept_decoder,
)
from ligermodels.generation.draft import DraftModel, drafted_passes
from ligermodels.generation.generation_config import resolve_rule
from ligermodels.generation.models import DraftHeads, LanguageModel
from ligermodels.generation.prefill import chunks, read_prompts
from ligermodels.generation.prompts import Prompts, batch_prompts
from ligermodels.generation.sampling import Sampler, no_token_error
from ligermodels.kernels.checks import check_count
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel
from ligermodels.text.streaming import Decoder, StopStrings, TextStream, until

# From the tokens so far (batch, seq + new) and the float32 logits (batch, vocab), other logits.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
# What drafts can honour: a penalty depends on the tokens before, which are not known.
_DRAFT_OPTIONS = (
    *("repetition_penalty", "max_new_tokens", "eos_token_id", "pad_token_id", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "logit_bias", "generator"),
)
# A cache has room for a multiple of so many tokens, so that it fits the next call, too.
ROOM = 256
# A row cannot be longer: no machine has the memory for its cache.
MAX_NEW_TOKENS = 10**9


class GenerateOptions(TypedDict, total=False):
    """The options of `generate`, `stream` and `stream_text`. `generate` explains them."""

    inputs_embeds: Tensor | None
    prefix_lengths: Tensor | None
    memory: Tensor | None
    memory_mask: Tensor | None
    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    logits_processor: LogitsProcessor | None
    eos_token_id: int | Iterable[int] | None
    stop_strings: Sequence[str]
    pad_token_id: int | None
    attention_mask: Tensor | None
    generator: torch.Generator | None
    cache: KVCache | None
    draft_model: DecoderModel | None
    num_drafts: int


@overload
def generate(
    model: LanguageModel,
    input_ids: Prompts | None = None,
    *,
    callback: Callable[[Tensor], object] | None = None,
    heads: DraftHeads | None = None,
    tokenizer: Decoder | None = None,
    return_log_probs: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> Tensor: ...


@overload
def generate(
    model: LanguageModel,
    input_ids: Prompts | None = None,
    *,
    callback: Callable[[Tensor], object] | None = None,
    tokenizer: Decoder | None = None,
    return_log_probs: Literal[True],
    **options: Unpack[GenerateOptions],
) -> tuple[Tensor, Tensor]: ...


def generate(
    model: LanguageModel,
    input_ids: Prompts | None = None,
    *,
    callback: Callable[[Tensor], object] | None = None,
    heads: DraftHeads | None = None,
    tokenizer: Decoder | None = None,
    return_log_probs: bool = False,
    **options: Unpack[GenerateOptions],
) -> Tensor | tuple[Tensor, Tensor]:
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
        heads: a trained `MedusaHeads` or `MultiTokenModel` that drafts further tokens, for one
            prompt. `ligermodels.generation.generate_drafted` also returns how many tokens each
            forward pass gave. callback then gets all tokens of a pass.
        draft_model: a small model with the same tokenizer that drafts tokens instead of heads.
        num_drafts: how many tokens draft_model drafts for each pass of the model, 4 by default.
        max_new_tokens: the maximum number of new tokens, 64 by default, and at most 10^9.
            Generation ends earlier if every row has stopped.
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
            options contradict each other.
        LigerError: the logits of a row hold NaN or infinity, so that there is no next token.
            On a CPU this comes before the token is passed on. On a GPU it comes one step later if
            there are stop tokens, else after the last token.
        CheckpointError: generation_config.json has a value of a wrong type.
    """
    _check_names("generate", options)
    prompt_BS, steps = _begin(model, input_ids, heads, tokenizer, return_log_probs, **options)
    columns, log_probs = [prompt_BS], []
    for tokens, log_probs_B in steps:  # (batch,), or with drafts (new,) of one row
        columns.append(tokens.view(len(prompt_BS), -1))
        if log_probs_B is not None:
            log_probs.append(log_probs_B)
        if callback is not None:
            callback(tokens)
    found = torch.cat(columns, dim=1)
    return (found, torch.stack(log_probs, dim=1)) if return_log_probs else found


def _check_names(function: str, options: GenerateOptions) -> None:
    """Raise TypeError for an option that there is not, as Python does, but with a suggestion."""
    known = GenerateOptions.__annotations__
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def stream(
    model: LanguageModel,
    input_ids: Prompts | None = None,
    *,
    heads: DraftHeads | None = None,
    tokenizer: Decoder | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[int]:
    """Return an iterator over the new tokens of one prompt, each as soon as it is computed.

    Args: the arguments of `generate`, except `callback` and `return_log_probs`.
    Raises:
        ValueError: as in `generate`, at the call; also if there is more than one prompt.
    """
    _check_names("stream", options)
    prompt_BS, steps = _begin(model, input_ids, heads, tokenizer, **options)
    if prompt_BS.shape[0] != 1:
        raise ValueError(
            f"stream: got {prompt_BS.shape[0]} prompts, expected one; for a batch, call "
            "generate(callback=...)"
        )
    return (token for tokens, _ in steps for token in tokens.tolist())


def stream_text(
    model: LanguageModel,
    tokenizer: Decoder,
    input_ids: Prompts | None = None,
    *,
    heads: DraftHeads | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[str]:
    """Return an iterator over the new text of one prompt, in pieces that never split a character.

    Special tokens are left out, and so is one of stop_strings and what follows it.

    Args: the arguments of `stream`, and the tokenizer that decodes the tokens.
    """
    tokens = stream(model, input_ids, heads=heads, tokenizer=tokenizer, **options)
    context = [] if input_ids is None else torch.as_tensor(input_ids).flatten().tolist()
    pieces = _text_of(tokens, TextStream(tokenizer, context))
    return until(pieces, options.get("stop_strings", ()))


def _text_of(tokens: Iterator[int], text: TextStream) -> Iterator[str]:
    for token in tokens:
        if piece := text.push(token):
            yield piece
    if piece := text.finish():
        yield piece


def _begin(
    model: LanguageModel,
    input_ids: Prompts | None,
    heads: DraftHeads | None,
    tokenizer: Decoder | None,
    with_log_probs: bool = False,
    *,
    draft_model: DecoderModel | None = None,
    num_drafts: int = 4,
    **options: Any,
) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor | None]]]:
    """Return what `_start` does. With drafts, each step has the tokens of a pass, (new,)."""
    if draft_model is not None:
        if heads is not None:
            raise ValueError("heads and draft_model: pass one of them")
        heads = DraftModel(draft_model, num_drafts)
    if heads is None:
        return _start(model, input_ids, tokenizer, with_log_probs, **options)
    others = [x for name, x in options.items() if name not in _DRAFT_OPTIONS]
    if input_ids is None or with_log_probs or any(isinstance(x, Tensor) or x for x in others):
        raise ValueError(
            "generate: drafts take input_ids and, of the options, only callback, "
            f"repetition_penalty=1.0, {', '.join(_DRAFT_OPTIONS[1:])}; leave the others out"
        )
    given = {name: x for name, x in options.items() if name in _DRAFT_OPTIONS}
    prompt_1S, passes = drafted_passes(model, heads, input_ids, **given)
    return prompt_1S, ((tokens, None) for tokens in passes)


def _start(
    model: LanguageModel,
    input_ids: Prompts | None,
    tokenizer: Decoder | None,
    with_log_probs: bool = False,
    *,
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
    **rule: Any,
) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor | None]]]:
    """Check the arguments. Return the padded prompts (B, S) and an iterator over the steps.

    For inputs_embeds, the prompts have no columns. Each step has one token for each row, (B,), and
    its log-probability, (B,), or None.
    """
    config = model.config
    if check_count("generate", "max_new_tokens", max_new_tokens, 1) > MAX_NEW_TOKENS:
        raise ValueError(
            f"max_new_tokens={short_repr(max_new_tokens)}: the number must be at most "
            f"{MAX_NEW_TOKENS}"
        )
    sampling, stops, pad = resolve_rule(model, **rule)
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids and inputs_embeds: pass one of them")
    if inputs_embeds is not None:
        # These stand for the prompts, whose lengths and padding are checked like those of tokens.
        input_ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.int64)
    assert input_ids is not None
    ids_BS, mask_BS = batch_prompts(input_ids, attention_mask, pad, config.vocab_size)
    batch, prompt = ids_BS.shape
    if prompt + max_new_tokens > config.max_position_embeddings:
        warnings.warn(
            f"{prompt} prompt tokens and {max_new_tokens} new tokens go beyond "
            f"max_position_embeddings={config.max_position_embeddings}; the model was not trained "
            "on longer sequences",
            stacklevel=4,
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
    sampler = Sampler(
        sampling,
        batch,
        config.vocab_size,
        device,
        stops=stops,
        pad=pad,
        generator=generator,
        with_log_probs=with_log_probs,
    )
    if sampling.repetition_penalty != 1 and inputs_embeds is None:
        for row, ids_S in enumerate(ids_BS):
            sampler.read(row, ids_S if mask_BS is None else ids_S[mask_BS[row] == 1])
    if inputs_embeds is not None:
        ids_BS = ids_BS[:, :0]
    texts = stop_strings_of(stop_strings, tokenizer, ids_BS.tolist())
    steps = _steps(
        model, inputs, ids_BS, mask_BS, max_new_tokens, sampler, logits_processor, texts, cache
    )
    return ids_BS, steps


# This is not inference_mode, because its tensors cannot be the input of a training forward.
@torch.no_grad()
def _steps(
    model: LanguageModel,
    inputs: dict[str, Tensor],
    ids_BS: Tensor,
    mask_BS: Tensor | None,
    max_new_tokens: int,
    sampler: Sampler,
    processor: LogitsProcessor | None,
    texts: StopStrings | None,
    cache: KVCache | None,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    on_cpu = ids_BS.device.type == "cpu"
    # Fewer steps take less time than a capture.
    captures = max_new_tokens > 4 and can_decode(model, cache, set(inputs))
    packs = captures and cache is None and mask_BS is not None and set(inputs) == {"input_ids"}
    decoder: StepDecoder | None = None
    if cache is None:
        batch, length = next(iter(inputs.values())).shape[:2]
        length += max_new_tokens - 1  # The model never reads the last new token.
        if captures and processor is None and (packs or mask_BS is None):
            decoder = kept_decoder(cast(DecoderModel, model), sampler, length)
            length = ROOM * -(-length // ROOM)
        if decoder is None:
            cache = KVCache.of(cast(nn.Module, model), batch, length)
        else:
            cache = decoder.cache
    forward = _Forwards(model, inputs, mask_BS, cache)
    fed_B1: Tensor | None = None  # what a step computes from, if its sampler has not chosen it
    if packs:
        assert mask_BS is not None
        prompts = [row[mask == 1] for row, mask in zip(inputs["input_ids"], mask_BS)]
        read_prompts(cast(DecoderModel, model), cache, range(batch), prompts)
        fed_B1, ends_B, mask_BS = inputs["input_ids"][:, -1:], mask_BS.sum(-1) - 1, None
    # The first step that the decoder computes, if there is one; the forward computes the others.
    first = (0 if packs else 1) if captures else max_new_tokens
    look: Look | None = None  # at the last step whose end the host has not seen
    for step in range(max_new_tokens):
        if step == first:
            if decoder is None:
                chooses = sampler if processor is None else None
                decoder = StepDecoder(cast(DecoderModel, model), cache, chooses, mask_BS)
            decoder.begin(sampler, ends_B if packs else cache.length)
            sampler = decoder.sampler or sampler
        if decoder is not None and step >= first and processor is None:
            tokens_B, fed_B1 = decoder(fed_B1).clone(), None
        else:
            compute = forward if decoder is None or step < first else decoder
            logits_BV = compute(fed_B1)
            if processor is not None:
                logits_BV = processor(ids_BS, logits_BV)
            tokens_B = sampler(logits_BV)
            fed_B1 = tokens_B.unsqueeze(1)
        log_probs_B = None if sampler.log_probs_B is None else sampler.log_probs_B.clone()
        # A GPU waits only if the rows can end, and then for the step before this one, so that it
        # always has a step to run.
        before, look = look, None
        if on_cpu or sampler.stops or texts is not None:
            look = Look(sampler, tokens_B)
        if before is not None and not on_cpu:
            if before.all_stopped(step - 1):
                break
            if texts is not None and (ended := texts.push(before.values[0].tolist())):
                sampler.stopped_B[ended] = True
                if bool(sampler.stopped_B.all()):
                    break
                tokens_B[ended] = sampler.pad
                if log_probs_B is not None:
                    log_probs_B[ended] = 0.0
        over = on_cpu and look is not None and look.all_stopped(step)
        if on_cpu and texts is not None and look is not None:
            sampler.stopped_B[texts.push(look.values[0].tolist())] = True
            over = bool(sampler.stopped_B.all())
        yield tokens_B, log_probs_B
        if over:
            break
        if processor is not None:
            ids_BS = torch.cat([ids_BS, tokens_B.unsqueeze(1)], dim=1)
    Look(sampler).all_stopped(max_new_tokens - 1)
    if decoder is not None:
        keep(decoder)


class _Forwards:
    """Computes the logits of the next tokens by forwards of the model.

    Args: inputs: the prompts, as the model's forward takes them; mask_BS: 0 for padding on the
        left, for these and the tokens in the cache, or None; cache: takes their keys and values.
    """

    def __init__(
        self,
        model: LanguageModel,
        inputs: dict[str, Tensor],
        mask_BS: Tensor | None,
        cache: KVCache,
    ) -> None:
        self.model, self.inputs, self.mask_BS, self.cache = model, inputs, mask_BS, cache

    def __call__(self, ids_B1: Tensor | None) -> Tensor:
        """Return the float32 logits (batch, vocab) after these tokens, or after the prompts."""
        if ids_B1 is None:
            inputs = self.inputs
            if set(inputs) == {"input_ids"} and isinstance(self.model, DecoderModel):
                *parts, last = chunks(self.model, inputs["input_ids"])
                for part in parts:
                    self._forward({"input_ids": inputs["input_ids"][:, part]})
                inputs = {"input_ids": inputs["input_ids"][:, last]}
        else:
            kept = {name: x for name, x in self.inputs.items() if name.startswith("memory")}
            inputs = {"input_ids": ids_B1, **kept}
            if self.mask_BS is not None:
                self.mask_BS = torch.cat([self.mask_BS, torch.ones_like(ids_B1)], dim=1)
        return self.model.head.logits(self._forward(inputs)[:, -1:])[:, -1].float()

    def _forward(self, inputs: dict[str, Tensor]) -> Any:
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


class Look:
    """What the host sees of a step, on its way there: the sampler's flags, and tensors of the rows.

    Args: tensors: the tokens, or more of what the next step overwrites.
    """

    def __init__(self, sampler: Sampler, *tensors: Tensor) -> None:
        self.sampler, self.made = sampler, HostCopy(sampler.flags, *tensors)

    @property
    def values(self) -> list[Tensor]:
        """The tensors of the rows, on the CPU."""
        return self.made.wait()[1:]

    def all_stopped(self, step: int) -> bool:
        """Return whether all rows have ended. Raise LigerError if one has failed."""
        all_stopped, failed = self.made.wait()[0].tolist()
        if failed:
            raise no_token_error(int(self.sampler.failed_B.int().argmax()), step)
        return all_stopped
