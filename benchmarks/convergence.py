"""Compare bf16 training with transformers, against float32: python -m benchmarks.convergence

Every family, with its real vocabulary size, learns English text three times from the same weights.
The reference is transformers in float32. The other two runs are transformers in bf16 (weights and
AdamW states) and ligermodels in bf16. Four distances of each bf16 run from the reference are taken:

- curve: the mean absolute difference of the loss over all steps;
- tokens: the same over the tokens of a held-out text, after the last step;
- evaluation: the difference of the mean loss of that text. It is one number per run, so it is the
  noisiest of the four;
- parameters: the distance of all parameters, divided by the distance that the reference moved.

Each seed has its own weights and pieces of text. Distances are averaged over the seeds first, and
then ours is divided by that of transformers. On a CPU, --tiny takes less than a minute per seed.
"""

import argparse
import dataclasses
import gc
import math
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import RESULTS, environment, table, write

TEXT = Path(__file__).parent.parent / "examples" / "data"
VOCABULARIES = {
    "llama": 128256,
    "mistral": 32768,
    "gemma": 256000,
    "gemma2": 256000,
    "gemma3_text": 262144,
    "qwen2": 151936,
    "qwen3": 151936,
}
METRICS = ("curve", "tokens", "evaluation", "parameters")
# Bounds for our distance / transformers' distance: for the mean of all families, for each family.
MEAN_BOUND, WORST_BOUND = 1.05, 1.3


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of the models and of their training."""

    hidden: int = 512
    inner: int = 1536
    layers: int = 4
    head_dim: int = 64
    seq: int = 512
    window: int = 128
    batch: int = 4
    steps: int = 100
    held_out: int = 8  # rows
    vocab: int | None = None  # None: the vocabulary of the family
    # At 1e-3 the Gemmas train chaotically. Any two runs are then as far apart as these, and the
    # ratio of two such distances was between 0.7 and 2.8.
    learning_rate: float = 5e-4
    warmup: int = 10


FULL = Scale()
TINY = Scale(64, 128, 2, 16, 64, 16, 4, 100, 32, 1024)


@dataclasses.dataclass
class Run:
    """The results of a training run; the weights have HF's names and are float32."""

    losses: list[float]
    token_losses: Tensor
    weights: dict[str, Tensor]
    seconds: float


def fields_of(family: str, scale: Scale) -> dict[str, Any]:
    """Return fields of HF's config, with short windows and low soft caps, so that both matter."""
    heads = scale.hidden // scale.head_dim
    fields: dict[str, Any] = {
        "vocab_size": scale.vocab or VOCABULARIES[family],
        "hidden_size": scale.hidden,
        "intermediate_size": scale.inner,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": scale.head_dim,
        "max_position_embeddings": scale.seq,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    if family == "qwen2":
        del fields["head_dim"]
    if family in ("mistral", "gemma2", "gemma3_text", "qwen2", "qwen3"):
        fields["sliding_window"] = scale.window
    if family in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": True, "max_window_layers": scale.layers // 2}
    if family in ("gemma2", "gemma3_text"):
        fields["query_pre_attn_scalar"] = scale.head_dim
    if family == "gemma2":
        fields |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0}
    if family == "gemma3_text":
        types = ["sliding_attention", "full_attention"] * scale.layers
        fields["layer_types"] = types[: scale.layers]
    return fields


def load_theirs(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    # SDPA has no soft cap, so transformers applies it only in eager mode.
    attention = "eager" if config.model_type == "gemma2" else "sdpa"
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    )


def load_ours(folder: Path, dtype: torch.dtype) -> Any:
    from ligermodels import AutoLiger

    return AutoLiger.from_hf(folder, dtype=dtype)


RUNS: dict[str, tuple[Callable[[Path, torch.dtype], Any], torch.dtype]] = {
    "reference": (load_theirs, torch.float32),
    "transformers": (load_theirs, torch.bfloat16),
    "ligermodels": (load_ours, torch.bfloat16),
}


def make_checkpoint(family: str, scale: Scale, folder: Path, seed: int, device: str) -> None:
    """Save random weights, rounded to bf16, so that all runs start from the same weights."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **fields_of(family, scale))
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def read_text(scale: Scale, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the novel's words as ids spread over the whole vocabulary: (training, held out)."""
    words = [
        re.findall(r"\w+|[^\w\s]", (TEXT / f"persuasion-{part}.txt").read_text())
        for part in ("train", "heldout")
    ]
    kept = Counter(words[0]).most_common(vocab - 1)
    stride = vocab // (len(kept) + 1)
    ids = {word: (rank + 1) * stride for rank, (word, _) in enumerate(kept)}
    text, held_out = (torch.tensor([ids.get(word, 0) for word in part]) for part in words)
    return text, held_out[: scale.held_out * scale.seq].view(scale.held_out, scale.seq)


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Return the loss of every token except the first of each row."""
    losses = []
    with torch.no_grad():
        for rows in ids.split(4):
            if hasattr(model, "head"):
                loss = model(rows, labels=rows, reduction="none").loss[:, :-1]
            else:
                logits = model(rows).logits[:, :-1].float()
                loss = F.cross_entropy(
                    logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
                )
            losses.append(loss.flatten().float())
    return torch.cat(losses)


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return the parameters under HF's names; the weight map translates ours."""
    named = dict(model.named_parameters())
    if not hasattr(model, "head"):
        return {name: weight.detach().float() for name, weight in named.items()}
    return {
        span.source: named[entry.name].detach()[span.row : span.row + span.rows].float()
        for entry in model.weight_map(model.config)
        for span in entry.spans
    }


def train(model: Any, text: Tensor, held_out: Tensor, scale: Scale, seed: int) -> Run:
    """Train with AdamW, warm-up and clipping on pieces of text that depend only on the seed."""
    device = held_out.device
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(
        len(text) - scale.seq, (scale.steps, scale.batch, 1), generator=generator
    )
    pieces = text[starts + torch.arange(scale.seq)].to(device)
    # At the usual 0.999, a second moment in bf16 never decreases, because rounding undoes a change
    # of one thousandth.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=scale.learning_rate, betas=(0.9, 0.95), fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / scale.warmup)
    )
    began, losses = time.perf_counter(), []
    for ids in pieces:
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.detach().float())
    curve = torch.stack(losses).tolist()
    seconds = time.perf_counter() - began
    return Run(curve, token_losses(model, held_out), weights_of(model), seconds)


def distances(run: Run, reference: Run, start: dict[str, Tensor]) -> dict[str, float]:
    """Return the distance of a run from the reference, by metric."""
    assert run.weights.keys() == reference.weights.keys() == start.keys()

    def length(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        squares = [(a[name] - b[name]).double().square().sum() for name in a]
        return torch.stack(squares).sum().sqrt().item()

    return {
        "curve": statistics.mean(abs(a - b) for a, b in zip(run.losses, reference.losses)),
        "tokens": (run.token_losses - reference.token_losses).abs().mean().item(),
        "evaluation": abs((run.token_losses.mean() - reference.token_losses.mean()).item()),
        "parameters": length(run.weights, reference.weights) / length(reference.weights, start),
    }


def run_seed(family: str, scale: Scale, seed: int, device: str) -> dict[str, Any]:
    """Return the losses of the three runs, and the distances of the last two from the first."""
    text, held_out = read_text(scale, scale.vocab or VOCABULARIES[family])
    held_out = held_out.to(device)
    runs: dict[str, Run] = {}
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(family, scale, folder, seed, device)
        start: dict[str, Tensor] = {}
        for implementation, (load, dtype) in RUNS.items():
            model = load(folder, dtype).to(device).train()
            if not start:
                start = {n: weight.clone() for n, weight in weights_of(model).items()}
            run = runs[implementation] = train(model, text, held_out, scale, seed)
            if implementation != "reference":
                found[implementation] = distances(run, runs["reference"], start)
                run.weights = {}
            del model
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return {
        "seed": seed,
        "losses": {name: run.losses for name, run in runs.items()},
        "evaluation": {name: run.token_losses.mean().item() for name, run in runs.items()},
        "seconds": {name: run.seconds for name, run in runs.items()},
        "distances": found,
    }


def run_family(family: str, scale: Scale, seeds: int, device: str) -> dict[str, Any]:
    """Run all seeds of a family, and return our mean distances divided by transformers'."""
    results = [run_seed(family, scale, seed, device) for seed in range(seeds)]

    def mean(implementation: str, metric: str) -> float:
        return statistics.mean(r["distances"][implementation][metric] for r in results)

    return {
        "family": family,
        "config": fields_of(family, scale),
        "theirs": {metric: mean("transformers", metric) for metric in METRICS},
        "ours": {metric: mean("ligermodels", metric) for metric in METRICS},
        "ratios": {m: mean("ligermodels", m) / mean("transformers", m) for m in METRICS},
        "seeds": results,
    }


def means_of(families: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the geometric mean of the families' ratios by metric, and its standard error."""
    found = {}
    for metric in METRICS:
        logs = [math.log(entry["ratios"][metric]) for entry in families]
        error = statistics.stdev(logs) / len(logs) ** 0.5 if len(logs) > 1 else math.nan
        mean = math.exp(statistics.mean(logs))
        found[metric] = (mean, mean * error)
    return found


def failures(families: list[dict[str, Any]]) -> list[str]:
    """Return the ratios that exceed their bound, as texts; `means_of` gives the means.

    For the evaluation loss only the mean is checked. One family's ratio compares two small
    differences of means, and a few seeds are too few to measure it.
    """
    found = []
    for metric, (mean, _) in means_of(families).items():
        if mean > MEAN_BOUND:
            found.append(f"{metric}: {mean:.3f} in the mean")
        if metric != "evaluation":
            ratios = {entry["family"]: entry["ratios"][metric] for entry in families}
            found += [f"{metric}: {r:.3f} for {f}" for f, r in ratios.items() if r > WORST_BOUND]
    return found


def rows_of(families: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table: the fall of the loss, and "transformers' / ours = ratio"."""
    rows = []
    for entry in families:
        losses = entry["seeds"][0]["losses"]["reference"]
        row: dict[str, Any] = {
            "family": entry["family"],
            "loss": f"{losses[0]:.2f} to {losses[-1]:.2f}",
        }
        for metric in METRICS:
            theirs, ours = entry["theirs"][metric], entry["ours"][metric]
            row[metric] = f"{theirs:.2e} / {ours:.2e} = {ours / theirs:.2f}"
        rows.append(row)
    means = {metric: f"{m:.3f} ± {e:.3f}" for metric, (m, e) in means_of(families).items()}
    return [*rows, {"family": "mean ratio", **means}]


def main() -> None:
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--families", nargs="+", choices=VOCABULARIES, default=list(VOCABULARIES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, for a CPU")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = TINY if arguments.tiny else FULL
    if arguments.steps:
        scale = dataclasses.replace(scale, steps=arguments.steps)
    result: dict[str, Any] = {
        "environment": environment(),
        "scale": dataclasses.asdict(scale),
        "families": [],
    }
    families = result["families"]
    for family in arguments.families:
        began = time.perf_counter()
        families.append(run_family(family, scale, arguments.seeds, device))
        ratios = ", ".join(f"{m} {r:.3f}" for m, r in families[-1]["ratios"].items())
        print(f"{family}: {ratios} ({time.perf_counter() - began:.0f} s)", flush=True)
        result["means"] = means_of(families)
        result["failures"] = failures(families)
        write("convergence.json", result, arguments.out)
    print("distance from float32, transformers' / ours = ratio of ours to transformers':")
    print(table(rows_of(families), ["family", "loss", *METRICS]))
    print("ratios above their bound:", result["failures"] or "none")


if __name__ == "__main__":
    main()
