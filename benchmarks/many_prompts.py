"""Tokens a second of 1,024 prompts of 50 to 1,500 tokens with answers of 20 to 1,000.

`python -m benchmarks.many_prompts --out FOLDER` needs a GPU of 80 GB and about six minutes. The
weights are random, the choices greedy, and no token ends an answer but its last one. transformers'
continuous batching computes the first prompts of the same list (`--theirs`) in another process,
which is stopped after `--their-seconds`; the result is then that of the prompts that were done.
"full" is the mean share of the batch's rows that compute an answer while prompts wait.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
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


def theirs(config: Any, prompts: list[list[int]], answers: list[int], rows: int) -> None:
    """Run transformers' continuous batching, and print what it has done after every 10 prompts.

    Without flash-attention, each of its tokens computes scores with the tokens of all rows, so a
    pass may not have many. The cache has room for `rows` of the longest texts.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    with bfloat16():
        model = transformers_model(config)
    has_flash = importlib.util.find_spec("flash_attn") is not None
    model.set_attn_implementation("flash_attention_2" if has_flash else "paged|sdpa")
    longest = max(len(ids) + new for ids, new in zip(prompts, answers))
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=max(answers), eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            max_batch_tokens=8192 if has_flash else 512,
            max_requests_per_batch=rows,
            num_blocks=rows * -(-longest // 256),
        ),
    )
    print("transformers: the model is there", flush=True)
    manager.warmup()
    manager.start()
    print("transformers: started", flush=True)
    start, tokens, done = time.perf_counter(), 0, 0
    for ids, new in zip(prompts, answers):
        manager.add_request(ids, max_new_tokens=new)
    while done < len(prompts):
        result = manager.get_result(timeout=10)
        if result is None and (
            not manager.is_running() or manager.background_thread_status.fatal_error
        ):
            raise RuntimeError(f"transformers ended after {done} prompts")
        if result is None or not result.is_finished():
            continue
        if result.error is not None:
            raise RuntimeError(f"transformers, prompt {result.request_id}: {result.error}")
        done, tokens = done + 1, tokens + len(result.generated_tokens)
        if done % 10 == 0 or done == len(prompts):
            seconds = time.perf_counter() - start
            found = {"prompts": done, "tokens_per_s": tokens / seconds, "seconds": seconds}
            print(json.dumps(found | {"rows": rows, "flash_attention": has_flash}), flush=True)
    os._exit(0)  # Its thread may not end by itself.


def theirs_within(seconds: float) -> dict[str, Any]:
    """Run `theirs` with the arguments of this process, for so long, and return its last line."""
    command = [sys.executable, "-m", "benchmarks.many_prompts", "--run-theirs", *sys.argv[1:]]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # It would look for kernels on the hub.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=offline)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    found: dict[str, Any] = {}
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("{"):
            found = json.loads(line)
    timer.cancel()
    return found | {"ended_by_itself": process.wait() == 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--preset", default="llama-3-8b")
    parser.add_argument("--theirs", type=int, default=256, help="transformers' prompts")
    parser.add_argument("--their-rows", type=int, default=64, help="its largest batch")
    parser.add_argument("--their-seconds", type=float, default=300, help="when it is stopped")
    parser.add_argument("--run-theirs", action="store_true", help="run nothing but transformers")
    given = parser.parse_args()
    prompts, answers = prompts_and_lengths(given.prompts)
    config = LlamaConfig.preset(given.preset)
    if given.run_theirs:
        part = slice(given.theirs)
        theirs(config, prompts[part], answers[part], given.their_rows)
    with torch.device("cuda"), bfloat16():
        model = LigerLlama(config).requires_grad_(False).eval()
    [*model.generate_many(prompts[:8], 8, eos_token_id=[])]  # compiles the kernels
    rows: dict[str, Any] = {"ours": ours(model, prompts, answers)}
    print(rows, flush=True)
    write("many_prompts.json", {"environment": environment(), "rows": rows}, given.out)
    del model
    release_memory()
    if given.theirs:
        rows["transformers"] = theirs_within(given.their_seconds)
        write("many_prompts.json", {"environment": environment(), "rows": rows}, given.out)
        print(rows, flush=True)


if __name__ == "__main__":
    main()
