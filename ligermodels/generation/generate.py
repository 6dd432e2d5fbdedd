"""Continuing prompts token by token: the KV cache, the choice of a token, batches, streaming.

Shape legend: B batch, S prompt length, V vocabulary.
"""

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.converters.files import read_json
from ligermodels.errors import CheckpointError, shown
from ligermodels.layers.attention import Cache
from ligermodels.layers.kv_cache import KVCache
from ligermodels.text import TextStream, Tokenizer

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


@dataclass(frozen=True)
class Sampling:
    """How to pick a token: the likeliest, or one drawn after temperature, top-k and top-p."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature}: must be above 0; do_sample=False is greedy"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1, or None")
        filters = (self.temperature, self.top_k, self.top_p)
        if not self.do_sample and filters != (1.0, None, None):
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}: without "
                "effect on a greedy choice; pass do_sample=True"
            )

    def filter(self, logits: Tensor) -> Tensor:
        """Logits (B, V) divided by the temperature, -inf where top-k and top-p leave a token out.

        Top-p keeps the likeliest tokens up to and with the one that reaches it
        (arXiv:1904.09751); both act on what is left after the temperature, top-k first.
        """
        logits = logits / self.temperature
        if self.top_k is not None:
            kept = torch.topk(logits, min(self.top_k, logits.shape[-1])).values
            logits = logits.masked_fill(logits < kept[:, -1:], -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ascending, order = logits.sort()
            below = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            below[:, -1] = False
            logits = logits.masked_fill(below.scatter(-1, order, below), -torch.inf)
        return logits

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """One token (B,) per row of float32 logits (B, V)."""
        if not self.do_sample:
            return logits.argmax(-1)
        probabilities = self.filter(logits).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def generate(
    model: Any,
    input_ids: Prompts,
    *,
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
    cache: Cache | None = None,
    callback: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Continue prompts, greedily unless `do_sample`.

    Args:
        input_ids: (batch, seq) or (seq,) integers, or a list of prompts of any lengths, each a list
            or a 1-D tensor; those are padded on the left.
        max_new_tokens: at most so many; fewer when every row has stopped.
        do_sample: draw tokens. Whatever generation_config.json says, the default is greedy.
        temperature, top_k, top_p: as in `Sampling`; only with do_sample.
        eos_token_id: tokens that end a row; default generation_config.json's, then the config's.
            An empty list: none does.
        pad_token_id: fills rows that have stopped; default as above, then the first stop token.
        attention_mask: (batch, seq), 0 for padding, which has to be on the left.
        repetition_penalty: makes tokens of the prompt and those since less likely where it is
            above 1 (arXiv:1909.05858, 4.1); default generation_config.json's, then 1.
        generator: of the draws, on the model's device.
        cache: a KV cache with room for batch rows of seq + new - 1 tokens; default a `KVCache`.
            Tokens in it are the first columns of input_ids and are not computed again.
        callback: called after every step with that step's tokens (batch,).

    Returns:
        (batch, seq + new) int64 on the model's device; a stop token is kept, padding follows it.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, padding on the right, or options
            that contradict each other.
    """
    prompt_ids, steps = _prepare(
        model,
        input_ids,
        max_new_tokens,
        Sampling(do_sample, temperature, top_k, top_p),
        eos_token_id,
        pad_token_id,
        attention_mask,
        repetition_penalty,
        generator,
        cache,
    )
    columns = [prompt_ids]
    for tokens in steps:
        columns.append(tokens.unsqueeze(1))
        if callback is not None:
            callback(tokens)
    return torch.cat(columns, dim=1)


def stream(model: Any, input_ids: Prompts, **options: Any) -> Iterator[int]:
    """The new tokens of one prompt as they come; options as in `generate`, without `callback`.

    Raises:
        ValueError: as in `generate`, before the first token; also for more than one prompt.
    """
    sampling = Sampling(
        **{
            name: options.pop(name)
            for name in ("do_sample", "temperature", "top_k", "top_p")
            if name in options
        }
    )
    prompt_ids, steps = _prepare(model, input_ids, sampling=sampling, **options)
    if prompt_ids.shape[0] != 1:
        raise ValueError(
            f"stream: {prompt_ids.shape[0]} prompts; a batch goes through generate(callback=...)"
        )
    return (int(tokens) for tokens in steps)


def stream_text(
    model: Any, tokenizer: Tokenizer, input_ids: Prompts, **options: Any
) -> Iterator[str]:
    """The continuation of one prompt as pieces of text, never half a character.

    Args: as in `stream`; special tokens are left out.
    """
    tokens = stream(model, input_ids, **options)
    context = torch.as_tensor(input_ids).flatten().tolist()
    return _pieces(TextStream(tokenizer, context), tokens)


def _pieces(text: TextStream, tokens: Iterator[int]) -> Iterator[str]:
    for token in tokens:
        if piece := text.push(token):
            yield piece
    if piece := text.finish():
        yield piece


def _prepare(
    model: Any,
    input_ids: Prompts,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    repetition_penalty: float | None = None,
    generator: torch.Generator | None = None,
    cache: Cache | None = None,
) -> tuple[Tensor, Iterator[Tensor]]:
    """Checks everything; the padded prompts (B, S), and an iterator over the steps' tokens (B,)."""
    config = model.config
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    defaults = _generation_config(model)
    stops = _stop_tokens(eos_token_id, defaults, config)
    pad = _pad_token(pad_token_id, stops, defaults, config)
    penalty = _penalty(repetition_penalty, defaults)
    device = model.embed_tokens.weight.device
    ids_BS, mask_BS = _batch(input_ids, attention_mask, pad)
    _check_vocabulary(ids_BS, config.vocab_size)
    total = ids_BS.shape[1] + max_new_tokens
    if total > config.max_position_embeddings:
        warnings.warn(
            f"{ids_BS.shape[1]} prompt and {max_new_tokens} new tokens go beyond "
            f"max_position_embeddings={config.max_position_embeddings}, where the model was not "
            "trained",
            stacklevel=3,
        )
    ids_BS = ids_BS.to(device)
    mask_BS = None if mask_BS is None else mask_BS.to(device)
    if cache is None:
        # the last token is never fed back, so its keys need no room
        cache = KVCache(config, ids_BS.shape[0], total - 1, windows=_windows(model))
    elif cache.length >= ids_BS.shape[1]:
        raise ValueError(
            f"cache: holds {cache.length} tokens already; the prompt has to go on behind them, but "
            f"is {ids_BS.shape[1]} long"
        )
    steps = _steps(
        model,
        ids_BS,
        mask_BS,
        max_new_tokens,
        sampling or Sampling(),
        stops,
        pad,
        penalty,
        generator,
        cache,
    )
    return ids_BS, steps


def _windows(model: Any) -> list[int | None]:
    """Each layer's window as it is, whatever the config says; None where a layer tells none."""
    return [getattr(getattr(each, "self_attn", None), "window", None) for each in model.layers]


# Not inference_mode: its tensors cannot go into a training forward, and what is generated may.
@torch.no_grad()
def _steps(
    model: Any,
    ids_BS: Tensor,
    mask_BS: Tensor | None,
    max_new_tokens: int,
    sampling: Sampling,
    stops: list[int],
    pad: int,
    penalty: float,
    generator: torch.Generator | None,
    cache: Cache,
) -> Iterator[Tensor]:
    batch, prompt = ids_BS.shape
    stop_ids = torch.tensor(stops, device=ids_BS.device)
    stopped = torch.zeros(batch, dtype=torch.bool, device=ids_BS.device)
    positions = None
    if mask_BS is not None:
        positions = (mask_BS.cumsum(-1) - 1).clamp(min=0)
        positions = positions[:, cache.length :]
        room = mask_BS.new_ones(batch, max_new_tokens)
        mask_BS = torch.cat([mask_BS, room], dim=1)
    seen_BV = None
    if penalty != 1.0:
        seen_BV = _seen(ids_BS, mask_BS, model.config.vocab_size)
    feed = ids_BS[:, cache.length :]
    for step in range(max_new_tokens):
        hidden = model(
            feed,
            position_ids=positions,
            attention_mask=None if mask_BS is None else mask_BS[:, : prompt + step],
            cache=cache,
        )
        logits = model.head.logits(hidden[:, -1:])[:, -1].float()
        if seen_BV is not None:
            likelier = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(seen_BV, likelier, logits)
        tokens = sampling.choose(logits, generator)
        if seen_BV is not None:
            seen_BV.scatter_(1, tokens.unsqueeze(1), True)
        if stops:
            tokens = tokens.masked_fill(stopped, pad)
            stopped = stopped | torch.isin(tokens, stop_ids)
        yield tokens
        if stops and bool(stopped.all()):
            return
        feed = tokens.unsqueeze(1)
        positions = None if positions is None else positions[:, -1:] + 1


def _seen(ids_BS: Tensor, mask_BS: Tensor | None, vocabulary: int) -> Tensor:
    """Which tokens of the vocabulary stand in each row, padding aside: (B, V) bool."""
    found = torch.zeros(len(ids_BS), vocabulary + 1, dtype=torch.bool, device=ids_BS.device)
    if mask_BS is not None:
        ids_BS = ids_BS.masked_fill(mask_BS[:, : ids_BS.shape[1]] == 0, vocabulary)
    return found.scatter_(1, ids_BS, True)[:, :vocabulary]


def _batch(
    input_ids: Prompts, attention_mask: Tensor | None, pad: int
) -> tuple[Tensor, Tensor | None]:
    """Prompts as (B, S), and which of them are tokens (B, S), None where all are."""
    if not isinstance(input_ids, Tensor):
        if len(input_ids) and isinstance(input_ids[0], int):
            input_ids = torch.tensor(input_ids)
        else:
            if attention_mask is not None:
                raise ValueError("attention_mask: not needed with a list of prompts; leave it out")
            return _pad_left([torch.as_tensor(row) for row in input_ids], pad)
    if input_ids.dim() == 1:
        input_ids = input_ids.unsqueeze(0)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids {tuple(input_ids.shape)}: expected (batch, seq) or a list")
    _check_rows(list(input_ids))
    if attention_mask is None:
        return input_ids.long(), None
    if attention_mask.dim() == 1:
        attention_mask = attention_mask.unsqueeze(0)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} and input_ids "
            f"{tuple(input_ids.shape)} differ in shape"
        )
    mask = attention_mask.bool()
    if not bool(mask.any(1).all()):
        raise ValueError(f"attention_mask: row {int(mask.any(1).int().argmin())} is all padding")
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            "attention_mask: padding to the right of tokens; pad on the left, or pass the prompts "
            "as a list without padding"
        )
    return input_ids.long(), None if bool(mask.all()) else mask.long()


def _pad_left(rows: list[Tensor], pad: int) -> tuple[Tensor, Tensor | None]:
    _check_rows(rows)
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = row
        mask[i, longest - len(row) :] = 1
    return ids, None if bool(mask.all()) else mask


def _check_rows(rows: list[Tensor]) -> None:
    if not rows:
        raise ValueError("input_ids: no tokens; begin with one, such as bos_token_id")
    for i, row in enumerate(rows):
        # an empty list is a float tensor to torch
        number = row.is_floating_point() and row.numel() > 0
        if row.dim() != 1 or number or row.dtype == torch.bool:
            raise ValueError(
                f"input_ids: prompt {i} is {row.dtype} of shape {tuple(row.shape)}; expected token "
                "ids in one dimension"
            )
        if not row.numel():
            raise ValueError(
                f"input_ids: prompt {i} is empty; begin with a token, such as bos_token_id"
            )


def _check_vocabulary(ids: Tensor, size: int) -> None:
    # padding too: it is masked, but it is embedded
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.numel():
        raise ValueError(f"input_ids: token {int(outside[0])} is outside the vocabulary of {size}")


def _is_id(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**31


def _are_ids(value: Any) -> bool:
    return all(map(_is_id, value if isinstance(value, list) else [value]))


def _is_penalty(value: Any) -> bool:
    return isinstance(value, (int, float)) and value is not True and 0 < value <= 1e6


# What is read of generation_config.json, and what it may be.
_READ: dict[str, tuple[Callable[[Any], bool], str]] = {
    "eos_token_id": (_are_ids, "an integer or a list of them"),
    "pad_token_id": (_is_id, "an integer"),
    "repetition_penalty": (_is_penalty, "a positive number"),
}
# Settings of it with which transformers chooses other tokens, even greedily.
_NOT_IMPLEMENTED = (
    *("num_beams", "penalty_alpha", "dola_layers", "guidance_scale", "sequence_bias"),
    *("no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "stop_strings", "watermarking_config"),
)
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, [], {})


def _generation_config(model: Any) -> dict[str, Any]:
    folder = getattr(model, "source_folder", None)
    path = None if folder is None else Path(folder) / "generation_config.json"
    if path is None or not path.exists():
        return {}
    found = read_json(path, CheckpointError)
    for key, (holds, expected) in _READ.items():
        if found.get(key) is not None and not holds(found[key]):
            raise CheckpointError(f"{path}: {key!r} is {shown(found[key])}, expected {expected}")
    if left_out := [name for name in _NOT_IMPLEMENTED if found.get(name) not in _NEUTRAL]:
        warnings.warn(
            f"{path}: {', '.join(left_out)}: not implemented, and without effect here",
            stacklevel=4,
        )
    return found


def _stop_tokens(
    asked: int | Iterable[int] | None, defaults: dict[str, Any], config: Any
) -> list[int]:
    found = _first(asked, defaults.get("eos_token_id"), getattr(config, "eos_token_id", None))
    if found is None:
        return []
    try:
        return [found] if isinstance(found, int) else [operator.index(token) for token in found]
    except TypeError:
        raise ValueError(f"eos_token_id={found!r}: expected a token id or several") from None


def _pad_token(asked: int | None, stops: list[int], defaults: dict[str, Any], config: Any) -> int:
    size = config.vocab_size
    if asked is not None:
        if not 0 <= asked < size:
            raise ValueError(f"pad_token_id={asked}: outside the vocabulary of {size}")
        return asked
    named = (defaults.get("pad_token_id"), getattr(config, "pad_token_id", None), *stops)
    # Old configs say -1 for "none". Without any, 0 does: what pads a prompt is masked.
    return next((i for i in named if i is not None and 0 <= i < size), 0)


def _penalty(asked: float | None, defaults: dict[str, Any]) -> float:
    found = _first(asked, defaults.get("repetition_penalty"), 1.0)
    if not _is_penalty(found):
        raise ValueError(f"repetition_penalty={found!r}: must be a number above 0; 1 is none")
    return float(found)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
