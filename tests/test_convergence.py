"""Fine-tuning beside transformers: the same data, order and optimizer give the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ligermodels import LigerLlama
from tests.models.pairs import native, relative, tiny_pair, tokens

STEPS = 50
Batches = list[tuple[Tensor, Tensor]]


def train(model: nn.Module, batches: Batches, lr: float, fused: bool = False) -> list[float]:
    """Losses before each AdamW step, with clipping as fine-tuning has it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=fused)
    losses = []
    for ids, labels in batches:
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(ours: list[float], theirs: list[float], fall: float) -> None:
    assert len(ours) == STEPS
    for number, (a, b) in enumerate(zip(ours, theirs)):
        assert abs(a - b) <= 1e-3, f"step {number}: {a} beside {b}"
    assert sum(ours[-5:]) / 5 < sum(ours[:5]) / 5 - fall, "nothing was learnt"


@pytest.mark.parametrize("tied", [False, True])
def test_tiny_model(tied: bool) -> None:
    hf, ours = tiny_pair(tie_word_embeddings=tied)
    with torch.no_grad():
        for p in (*hf.parameters(), *ours.parameters()):
            if p.dim() > 1:
                # At larger weights training is chaotic: transformers from weights that are
                # 1e-7 away from its own strays further than 1e-3, too.
                p.mul_(0.2)
    pool = [tokens(2, 20, seed=seed) for seed in range(5)]
    batches = [pool[number % len(pool)] for number in range(STEPS)]
    theirs = train(hf, batches, lr=3e-3)
    check(train(ours, batches, lr=3e-3), theirs, fall=1.0)
    state = native({name: p.detach() for name, p in hf.named_parameters()})
    for name, p in ours.named_parameters():
        assert relative(p, state[name]) <= 1e-3, name


@pytest.mark.slow
def test_smollm2(smollm2: Path) -> None:
    """The real checkpoint on real text, in float32."""
    from transformers import LlamaForCausalLM

    from ligermodels import Tokenizer

    text = Path(__file__).parent.parent / "examples" / "data" / "persuasion-train.txt"
    ids = torch.tensor(Tokenizer.from_hf(smollm2).encode(text.read_text()[: STEPS * 150]))
    # One sequence of 16 tokens a step, in order: no text twice.
    batches = [(row[None], row[None]) for row in ids[: STEPS * 16].view(STEPS, 16)]
    losses = []
    for make in (
        lambda: LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32),
        lambda: LigerLlama.from_hf(smollm2, dtype=torch.float32),
    ):
        losses.append(train(make(), batches, lr=1e-5, fused=True))
    theirs, ours = losses
    check(ours, theirs, fall=0.0)
