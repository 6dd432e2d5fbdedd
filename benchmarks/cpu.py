"""Compare training and generation on the CPU with transformers: python -m benchmarks.cpu FOLDER

FOLDER holds a checkpoint, for example build/smollm2. The model is float32, and a step is forward,
backward and AdamW on 2 x 512 tokens of English text. Each implementation has its own process, and
they alternate, so that a change of the machine's speed affects both equally. The time is the
median of the steps. The memory is the peak of the process.

With --generate, rows of 64 tokens get 32 new ones instead, greedy and sampled. The time is that of
the process, which other work on the machine does not change.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import environment, table, write

TEXT = Path(__file__).parent.parent / "examples" / "data" / "persuasion-heldout.txt"
IMPLEMENTATIONS = ("transformers", "ligermodels")
BATCH, SEQ = 2, 512
PROMPT, NEW = 64, 32
GENERATIONS = [(rows, sampled) for rows in (1, 8) for sampled in (False, True)]


def load(implementation: str, folder: Path, threads: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the model, and ids (1, tokens) of the text."""
    torch.set_num_threads(threads)
    from ligermodels import AutoLiger, Tokenizer

    tokens = Tokenizer.from_hf(folder).encode(TEXT.read_text(encoding="utf-8")[:20_000])
    if implementation == "ligermodels":
        model: torch.nn.Module = AutoLiger.from_hf(folder, dtype=torch.float32)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, torch.tensor([tokens])


def take_steps(implementation: str, folder: Path, threads: int, pipe: Connection) -> None:
    """Train for one step per message; send the seconds, the loss and the peak of memory in GiB."""
    model, ids = load(implementation, folder, threads)
    ids = ids[0, : BATCH * SEQ].view(BATCH, SEQ)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    while pipe.recv():
        start = time.perf_counter()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        pipe.send((seconds, loss.item(), peak))


def generate(implementation: str, folder: Path, threads: int, pipe: Connection) -> None:
    """Generate for each kind per message; send the process's milliseconds of a token for each."""
    model, ids = load(implementation, folder, threads)
    model.eval()
    while pipe.recv():
        times = []
        for rows, sampled in GENERATIONS:
            options = {"do_sample": True, "top_p": 0.95, "top_k": 50} if sampled else {}
            prompts = ids[0, : rows * PROMPT].view(rows, PROMPT)
            if implementation == "transformers":
                options |= {"do_sample": sampled, "attention_mask": torch.ones_like(prompts)}
            start = time.process_time()
            made = model.generate(
                prompts, max_new_tokens=NEW, eos_token_id=[-1], pad_token_id=0, **options
            )
            times.append((time.process_time() - start) / NEW * 1e3)
            assert made.shape == (rows, PROMPT + NEW)
        pipe.send(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--generate", action="store_true", help="generate instead of training")
    parser.add_argument("--out", type=Path, help="folder for cpu.json or cpu_generation.json")
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    target = generate if arguments.generate else take_steps
    for name in IMPLEMENTATIONS:
        pipes[name], theirs = spawn.Pipe()
        settings = (name, arguments.checkpoint, arguments.threads, theirs)
        processes.append(spawn.Process(target=target, args=settings, daemon=True))
        processes[-1].start()
    measured: dict[str, list[Any]] = {name: [] for name in IMPLEMENTATIONS}
    for _ in tqdm(range(arguments.steps + 1), unit="round"):
        for name, pipe in pipes.items():
            pipe.send(True)
            measured[name].append(pipe.recv())
    rows: list[dict[str, Any]] = []
    if arguments.generate:
        for kind, (count, sampled) in enumerate(GENERATIONS):
            row = {"rows": count, "choice": "sampled" if sampled else "greedy"}
            for name, (_, *rounds) in measured.items():
                row[name] = statistics.median(times[kind] for times in rounds)
            rows.append(row | {"ratio": row["ligermodels"] / row["transformers"]})
        measured = {}
    for name, (first, *steps) in measured.items():
        seconds = [each[0] for each in steps]  # the first step also allocates the states
        rows.append(
            {
                "implementation": name,
                "seconds": statistics.median(seconds),
                "least": min(seconds),
                "most": max(seconds),
                "peak GiB": steps[-1][2],
                "first loss": first[1],
                "last loss": steps[-1][1],
            }
        )
    for pipe in pipes.values():
        pipe.send(False)
    for process in processes:
        process.join()
    result = {
        "environment": environment() | {"threads": arguments.threads, "steps": arguments.steps},
        "rows": rows,
    }
    write("cpu_generation.json" if arguments.generate else "cpu.json", result, arguments.out)
    print(result["environment"])
    print(table(rows, list(rows[0])))


if __name__ == "__main__":
    main()
