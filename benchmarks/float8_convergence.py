"""Held-out loss after training with and without float8: python -m benchmarks.float8_convergence

A Llama-shaped model of 220 million parameters reads English text (benchmarks.english_text makes
tokens.npz) once, with AdamW on float32 copies of its weights. Arms with the same seed have the same
first weights and the same batches. "float32" computes everything in float32, which takes ten times
as long as bf16, and "tf32" does the same with products in TF32. Every GPU takes runs in turn and
writes each result at once; no run begins that is not expected to end within --seconds. --tiny runs
small models on a CPU, on a novel.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, environment, table, write
from benchmarks.convergence import TEXT
from ligermodels.pictures import INK, ORDER, picture

BF16, FLOAT32, TF32, TORCHAO = "bf16", "float32", "tf32", "torchao"
ARMS = (BF16, "tensorwise", "delayed", "rowwise", "blocks", TORCHAO, FLOAT32, TF32)


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of the model and of the training."""

    hidden: int = 1536
    inner: int = 4096
    layers: int = 6
    heads: int = 12
    vocab: int = 16384
    seq: int = 1024
    rows: int = 32  # of a batch
    steps: int = 584
    mark: int = 60  # the step at which the held-out loss is taken, too
    warmup: int = 60
    learning_rate: float = 1e-3
    held_out: int = 184  # rows

    @property
    def tiny(self) -> bool:
        return self.hidden < 1024


FULL = Scale()
TINY = Scale(64, 128, 2, 2, 256, 32, 8, 60, 10, 10, 5e-3, 32)


def build(arm: str, scale: Scale, device: str) -> Any:
    from ligermodels import LigerLlama, LlamaConfig, float8

    config = LlamaConfig(
        vocab_size=scale.vocab,
        hidden_size=scale.hidden,
        intermediate_size=scale.inner,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.heads,
        max_position_embeddings=scale.seq,
    )
    with torch.device(device):
        model = LigerLlama(config).train()
    torch.backends.cuda.matmul.allow_tf32 = arm == TF32
    if arm in (FLOAT32, TF32):
        return model
    model.to(torch.bfloat16)
    if arm == TORCHAO:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model.layers, config=recipe)
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile()
    elif arm != BF16:
        small = (lambda name, linear: True) if scale.tiny else None
        float8.convert(model, arm, filter=small)
    return model


def tokens(path: Path | None, scale: Scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows for training and the held-out rows."""
    if path is None:
        parts = [
            np.frombuffer((TEXT / f"persuasion-{part}.txt").read_bytes(), np.uint8)
            for part in ("train", "heldout")
        ]
    else:
        found = np.load(path)
        parts = found["train"], found["held_out"]
    train, held_out = (
        torch.from_numpy(part[: len(part) // scale.seq * scale.seq].astype(np.int32))
        for part in parts
    )
    return train.view(-1, scale.seq), held_out.view(-1, scale.seq)[: scale.held_out]


def held_out_loss(model: Any, rows: torch.Tensor, batch: int) -> float:
    with torch.no_grad():
        losses = [model(ids, labels=ids).loss.double() for ids in rows.split(batch)]
    return torch.stack(losses).mean().item()


def train(arm: str, seed: int, scale: Scale, path: Path | None, device: str) -> dict[str, Any]:
    """Train one model, and return its losses."""
    rows, held_out = tokens(path, scale)
    torch.manual_seed(seed)
    model = build(arm, scale, device)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    rows, held_out = rows.to(device), held_out.long().to(device)
    order = order[: scale.rows * scale.steps].to(device)
    weights = [*model.parameters()]
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(
        masters, lr=scale.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / scale.warmup,
            0.55 + 0.45 * math.cos(math.pi * step / scale.steps),
        ),
    )
    began, losses, marks = time.perf_counter(), [], {}
    for step in range(scale.steps):
        ids = rows[order[step * scale.rows : (step + 1) * scale.rows]].long()
        loss = model(ids, labels=ids).loss
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        losses.append(loss.detach().float())
        if step + 1 in (scale.mark, scale.steps):
            marks[step + 1] = held_out_loss(model, held_out, scale.rows)
    seconds = time.perf_counter() - began
    trained = len(losses) * scale.rows * scale.seq
    return {
        "arm": arm,
        "seed": seed,
        "held_out": marks,
        "losses": torch.stack(losses).tolist(),
        "tokens": trained,
        "tokens/s": round(trained / seconds),
        "parameters": sum(weight.numel() for weight in weights),
    }


def work(runs: list[tuple[str, int]], until: float, scale: Scale, path: Any, out: Path) -> None:
    """Take the runs that no other process has taken, as long as there is time."""
    device = "cpu" if scale.tiny else "cuda"
    took: dict[str, float] = {}
    for arm, seed in runs:
        late = time.time() + took.get(arm, max(took.values(), default=0)) > until
        if late or (out / f"{arm}-{seed}.json").exists():
            continue
        try:
            (out / f"{arm}-{seed}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        began = time.time()
        try:
            found = train(arm, seed, scale, path, device)
        except Exception:  # the other arms go on
            traceback.print_exc()
            continue
        took[arm] = time.time() - began
        (out / f"{arm}-{seed}.json").write_text(json.dumps(found))
        print(arm, seed, found["held_out"], found["tokens/s"], f"{took[arm]:.0f} s", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


def collect(out: Path) -> list[dict[str, Any]]:
    """Return one row for each arm: losses, and their differences from bf16 with the same seed."""
    runs = [json.loads(path.read_text()) for path in sorted(out.glob("*-[0-9].json"))]
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], {})[run["seed"]] = run
    rows = []
    for arm, seeds in by_arm.items():
        row: dict[str, Any] = {"arm": arm, "seeds": len(seeds)}
        row["tokens"] = sum(run["tokens"] for run in seeds.values())
        row["tokens/s"] = statistics.median(run["tokens/s"] for run in seeds.values())
        for name, index in (("mark", 0), ("end", 1)):
            ends = {s: [*run["held_out"].values()] for s, run in seeds.items()}
            losses = {s: found[index] for s, found in ends.items() if index < len(found)}
            base = by_arm.get(BF16, {})
            differences = [
                loss - [*base[s]["held_out"].values()][index]
                for s, loss in losses.items()
                if s in base
            ]
            if losses:
                row[name] = statistics.mean(losses.values())
                row[f"{name} spread"] = max(losses.values()) - min(losses.values())
                row[f"{name}, each"] = [*losses.values()]
            if differences:
                row[f"{name} - bf16"] = statistics.mean(differences)
                row[f"{name} - bf16, each"] = differences
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("end", 0))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw how far the held-out loss of each seed ends from that of bf16 with the same seed."""
    others = [row for row in rows if row["arm"] != BF16 and row.get("end - bf16, each")]
    spread = next(row["end spread"] for row in rows if row["arm"] == BF16)
    with picture(8, 1.2 + 0.5 * len(others)) as figure:
        axes = figure.add_subplot()
        axes.axvspan(-spread / 2, spread / 2, color=INK, alpha=0.2, label="spread of bf16's seeds")
        for place, (row, colour) in enumerate(zip(others, ORDER)):
            each = row["end - bf16, each"]
            axes.plot(each, [place] * len(each), "o", color=colour, markersize=8)
        axes.set_yticks(range(len(others)), [row["arm"] for row in others])
        axes.axvline(0, color=INK)
        axes.set(xlabel="held-out loss at the end, minus that of bf16 (nats)")
        axes.set_ylim(len(others) - 0.4, -0.6)
        figure.legend(loc="outside upper right")
        figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=Path, help="tokens.npz of benchmarks.english_text")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--runs", nargs="+", metavar="ARM-SEED", help="by default all, 0 to 2")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scale = TINY if arguments.tiny else FULL
    if arguments.steps:
        scale = dataclasses.replace(scale, steps=arguments.steps)
    if not arguments.tiny and arguments.tokens is None:
        parser.error("--tokens: name the file that benchmarks.english_text wrote")
    named = arguments.runs or [f"{arm}-{seed}" for seed in range(3) for arm in ARMS]
    runs = [(arm, int(seed)) for arm, _, seed in (name.rpartition("-") for name in named)]
    parts = arguments.out / "float8_convergence"
    parts.mkdir(parents=True, exist_ok=True)
    if not arguments.until:
        for path in parts.glob("*.taken"):
            path.unlink()
    until = arguments.until or time.time() + arguments.seconds
    gpus = 0 if arguments.tiny else torch.cuda.device_count()
    if arguments.until or gpus < 2:
        work(runs, until, scale, arguments.tokens, parts)
    else:
        command = [sys.executable, "-m", "benchmarks.float8_convergence", *sys.argv[1:]]
        command += ["--until", str(until)]
        processes = [
            subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)})
            for gpu in range(gpus)
        ]
        for process in processes:
            process.wait()
    if not arguments.until:
        rows = collect(parts)
        result = {"environment": environment(), "scale": dataclasses.asdict(scale), "arms": rows}
        write("float8_convergence.json", result, arguments.out)
        if any(row["arm"] == BF16 for row in rows):
            draw(rows, arguments.out / "float8_convergence.png")
        columns = ["arm", "seeds", "tokens", "tokens/s", "mark", "mark - bf16", "end", "end spread"]
        shown = [
            {k: f"{v:.4f}" if isinstance(v, float) and v < 99 else v for k, v in row.items()}
            for row in rows
        ]
        print(table(shown, [*columns, "end - bf16"]))


if __name__ == "__main__":
    main()
