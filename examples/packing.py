"""Many documents in one row: the loss of a padded batch, without the time of the padding.

    python -m examples.packing build/smollm2 --output-dir runs/packing

The documents are paragraphs of a novel. They go through forward and backward twice: as a batch that
is padded to the longest, and packed into one row, where `cu_seqlens` tells where each begins.
Attention and loss never cross from one to the next.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.command import TRAIN, call, draw_bars, report
from ligermodels import AutoLiger, Tokenizer


def timed(model: torch.nn.Module, loss_of: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the loss, and the seconds of forward and backward; on a CPU, those of its cores."""
    model.zero_grad()
    clock = time.process_time
    if torch.cuda.is_available():
        clock = time.perf_counter
        loss_of().backward()  # compiles the kernels
        model.zero_grad()
        torch.cuda.synchronize()
    began = clock()
    loss = loss_of()
    loss.backward()
    return loss.item(), clock() - began


def main(
    model: str, output_dir: Path, *, documents: int = 64, longest: int = 2048
) -> dict[str, float]:
    """Compare both ways for so many paragraphs, each cut to `longest` tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network, tokenizer = (
        AutoLiger.from_hf(model, dtype=dtype, device=device),
        Tokenizer.from_hf(model),
    )
    paragraphs = TRAIN.read_text(encoding="utf-8").split("\n\n")
    texts = random.Random(0).sample([text for text in paragraphs if len(text) > 40], documents)
    parts = [torch.tensor(tokenizer.encode(text)[:longest], device=device) for text in texts]
    lengths = torch.tensor([0, *map(len, parts)], device=device)

    padded = pad_sequence(parts, batch_first=True, padding_value=-100)
    ids, mask = padded.clamp(min=0), padded >= 0
    starts, row = lengths.cumsum(0).int(), torch.cat(parts)[None]
    packed = {"cu_seqlens": starts, "max_seqlen": int(lengths.max())}
    network(row[:, :8], labels=row[:, :8]).loss.backward()  # allocates the gradients
    padded_loss, padded_seconds = timed(
        network, lambda: network(ids, labels=padded, attention_mask=mask).loss
    )
    packed_loss, packed_seconds = timed(network, lambda: network(row, labels=row, **packed).loss)

    times = {f"padded, {padded.numel():,} places": padded_seconds}
    times[f"packed, {row.numel():,} tokens"] = packed_seconds
    title = f"seconds of forward and backward for {len(parts)} documents"
    draw_bars(output_dir, title, times, "{:.3g}")
    return report(
        output_dir,
        documents=len(parts),
        padding=1 - row.numel() / padded.numel(),
        padded_loss=padded_loss,
        packed_loss=packed_loss,
        times_faster=padded_seconds / packed_seconds,
    )


if __name__ == "__main__":
    call(main, __doc__)
