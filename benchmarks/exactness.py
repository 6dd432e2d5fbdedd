"""Compare a real checkpoint's numbers with transformers: python -m benchmarks.exactness FOLDER

An error is the norm of a difference divided by the norm of the reference, transformers in float32.
"""

import argparse
import math
import statistics
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import environment, write
from ligermodels import AutoLiger, Tokenizer

TEXT = Path(__file__).parent.parent / "examples" / "data" / "persuasion-heldout.txt"
INPUTS, LENGTH = 10, 512


def relative(actual: Tensor, expected: Tensor) -> float:
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def logits_and_gradient(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, float, Tensor]:
    """Return logits, loss and the embedding's gradient, which depends on every layer's."""
    model.zero_grad()
    output = model(ids, labels=ids)
    output.loss.backward()
    with torch.no_grad():
        native = hasattr(model, "head")
        logits = model.head.logits(model(ids)) if native else output.logits
    embedding = model.embed_tokens if native else model.get_input_embeddings()
    return logits, output.loss.item(), embedding.weight.grad


def summary(ratios: list[float]) -> dict[str, float]:
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return {"geometric mean": mean, "worst": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, help="folder for exactness.json")
    arguments = parser.parse_args()
    folder, device = arguments.checkpoint, "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False

    def theirs(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)

    exact, rounded = theirs(torch.float32), theirs(torch.bfloat16)
    ours, ours_rounded = (
        AutoLiger.from_hf(folder, dtype=dtype, device=device)
        for dtype in (torch.float32, torch.bfloat16)
    )
    tokens = torch.tensor(Tokenizer.from_hf(folder).encode(TEXT.read_text(encoding="utf-8")))
    float32 = []
    ratios: dict[str, list[float]] = {"logits": [], "embedding gradient": []}
    for ids in tokens[: INPUTS * LENGTH].view(INPUTS, 1, LENGTH).to(device):
        ids = ids.clone()
        if ours.config.pad_token_id is not None:
            ids[0, 9] = ours.config.pad_token_id
        logits, loss, gradient = logits_and_gradient(exact, ids)
        our_logits, our_loss, our_gradient = logits_and_gradient(ours, ids)
        float32.append(
            {
                "logits": relative(our_logits, logits),
                "loss": abs(our_loss - loss) / loss,
                "embedding gradient": relative(our_gradient, gradient),
            }
        )
        mine, its = logits_and_gradient(ours_rounded, ids), logits_and_gradient(rounded, ids)
        ratios["logits"].append(relative(mine[0], logits) / relative(its[0], logits))
        ratios["embedding gradient"].append(
            relative(mine[2], gradient) / relative(its[2], gradient)
        )
    result = {
        "environment": environment(),
        "inputs": f"{INPUTS} x {LENGTH} tokens",
        "largest float32 error": {key: max(row[key] for row in float32) for key in float32[0]},
        "bf16 error, ours / transformers'": {key: summary(r) for key, r in ratios.items()},
    }
    write("exactness.json", result, arguments.out)
    print(result)


if __name__ == "__main__":
    main()
