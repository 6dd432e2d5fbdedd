"""Continue prompts token by token, as a batch or as a stream.

Shape legend: B batch, S prompt length, V vocabulary.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ligermodels.errors import LigerError, did_you_mean, short_repr
from ligermodels.generation.decode_step import StepDecoder, decoder_of
from ligermodels.generation.draft import DraftOptions, drafted_passes
from ligermodels.generation.generation_config import (
    checked_generation_config,
    resolve_eos_token_ids,
    resolve_pad_token_id,
    resolve_repetition_penalty,
)
from ligermodels.generation.models import DraftHeads, LanguageModel
from ligermodels.generation.prompts import Prompts, batch_prompts
from ligermodels.generation.sampling import RepetitionPenalty, Sampling
from ligermodels.kernels.checks import check_count
from ligermodels.layers.kv_cache import KVCache
from ligermodels.text.streaming import Decoder, TextStream

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
    eos_token_id: int | Iterable[int] | None
    pad_token_id: int | None
    attention_mask: Tensor | None
    repetition_penalty: float | None
    generator: torch.Generator | None
    cache: KVCache | None


def generate(
    model: LanguageModel,
    input_ids: Prompts | None = None,
    *,
    callback: Callable[[Tensor], object] | None = None,
    heads: DraftHeads | None = None,
    **options: Unpack[GenerateOptions],
) -> Tensor:
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
            prompt without sampling. `ligermodels.generation.generate_drafted` also returns how many
            tokens each forward pass gave. callback then gets all tokens of a pass.
        max_new_tokens: the maximum number of new tokens, 64 by default, and at most 10^9.
            Generation ends earlier if every row has stopped.
        do_sample: whether to draw tokens. The default is False, even if generation_config.json says
            otherwise.
        temperature, top_k, top_p: as in `Sampling`, with its defaults. They need do_sample.
        eos_token_id: the tokens that end a row. The default is that of generation_config.json, then
            that of the config. With an empty list no token ends a row.
        pad_token_id: the token that fills rows after their stop token. The default is found in the
            same order; if there is none, it is the first stop token.
        attention_mask: (batch, seq), 0 for padding, which must be on the left.
        repetition_penalty: a positive number of at most 10^6. Above 1, the tokens of the prompt and
            the new tokens become less likely to appear again (arXiv:1909.05858, section 4.1). The
            default is that of generation_config.json, then 1.
        generator: the random generator for the draws, on the model's device.
        cache: a KV cache for batch rows of seq + new - 1 tokens. The default is a new `KVCache`.
            If it holds tokens, they are the first columns of input_ids and are not computed again.

    Returns:
        (batch, seq + new) int64 on the model's device, or (batch, new) for inputs_embeds. The stop
        token is kept. Padding follows it.

    Raises:
        ValueError: a prompt is empty, an id is outside the vocabulary, padding is on the right, or
            options contradict each other.
        LigerError: the logits of a row hold NaN or infinity, so that there is no next token.
            On a CPU this comes before the token is passed on. On a GPU it comes one step later if
            there are stop tokens, else after the last token.
        CheckpointError: generation_config.json has a value of a wrong type.
    """
    _check_names("generate", options)
    if heads is not None:
        prompt_BS, steps = _passes(model, heads, input_ids, options)
    else:
        prompt_BS, steps = _start(model, input_ids, **options)
    columns = [prompt_BS]
    for tokens in steps:  # (batch,), or with heads (new,) of one row
        columns.append(tokens.view(len(prompt_BS), -1))
        if callback is not None:
            callback(tokens)
    return torch.cat(columns, dim=1)


def _check_names(function: str, options: GenerateOptions) -> None:
    """Raise TypeError for an option that there is not, as Python does, but with a suggestion."""
    known = GenerateOptions.__annotations__
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def _passes(
    model: LanguageModel, heads: DraftHeads, input_ids: Prompts | None, options: GenerateOptions
) -> tuple[Tensor, Iterator[Tensor]]:
    """Return the prompt (1, seq), and the new tokens (new,) of each pass with heads."""
    possible = ("max_new_tokens", "eos_token_id", "repetition_penalty")
    if input_ids is None or any(value and name not in possible for name, value in options.items()):
        raise ValueError(
            "generate: heads take input_ids and, of the options, only max_new_tokens, "
            "eos_token_id, repetition_penalty=1.0 and callback; leave the others out"
        )
    given: dict[str, Any] = {name: x for name, x in options.items() if name in possible}
    return drafted_passes(model, heads, input_ids, DraftOptions(**given))


def stream(
    model: LanguageModel,
    input_ids: Prompts | None = None,
    *,
    heads: DraftHeads | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[int]:
    """Return an iterator over the new tokens of one prompt, each as soon as it is computed.

    Args: the arguments of `generate`, except `callback`.
    Raises:
        ValueError: as in `generate`, at the call; also if there is more than one prompt.
    """
    _check_names("stream", options)
    if heads is not None:
        _, passes = _passes(model, heads, input_ids, options)
        return (token for new in passes for token in new.tolist())
    prompt_BS, steps = _start(model, input_ids, **options)
    if prompt_BS.shape[0] != 1:
        raise ValueError(
            f"stream: got {prompt_BS.shape[0]} prompts, expected one; for a batch, call "
            "generate(callback=...)"
        )
    return (int(tokens_B) for tokens_B in steps)


def stream_text(
    model: LanguageModel,
    tokenizer: Decoder,
    input_ids: Prompts | None = None,
    *,
    heads: DraftHeads | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[str]:
    """Return an iterator over the new text of one prompt, in pieces that never split a character.

    Special tokens are left out.

    Args: the arguments of `stream`, and the tokenizer that decodes the tokens.
    """
    tokens = stream(model, input_ids, heads=heads, **options)
    context = [] if input_ids is None else torch.as_tensor(input_ids).flatten().tolist()
    return _text_of(tokens, TextStream(tokenizer, context))


def _text_of(tokens: Iterator[int], text: TextStream) -> Iterator[str]:
    for token in tokens:
        if piece := text.push(token):
            yield piece
    if piece := text.finish():
        yield piece


def _start(
    model: LanguageModel,
    input_ids: Prompts | None,
    *,
    inputs_embeds: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    memory: Tensor | None = None,
    memory_mask: Tensor | None = None,
    max_new_tokens: int = 64,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    repetition_penalty: float | None = None,
    generator: torch.Generator | None = None,
    cache: KVCache | None = None,
) -> tuple[Tensor, Iterator[Tensor]]:
    """Check the arguments. Return the padded prompts (B, S) and an iterator over the steps' tokens.

    For inputs_embeds, the prompts have no columns. Each step has one token for each row, (B,).
    """
    config = model.config
    sampling = Sampling(do_sample, temperature, top_k, top_p)
    if check_count("generate", "max_new_tokens", max_new_tokens, 1) > MAX_NEW_TOKENS:
        raise ValueError(
            f"max_new_tokens={short_repr(max_new_tokens)}: the number must be at most "
            f"{MAX_NEW_TOKENS}"
        )
    if pad_token_id is not None:
        check_count("generate", "pad_token_id", pad_token_id, 0)
    defaults = checked_generation_config(model)
    stops = resolve_eos_token_ids(eos_token_id, defaults, config)
    if beyond := [token for token in stops if abs(token) >= 2**63]:
        raise ValueError(
            f"eos_token_id={short_repr(beyond[0])}: expected a token id of at most 64 bits"
        )
    pad = resolve_pad_token_id(pad_token_id, defaults, config, stops)
    penalty = resolve_repetition_penalty(repetition_penalty, defaults)
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
            stacklevel=3,
        )
    device = model.rotary_emb.inv_freq.device  # These stay on the device if weights are offloaded.
    if generator is not None and getattr(generator, "device", device).type != device.type:
        raise ValueError(
            f"generator: it is on {generator.device}, and the model is on {device}; make the "
            "generator on the model's device"
        )
    ids_BS = ids_BS.to(device)
    mask_BS = None if mask_BS is None else mask_BS.to(device)
    if cache is None:
        # The model never reads the last new token, so the cache needs no room for its keys.
        cache = KVCache.of(cast(nn.Module, model), batch, prompt + max_new_tokens - 1)
    elif cache.length >= prompt:
        raise ValueError(
            f"cache: the cache holds {cache.length} tokens already, but the prompt is only "
            f"{prompt} long; pass a prompt of the cached tokens and at least one new token"
        )
    inputs = {"input_ids": ids_BS} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
    inputs = {name: x.to(device)[:, cache.length :] for name, x in inputs.items()}
    more = {"prefix_lengths": prefix_lengths, "memory": memory, "memory_mask": memory_mask}
    inputs |= {name: x.to(device) for name, x in more.items() if x is not None}
    repetition = None
    if penalty != 1.0:
        counted_BS = mask_BS if inputs_embeds is None else torch.zeros_like(ids_BS)
        repetition = RepetitionPenalty(penalty, ids_BS, counted_BS, config.vocab_size)
    steps = _steps(
        model, inputs, mask_BS, max_new_tokens, sampling, repetition, stops, pad, generator, cache
    )
    return ids_BS if inputs_embeds is None else ids_BS[:, :0], steps


# This is not inference_mode, because its tensors cannot be the input of a training forward.
@torch.no_grad()
def _steps(
    model: LanguageModel,
    inputs: dict[str, Tensor],
    mask_BS: Tensor | None,
    max_new_tokens: int,
    sampling: Sampling,
    repetition: RepetitionPenalty | None,
    stops: list[int],
    pad: int,
    generator: torch.Generator | None,
    cache: KVCache,
) -> Iterator[Tensor]:
    batch, device = len(next(iter(inputs.values()))), model.rotary_emb.inv_freq.device
    positions_BS = None
    if mask_BS is not None:
        positions_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)[:, cache.length :]
    stop_ids = torch.tensor(stops, device=device)
    stopped_B = torch.zeros(batch, dtype=torch.bool, device=device)
    failed_B = stopped_B
    on_cpu = device.type == "cpu"
    decoder: StepDecoder | None = None
    flags: _Flags | None = None  # of the last step whose end the host has not seen
    for step in range(max_new_tokens):
        if decoder is not None:
            logits_BV = decoder(inputs["input_ids"])
        else:
            hidden = model(**inputs, position_ids=positions_BS, attention_mask=mask_BS, cache=cache)
            logits_BV = model.head.logits(hidden[:, -1:])[:, -1].float()
        if step == 0 and max_new_tokens > 4:  # Fewer steps take less time than a capture.
            decoder = decoder_of(model, cache, mask_BS, set(inputs))
        broken_B = ~logits_BV.amax(-1).isfinite()
        if repetition is not None:
            logits_BV = repetition(logits_BV)
        if sampling.do_sample:  # A draw from NaN would end the process on a GPU.
            logits_BV = logits_BV.masked_fill(broken_B.unsqueeze(1), 0.0)
        tokens_B = sampling.next_tokens(logits_BV, generator)
        if repetition is not None:
            repetition.add(tokens_B)
        failed_B = failed_B | (broken_B & ~stopped_B)
        if stops:
            tokens_B = tokens_B.masked_fill(stopped_B, pad)
            stopped_B = stopped_B | torch.isin(tokens_B, stop_ids)
        # A GPU waits only if stop tokens need it, and then for the step before this one, so that it
        # always has a step to run.
        before, flags = flags, _Flags(stopped_B, failed_B) if on_cpu or stops else None
        if before is not None and not on_cpu and before.all_stopped(step - 1):
            return
        ended = on_cpu and flags is not None and flags.all_stopped(step)
        yield tokens_B
        if ended:
            return
        kept = {name: x for name, x in inputs.items() if name in ("memory", "memory_mask")}
        inputs = {"input_ids": tokens_B.unsqueeze(1), **kept}
        if mask_BS is not None and decoder is None:
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(batch, 1)], dim=1)
        positions_BS = None if positions_BS is None else positions_BS[:, -1:] + 1
    _Flags(stopped_B, failed_B).all_stopped(max_new_tokens - 1)


class _Flags:
    """Two flags on the way to the host: all rows have stopped, and a row has failed."""

    def __init__(self, stopped_B: Tensor, failed_B: Tensor) -> None:
        made = torch.stack([stopped_B.all(), failed_B.any()])
        self.failed_B, self.event = failed_B, None
        if made.is_cuda:
            self.values = torch.empty(2, dtype=torch.bool, pin_memory=True)
            self.values.copy_(made, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(made.device))
        else:
            self.values = made

    def all_stopped(self, step: int) -> bool:
        """Return whether all rows have stopped. Raise LigerError if one has failed."""
        if self.event is not None:
            self.event.synchronize()
        all_stopped, failed = self.values.tolist()
        if failed:
            raise _no_token(self.failed_B, step)
        return all_stopped


def _no_token(failed_B: Tensor, step: int) -> LigerError:
    row = int(failed_B.int().argmax())
    return LigerError(
        f"generate: the logits of row {row} are NaN or infinite, at new token {step} or before, so "
        "that there is no likeliest token; check the weights, and load the model in bfloat16 or "
        "float32 if it is in float16"
    )
