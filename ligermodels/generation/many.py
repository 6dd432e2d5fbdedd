"""Generate for many prompts: a finished row gives its place in the batch to the next prompt.

Shape legend: B rows of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ligermodels.generation.cache_memory import free_bytes, row_bytes
from ligermodels.generation.decode_step import HostCopy, StepDecoder, can_decode
from ligermodels.generation.generate import StreamOptions, generate, stop_strings_of
from ligermodels.generation.generation_config import check_names, resolve_rule
from ligermodels.generation.prefill import read_prompts
from ligermodels.generation.prompts import batch_prompts
from ligermodels.generation.sampling import RuleOptions, Sampler, no_token_error
from ligermodels.kernels.checks import check_count
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel
from ligermodels.progress import track
from ligermodels.text.streaming import Decoder, StopStrings

# With more rows, a step takes as many times longer as it has more rows.
MOST_ROWS, MOST_ROWS_ON_CPU = 256, 16
# The part of the free memory that the cache may take. Reading prompts needs some, too.
CACHE_SHARE = 0.8


class ManyOptions(RuleOptions, total=False):
    """The options of `generate_many`, which describes them."""

    max_batch: int | None
    num_samples: int
    return_log_probs: bool
    tokenizer: Decoder | None
    stop_strings: Sequence[str]
    generator: torch.Generator | None
    progress: bool


def generate_many(
    model: DecoderModel,
    prompts: Iterable[Tensor | Sequence[int]],
    max_new_tokens: int | Sequence[int] = 64,
    *,
    max_batch: int | None = None,
    num_samples: int = 1,
    return_log_probs: bool = False,
    tokenizer: Decoder | None = None,
    stop_strings: Sequence[str] = (),
    generator: torch.Generator | None = None,
    progress: bool = False,
    **rule: Unpack[RuleOptions],
) -> Iterator[Any]:
    """Continue many prompts of any lengths, as many at a time as the batch holds.

    A row that has ended gives its place to the next prompt. Prompts are read packed, without
    padding, where the attention kernel allows it, and long ones in chunks.

    Args:
        model: any `DecoderModel`.
        prompts: the ids of each prompt, a list or a 1-D tensor.
        max_new_tokens: the maximum number of new tokens, of all prompts or of each of them.
        max_batch: the number of rows that are computed together. By default they are as many as
            the free memory holds, up to 256 (16 on a CPU).
        num_samples: how many results each prompt has. They share the reading of the prompt.
        return_log_probs, tokenizer, stop_strings, generator: as in `generate`.
        progress: whether to show a progress bar on stderr.
        rule: the options of `generate` that say how tokens are chosen and which of them end a row:
            do_sample, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            logit_bias and eos_token_id.

    Returns:
        An iterator over the new tokens of each prompt, (new,) int64 on the CPU, in the order of the
        prompts, `num_samples` of each one after the other. The stop token is kept. With
        return_log_probs, they come in pairs with their log-probabilities, (new,) float32.

    Raises:
        ValueError: as in `generate`, at the call; also if the cache of max_batch rows, or of one
            prompt's samples, needs more than the free memory.
        LigerError: the logits of a prompt hold NaN or infinity.
    """
    check_count("generate_many", "num_samples", num_samples, 1)
    if (
        max_batch is not None
        and check_count("generate_many", "max_batch", max_batch, 1) < num_samples
    ):
        raise ValueError(
            f"generate_many: max_batch={max_batch} is less than num_samples={num_samples}; the "
            "samples of a prompt are in the batch together"
        )
    device = model.rotary_emb.inv_freq.device
    vocab_size = model.config.vocab_size
    given = [batch_prompts(ids, None, 0, vocab_size)[0].cpu() for ids in prompts]
    several = next((ids for ids in given if len(ids) != 1), None)
    if several is not None:
        raise ValueError(
            f"generate_many: a prompt has shape {tuple(several.shape)}; expected one row"
        )
    if isinstance(max_new_tokens, Sequence):
        most = [*max_new_tokens]
    else:
        most = [max_new_tokens] * len(given)
    if len(most) != len(given):
        raise ValueError(f"generate_many: {len(most)} max_new_tokens for {len(given)} prompts")
    for number in most:
        check_count("generate_many", "max_new_tokens", number, 1)
    check_names("generate_many", rule, RuleOptions.__annotations__)
    choice = resolve_rule(model, **rule)
    rows = [
        Row(
            ids[0],
            number,
            choice.stops,
            stop_strings_of(stop_strings, tokenizer, [ids[0].tolist()]),
        )
        for ids, number in zip(given, most)
        for _ in range(num_samples)
    ]
    if not rows:
        return iter(())
    longest = max(len(row.prompt) + row.most for row in rows) - 1
    cache = KVCache.of(model, 1, longest)
    steps = can_decode(model, cache, {"input_ids"}, captures=False)
    batch = _batch_size(model, cache, len(rows), num_samples, max_batch)
    if not steps:
        options: StreamOptions = {**rule, "generator": generator, "pad_token_id": choice.pad}
        found = _in_batches(model, rows, batch, options)
    else:
        cache = KVCache.of(model, batch, longest)
        sampler = Sampler(choice, batch, vocab_size, device, generator, return_log_probs)
        decoder = StepDecoder(model, cache, sampler)
        found = _continuously(decoder, rows, num_samples)
    found = track(found, "generating", len(rows), shows=progress)
    return _results(rows, found, return_log_probs)


class Row:
    """A prompt and its new tokens so far."""

    def __init__(
        self, prompt: Tensor, most: int, stops: Sequence[int], texts: StopStrings | None
    ) -> None:
        self.prompt, self.most, self.stops, self.texts = prompt, most, stops, texts
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.first_step = 0  # that computes a token of this row

    def push(self, token: int, log_prob: float) -> bool:
        """Take a new token; return whether it is the last one."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        over = token in self.stops or len(self.tokens) == self.most
        return over or (self.texts is not None and bool(self.texts.push([token])))


def _results(rows: list[Row], found: Iterator[int], with_log_probs: bool) -> Iterator[Any]:
    """Yield the results of the rows in order; `found` yields the indices of finished ones."""
    finished: set[int] = set()
    at = 0
    for index in found:
        finished.add(index)
        while at in finished:
            tokens = torch.tensor(rows[at].tokens)
            yield (tokens, torch.tensor(rows[at].log_probs)) if with_log_probs else tokens
            at += 1


def _in_batches(
    model: DecoderModel, rows: list[Row], batch: int, options: StreamOptions
) -> Iterator[int]:
    """Generate batch by batch, for models whose steps are forwards."""
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        prompts = [row.prompt for row in part]
        options["max_new_tokens"] = max(row.most for row in part)
        found, log_probs = generate(model, prompts, return_log_probs=True, **options)
        new = found[:, -log_probs.shape[1] :].tolist()
        for index, (row, tokens, values) in enumerate(zip(part, new, log_probs.tolist()), start):
            any(row.push(*each) for each in zip(tokens, values))
            yield index


@torch.no_grad()
def _continuously(decoder: StepDecoder, rows: list[Row], num_samples: int) -> Iterator[int]:
    """Generate with a batch that stays full, and yield the indices of rows that have finished."""
    sampler, batch = decoder.sampler, decoder.cache.batch
    assert sampler is not None
    sampler.stopped_B.fill_(True)
    waiting = deque(range(0, len(rows), num_samples))
    places: list[int | None] = [None] * batch  # the index of the row that is there
    # Reading a few prompts takes as long as several steps, so some places wait for each other.
    at_once = max(1, batch // 8 // num_samples)
    step, copy = 0, None
    while waiting or any(index is not None for index in places):
        free = [place for place, index in enumerate(places) if index is None]
        count = min(len(free) // num_samples, len(waiting))
        if count and (count >= min(at_once, len(waiting)) or len(free) == batch):
            indices = [waiting.popleft() for _ in range(count)]
            _admit(decoder, rows, indices, free[: count * num_samples], num_samples, step)
            for place, index in zip(free, (i + k for i in indices for k in range(num_samples))):
                places[place] = index
        made = decoder.replay()
        log_probs = [] if sampler.log_probs_B is None else [sampler.log_probs_B]
        before, copy = copy, HostCopy(sampler.failed_B, made, *log_probs)
        # A GPU computes this step while the host looks at the one before.
        if not made.is_cuda:
            before = copy
        looked = step - 1 if made.is_cuda else step
        step += 1
        if before is None:
            continue
        failed, tokens, *values = before.wait()
        if failed.any():
            raise no_token_error(int(failed.int().argmax()), looked)
        pairs = zip(tokens.tolist(), values[0].tolist() if values else [0.0] * batch)
        for place, (here, pair) in enumerate(zip(list(places), pairs)):
            if here is None or rows[here].first_step > looked or not rows[here].push(*pair):
                continue
            places[place] = None
            sampler.stopped_B[place] = True
            decoder.ends_B[place] = 0  # so that it attends to few tokens from now on
            yield here


def _admit(
    decoder: StepDecoder,
    rows: list[Row],
    indices: list[int],
    places: list[int],
    num_samples: int,
    step: int,
) -> None:
    """Read prompts into places of the batch. The next step computes their first tokens.

    It does so from their last tokens, which it writes into the cache a second time.
    """
    sampler, cache, device = decoder.sampler, decoder.cache, decoder.device
    assert sampler is not None
    prompts = [_to_device(rows[index].prompt, device) for index in indices]
    read_prompts(decoder.model, cache, places[::num_samples], prompts)
    for k, (index, prompt) in enumerate(zip(indices, prompts)):
        mine = places[k * num_samples : (k + 1) * num_samples]
        cache.copy_row(mine[0], mine[1:])
        for row, place in enumerate(mine, index):
            rows[row].first_step = step
            sampler.read(place, prompt)
            decoder.ids_B1[place] = prompt[-1:]
            decoder.ends_B[place] = len(prompt) - 1


def _to_device(ids: Tensor, device: torch.device) -> Tensor:
    """Return ids on the device, without waiting for it."""
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids


def _batch_size(
    model: DecoderModel, cache: KVCache, rows: int, num_samples: int, asked: int | None
) -> int:
    """Return the number of rows of the batch.

    Args: cache: of one row; rows: the number of all results.
    Raises:
        ValueError: their cache needs more than the free memory.
    """
    device = model.head.weight.device
    each, free = row_bytes(model, cache), free_bytes(device)
    usable = int(CACHE_SHARE * free)
    most = MOST_ROWS if device.type == "cuda" else MOST_ROWS_ON_CPU
    batch = min(rows, asked or max(num_samples, min(most, usable // each)))
    if batch * each > usable:
        raise ValueError(
            f"generate_many: {batch} rows of {cache.max_length} tokens need "
            f"{batch * each / 2**30:.2f} GiB for their cache, and {usable / 2**30:.2f} GiB of "
            f"{free / 2**30:.2f} free ones may be used; lower max_batch, num_samples or "
            "max_new_tokens, or leave out the longest prompts"
        )
    return batch
