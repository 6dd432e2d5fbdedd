"""Milliseconds of a new token: this library, the matrix products alone, and transformers.

`python -m benchmarks.decoding --out FOLDER` needs a GPU of 80 GB and about seven minutes. The
weights are random. "step" is the device's time of one step, by events around single steps. The
others are (time of 128 tokens - time of one) / 127, of the medians of three calls, so "generate"
includes the capture of the graph. "eager" launches each kernel. "medusa" and "draft_model" draft
four tokens for each pass, of which random weights accept hardly any or all. A pass takes the time
of a token times the tokens of a pass, whatever the weights. The caches of "step" hold random
numbers instead of a prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import RESULTS, device_times, environment, graph_times, release_memory, write
from ligermodels import LigerLlama, LlamaConfig
from ligermodels.generation import DraftModel, generate_drafted
from ligermodels.generation.decode_step import StepDecoder
from ligermodels.generation.models import DraftHeads
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.auto import families

PROMPT, NEW = 512, 128
# (preset, rows, tokens in the cache of each row, whether transformers runs, too)
WORKS = [
    ("llama-3-8b", 1, PROMPT, True),
    ("llama-3-8b", 16, PROMPT, True),
    ("llama-3-8b", 64, PROMPT, False),
    ("llama-3-8b", 8, 32768, False),
    ("gemma-2-9b", 1, PROMPT, False),
    ("gemma-2-9b", 16, PROMPT, False),
    ("qwen2.5-7b", 1, PROMPT, False),
    ("qwen2.5-7b", 16, PROMPT, False),
]


@contextmanager
def bfloat16() -> Iterator[None]:
    """Let new modules have bfloat16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def milliseconds_a_token(generate: Callable[[int], Any], new: int = NEW) -> float:
    """Time calls that generate one and `new` tokens."""

    def seconds(tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        generate(tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(new)
    one, all_of_them = (statistics.median(seconds(n) for _ in range(3)) for n in (1, new))
    return (all_of_them - one) / (new - 1) * 1e3


def products(model: nn.Module, rows: int) -> float:
    """Return the time of the products with all weights of linears and of the head, in a graph."""
    weights = [m.weight for m in model.layers.modules() if isinstance(m, nn.Linear)]
    weights.append(model.head.weight)
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(w) for w in weights}
    return statistics.median(
        graph_times(lambda: [F.linear(inputs[w.shape[1]], w) for w in weights], 1, 20)
    )


@torch.no_grad()
def step(model: nn.Module, rows: int, context: int) -> float:
    """Return the time of a step of decoding after `context` tokens in each row."""
    ids = torch.randint(3, 1000, (rows, 1), device="cuda")
    cache = KVCache.of(model, rows, context + 64)
    model(ids, cache=cache)
    for buffer in (*cache.keys, *cache.values):
        buffer.normal_()
    cache.advance(context - 1)
    decoder = StepDecoder(model, cache)
    return statistics.median(device_times(lambda: decoder(ids), repeats=20))


def drafted(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Return the milliseconds of a token, and the tokens of a pass, with drafts of each kind."""
    with torch.device("cuda"), bfloat16():
        small = LigerLlama(LlamaConfig.preset("llama-3.2-1b")).requires_grad_(False)
        heads = {"medusa": MedusaHeads(model.head, 4), "draft_model": DraftModel(small, 4)}
    found = {}
    for name, each in heads.items():

        def passes(new: int, each: DraftHeads = each) -> list[int]:
            out = generate_drafted(model, each, ids, max_new_tokens=new, eos_token_id=[])
            return out.tokens_per_forward

        found[name] = milliseconds_a_token(passes)
        found[f"{name}_tokens_a_pass"] = (NEW - 1) / (len(passes(NEW)) - 1)
    return found


def transformers_model(config: Any) -> nn.Module:
    """Return transformers' model of the same sizes, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"), bfloat16():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict())).eval()


def theirs(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Return transformers' milliseconds a token, with its default cache and with a static one."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = {}
    for name, more in (("transformers", {}), ("static", {"cache_implementation": "static"})):

        def generate(new: int, more: dict[str, str] = more) -> None:
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options, **more)

        found[name] = milliseconds_a_token(generate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    generation = import_module("ligermodels.generation.generate")
    by_graph = generation.can_decode
    rows: list[dict[str, Any]] = []
    model, name = None, None
    for preset, batch, context, with_peer in WORKS:
        if preset != name:
            model = None
            release_memory()
            cls = next(c for c in families().values() if preset in c.config_class.presets)
            with torch.device("cuda"), bfloat16():
                model = cls(cls.config_class.preset(preset)).requires_grad_(False)
            name = preset
        assert model is not None
        row: dict[str, Any] = {"preset": preset, "rows": batch, "context": context}
        row["products"] = products(model, batch)
        row["step"] = step(model, batch, context)
        if context == PROMPT:
            ids = torch.randint(3, 1000, (batch, PROMPT), device="cuda")

            def ours(new: int, model: Any = model, ids: Tensor = ids) -> None:
                model.generate(ids, max_new_tokens=new, eos_token_id=[])

            row["generate"] = milliseconds_a_token(ours)
            generation.can_decode = lambda *_: False
            row["eager"] = milliseconds_a_token(ours, 24)
            generation.can_decode = by_graph
            if preset == "llama-3-8b" and batch == 1:
                row |= drafted(model, ids)
            if with_peer:
                row |= theirs(transformers_model(model.config), ids)
        release_memory()
        rows.append(row)
        print(
            {key: round(x, 2) if isinstance(x, float) else x for key, x in row.items()}, flush=True
        )
        write("decoding.json", {"environment": environment(), "rows": rows}, given.out)


if __name__ == "__main__":
    main()
