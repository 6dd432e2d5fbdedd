"""Tokens a second of 1,024 prompts of 50 to 1,500 tokens with answers of 20 to 1,000.

`python -m benchmarks.many_prompts --out FOLDER` needs a GPU of 80 GB and about six minutes. The
weights are random, the choices greedy, and no token ends an answer but its last one. transformers'
continuous batching computes the first prompts of the same list (`--theirs`), because it takes
longer. "full" is the mean share of the batch's rows that compute an answer while prompts wait.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, environment, release_memory, write
from benchmarks.decoding import bfloat16, transformers_model
from ligermodels import LigerLlama, LlamaConfig
from ligermodels.generation.decode_step import StepDecoder


def prompts_and_lengths(count: int) -> tuple[list[list[int]], list[int]]:
    """Return the ids of the prompts, and how many tokens each answer has."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 1501, (count,), generator=draw).tolist()
    answers = torch.randint(20, 1001, (count,), generator=draw).tolist()
    return [torch.randint(3, 1000, (n,), generator=draw).tolist() for n in lengths], answers


def ours(model: Any, prompts: list[list[int]], answers: list[int]) -> dict[str, Any]:
    """Time `generate_many`, and count the rows that are busy."""
    busy: list[Tensor] = []
    replay = StepDecoder.replay

    def counted(self: StepDecoder) -> Tensor:
        assert self.sampler is not None
        busy.append((~self.sampler.stopped_B).float().mean())
        return replay(self)

    StepDecoder.replay = counted  # type: ignore[method-assign]
    torch.cuda.synchronize()
    start, first = time.perf_counter(), 0.0
    found = []
    for new in model.generate_many(prompts, answers, eos_token_id=[]):
        first = first or time.perf_counter() - start
        found.append(new)
    seconds = time.perf_counter() - start
    StepDecoder.replay = replay  # type: ignore[method-assign]
    assert [len(new) for new in found] == answers
    shares = torch.stack(busy).cpu()
    # The last prompt starts where the rows begin to become fewer for good.
    full = shares[: int((shares > 0.85).nonzero().max()) + 1]
    return {
        "tokens_per_s": sum(answers) / seconds,
        "seconds": seconds,
        "first_answer_s": first,
        "steps": len(busy),
        "full": full.mean().item(),
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def theirs(model: Any, prompts: list[list[int]], answers: list[int]) -> dict[str, Any]:
    """Time transformers' continuous batching."""
    from transformers import GenerationConfig

    options = {"do_sample": False, "max_new_tokens": max(answers), "eos_token_id": -1}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(pad_token_id=0, **options)
    )
    manager.start()
    start = time.perf_counter()
    for ids, new in zip(prompts, answers):
        manager.add_request(ids, max_new_tokens=new)
    tokens = done = 0
    while done < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            done, tokens = done + 1, tokens + len(result.generated_tokens)
        elif not manager.is_running():
            raise RuntimeError(f"transformers ended after {done} prompts")
    seconds = time.perf_counter() - start
    manager.stop(block=True)
    return {"prompts": done, "tokens_per_s": tokens / seconds, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--theirs", type=int, default=256)
    parser.add_argument("--preset", default="llama-3-8b")
    given = parser.parse_args()
    prompts, answers = prompts_and_lengths(given.prompts)
    with torch.device("cuda"), bfloat16():
        model = LigerLlama(LlamaConfig.preset(given.preset)).requires_grad_(False).eval()
    [*model.generate_many(prompts[:8], 8, eos_token_id=[])]  # compiles the kernels
    rows: dict[str, Any] = {"ours": ours(model, prompts, answers)}
    config = model.config
    del model
    release_memory()
    if given.theirs:
        write("many_prompts.json", {"environment": environment(), "rows": rows}, given.out)
        part = slice(given.theirs)
        rows["transformers"] = theirs(transformers_model(config), prompts[part], answers[part])
    print(rows, flush=True)
    write("many_prompts.json", {"environment": environment(), "rows": rows}, given.out)


if __name__ == "__main__":
    main()
