"""Milliseconds of a new token: this library, the matrix products alone, and transformers.

`python -m benchmarks.decoding --out FOLDER` needs a GPU of 80 GB and about 15 minutes. `--models`
measures a part, and keeps the other rows of the file. The weights are random. Each time is that of
the tokens 2 to 128 after the prompts, divided by 127:

- "generate" keeps its graph and its cache from the call before. It is the median of three calls.
- "first_call" is the first call with such prompts, which captures the graph in "capture_s" seconds
  and "graph_gib" of memory. "first_token_s" are the seconds until its first token, in which it may
  compile kernels, and "next_first_token_s" are those of later calls.
- "eager" launches each kernel.
- "medusa" and "draft_model" draft four tokens for each pass, of which random weights accept hardly
  any or all. A pass takes the time of a token times the tokens of a pass, whatever the weights.
- "transformers" is its generate with its default cache, and "static" with its static one.

"products" are the products with all weights, in a graph, and "step" is the device's time of a step
without the choice of a token, of which "kernels" has the milliseconds of the longest kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import (
    RESULTS,
    device_times,
    environment,
    graph_times,
    release_memory,
    table,
    write,
)
from ligermodels import LigerLlama, LlamaConfig
from ligermodels.generation import DraftModel
from ligermodels.generation.decode_step import Replayed, StepDecoder
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.auto import families

PROMPT, NEW, LONG = 512, 128, 32768
# For each preset, the rows and the tokens of their prompts.
WORKS = {
    "llama-3-8b": [(1, PROMPT), (16, PROMPT), (64, PROMPT), (8, LONG)],
    "gemma-2-9b": [(1, PROMPT), (16, PROMPT)],
    "qwen2.5-7b": [(1, PROMPT), (16, PROMPT)],
}
COLUMNS = ["preset", "rows", "context", "products", "step", "generate", "ratio", "first_call"]
COLUMNS += ["first_token_s", "next_first_token_s", "capture_s", "graph_gib", "eager"]
COLUMNS += ["transformers", "static", "medusa", "draft_model"]


@contextmanager
def bfloat16() -> Iterator[None]:
    """Let new modules have bfloat16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def seconds_and_milliseconds(
    generate: Callable[[Callable[..., None]], Any], new: int = NEW
) -> tuple[float, float]:
    """Return the seconds until the first token, and the milliseconds of each of the others.

    Args: generate: a function that generates `new` tokens, and calls its argument after each.
    """
    firsts: list[float] = []

    def after_token(*_: Any) -> None:
        if not firsts:
            torch.cuda.synchronize()
            firsts.append(time.perf_counter())

    torch.cuda.synchronize()
    start = time.perf_counter()
    generate(after_token)
    torch.cuda.synchronize()
    return firsts[0] - start, (time.perf_counter() - firsts[0]) / (new - 1) * 1e3


def milliseconds(
    generate: Callable[[Callable[..., None]], Any], calls: int, new: int = NEW
) -> float:
    """Return the median of so many calls after a first one: see `seconds_and_milliseconds`."""
    seconds_and_milliseconds(generate, new)
    return statistics.median(seconds_and_milliseconds(generate, new)[1] for _ in range(calls))


def products(model: nn.Module, rows: int) -> float:
    """Return the time of the products with all weights of linears and of the head, in a graph."""
    weights = [m.weight for m in model.layers.modules() if isinstance(m, nn.Linear)]
    weights.append(model.head.weight)
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(w) for w in weights}
    return statistics.median(
        graph_times(lambda: [F.linear(inputs[w.shape[1]], w) for w in weights], 1, 20)
    )


@torch.no_grad()
def step(model: nn.Module, rows: int, context: int) -> dict[str, Any]:
    """Return the time of a step of decoding after `context` tokens in each row, and its kernels.

    The cache holds random numbers instead of prompts.
    """
    ids = torch.randint(3, 1000, (rows, 1), device="cuda")
    cache = KVCache.of(model, rows, context + 64)
    model(ids, cache=cache)
    for buffer in (*cache.keys, *cache.values):
        if buffer is not None:
            buffer.normal_()
    cache.advance(context - 1)
    decoder = StepDecoder(model, cache)
    found: dict[str, Any] = {"step": statistics.median(device_times(lambda: decoder(ids)))}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        decoder(ids)
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiled.events():
        times[event.name[:60]] += event.device_time / 1e3
    found["kernels"] = dict(times.most_common(10))
    return found


@contextmanager
def captures_measured(row: dict[str, Any]) -> Iterator[None]:
    """Write the time and the memory of the captures inside into a row."""
    capture = Replayed._captured

    def measured(self: Replayed) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        free, start = torch.cuda.mem_get_info()[0], time.perf_counter()
        graph = capture(self)
        torch.cuda.synchronize()
        row["capture_s"] = time.perf_counter() - start
        row["graph_gib"] = (free - torch.cuda.mem_get_info()[0]) / 2**30
        return graph

    Replayed._captured = measured  # type: ignore[method-assign]
    try:
        yield
    finally:
        Replayed._captured = capture  # type: ignore[method-assign]


def ours(model: Any, row: dict[str, Any]) -> None:
    """Measure this library's times for the rows and the context of a row."""
    rows, context = row["rows"], row["context"]
    row["products"] = products(model, rows)
    row |= step(model, rows, context)
    release_memory()
    ids = torch.randint(3, 1000, (rows, context), device="cuda")

    def generate(after_token: Callable[..., None], new: int = NEW) -> None:
        model.generate(ids, max_new_tokens=new, eos_token_id=[], callback=after_token)

    with captures_measured(row):
        row["first_token_s"], row["first_call"] = seconds_and_milliseconds(generate)
    calls = [seconds_and_milliseconds(generate) for _ in range(3 if context < LONG else 1)]
    row["next_first_token_s"], row["generate"] = map(statistics.median, zip(*calls))
    row["ratio"] = row["generate"] / row["products"]
    if context < LONG:
        generation = import_module("ligermodels.generation.generate")
        by_graph = generation.can_decode
        generation.can_decode = lambda *_: False
        try:
            row["eager"] = milliseconds(lambda after_token: generate(after_token, 24), 1, 24)
        finally:
            generation.can_decode = by_graph
    if row.get("preset") == "llama-3-8b" and rows == 1:
        drafted(model, ids, row)


def drafted(model: Any, ids: Tensor, row: dict[str, Any]) -> None:
    """Measure the milliseconds of a token, and the tokens of a pass, with drafts of each kind."""
    with torch.device("cuda"), bfloat16():
        small = LigerLlama(LlamaConfig.preset("llama-3.2-1b")).requires_grad_(False).eval()
        heads = {"medusa": MedusaHeads(model.head, 4), "draft_model": DraftModel(small, 4)}
    options = {"max_new_tokens": NEW, "eos_token_id": []}
    for name, each in heads.items():
        row[name] = milliseconds(
            lambda after, each=each: model.generate(ids, heads=each, callback=after, **options),
            3,
        )
        passes: list[Tensor] = []
        model.generate(ids, heads=each, callback=passes.append, **options)
        row[f"{name}_tokens_a_pass"] = (NEW - 1) / (len(passes) - 1)


def transformers_model(config: Any) -> nn.Module:
    """Return transformers' model of the same sizes, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"), bfloat16():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict())).eval()


def theirs(model: Any, row: dict[str, Any], static: bool = True) -> None:
    """Measure transformers' times, with its default cache and, if wanted, with a static one."""
    rows, context = row["rows"], row["context"]
    ids = torch.randint(3, 1000, (rows, context), device="cuda")
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"max_new_tokens": NEW, "min_new_tokens": NEW}
    if context == LONG:  # All of it at once would not fit.
        options["prefill_chunk_size"] = 1024
    caches = {"transformers": {}, "static": {"cache_implementation": "static"}}
    for name in [*caches][: 1 + static]:
        cache = caches[name]

        def generate(after_token: Callable[..., None], cache: dict[str, str] = cache) -> None:
            def goes_on(ids: Tensor, scores: Any, **_: Any) -> Tensor:
                after_token()
                return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

            model.generate(ids, stopping_criteria=[goes_on], **options, **cache)

        try:
            row[name] = milliseconds(generate, 3 if context < LONG else 1)
        except Exception as error:
            traceback.print_exc()
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
        torch.compiler.reset()
        release_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", nargs="+", default=[*WORKS], choices=WORKS)
    parser.add_argument("--only-ours", action="store_true", help="leave out transformers")
    given = parser.parse_args()
    file = given.out / "decoding.json"
    others = json.loads(file.read_text())["rows"] if file.exists() else []
    rows: list[dict[str, Any]] = [row for row in others if row["preset"] not in given.models]

    def measure(name: str, of_model: Callable[[Any, dict[str, Any]], None], model: Any) -> None:
        """Fill the rows of a model, and write them down; a row that fails has the error."""
        for row in rows:
            if row["preset"] != name:
                continue
            try:
                of_model(model, row)
            except Exception as error:
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            release_memory()
            write("decoding.json", {"environment": environment(), "rows": rows}, given.out)
            print({key: value for key, value in row.items() if key != "kernels"}, flush=True)

    for name in given.models:
        rows += [{"preset": name, "rows": n, "context": tokens} for n, tokens in WORKS[name]]
        cls = next(c for c in families().values() if name in c.config_class.presets)
        with torch.device("cuda"), bfloat16():
            model = cls(cls.config_class.preset(name)).requires_grad_(False).eval()
        config = model.config
        measure(name, ours, model)
        del model
        release_memory()
        if not given.only_ours:
            model = transformers_model(config)
            measure(name, theirs, model)
            del model
            release_memory()
    print(table(rows, COLUMNS))


if __name__ == "__main__":
    main()
