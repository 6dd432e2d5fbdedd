"""Compare LigerLlama with transformers' Llama: padding, bfloat16, LoRA, the real checkpoint.

tests/models/test_parity.py compares each family with transformers, feature by feature.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels import LigerLlama
from tests.models.pairs import (
    gradients,
    native_gradients,
    relative,
    step,
    tiny_model,
    tiny_pair,
    tokens,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_mask(side: str) -> None:
    """Padding counts in position_ids as it does in transformers: 0, 1, 2, ... for every mask."""
    hf, ours = tiny_pair()
    ids, labels = tokens(3, 14)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 9)):
        where = slice(0, padding) if side == "left" else slice(14 - padding, 14)
        mask[row, where] = 0
    labels = labels.masked_fill(mask == 0, -100)
    expected = step(hf, ids, labels=labels, attention_mask=mask)
    out = step(ours, ids, labels=labels, attention_mask=mask)
    real = mask.bool()
    logits = ours.head.logits(ours(ids, attention_mask=mask))
    assert relative(logits[real], expected.logits[real]) <= 1e-5
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    ours_grads, reference = gradients(ours), native_gradients(hf)
    for name in reference:
        assert relative(ours_grads[name], reference[name]) <= 1e-4, name


class Lowered(torch.nn.Module):
    """Return a copy of a model that computes in bfloat16, by its weights or under autocast."""

    def __init__(self, model: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.inner = copy.deepcopy(model)
        self.autocast = how == "autocast"
        if not self.autocast:
            self.inner.to(torch.bfloat16)
            if hasattr(model, "lm_head"):
                # `to` rounds rope's frequencies; `from_pretrained(dtype=...)` does not.
                self.inner.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.inner(*args, **kwargs)

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.inner.head.logits(self.inner(ids))


def check_ratios(what: str, ratios: list[float]) -> None:
    """Our error divided by transformers' is at most 1.05 on average, and 1.3 for any input."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert mean <= 1.05, f"{what}: geometric mean {mean:.3f} of {ratios}"
    assert max(ratios) <= 1.3, f"{what}: {ratios}"


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_low_precision_error_beside_transformers(how: str) -> None:
    hf, ours = tiny_pair()
    hf_low, ours_low = Lowered(hf, how), Lowered(ours, how)
    logits, grads = [], []
    for seed in range(12):
        ids, labels = tokens(2, 32, seed=seed)
        exact = step(hf, ids, labels=labels)
        theirs = step(hf_low, ids, labels=labels)
        step(ours_low, ids, labels=labels)
        reference = native_gradients(hf)

        def distance(low: dict[str, Tensor], reference: dict[str, Tensor] = reference) -> float:
            return math.hypot(*(relative(low[name], reference[name]) for name in reference))

        ours_grads = gradients(ours_low.inner)
        assert {g.dtype for g in ours_grads.values()} == {ours_low.inner.norm.weight.dtype}
        grads.append(distance(ours_grads) / distance(native_gradients(hf_low.inner)))
        error = relative(ours_low.logits(ids), exact.logits)
        logits.append(error / relative(theirs.logits, exact.logits))
    check_ratios("logits", logits)
    check_ratios("gradients", grads)


LORA_TARGETS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "proj"]


def test_lora() -> None:
    """peft's wrappers train in every projection and in the head, and merge back."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = tiny_model()
    ids, labels = tokens()
    before = model(ids, labels=labels).loss.item()
    config = peft.LoraConfig(target_modules=LORA_TARGETS, r=4)
    lora = peft.get_peft_model(model, config)
    assert lora(input_ids=ids, labels=labels).loss.item() == pytest.approx(before, rel=1e-6)
    replaced = model.kernels()["norm + linear, linear + rope, glu + linear"]
    assert "layers.0.self_attn.qkv_proj" in replaced
    assert "chunk by chunk" in model.kernels()["linear_cross_entropy"]

    trained = {name: p for name, p in lora.named_parameters() if p.requires_grad}
    # LoRA has two matrices for each of four projections in three blocks, and for the head.
    assert len(trained) == 2 * (4 * 3 + 1)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = lora(input_ids=ids, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.2
    assert all(p.detach().abs().sum() > 0 for name, p in trained.items() if "lora_B" in name)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)

    logits = model.head.logits(model(ids))
    merged = lora.merge_and_unload()
    assert merged.kernels()["norm + linear, linear + rope, glu + linear"] == "fused"
    assert relative(merged.head.logits(merged(ids)), logits) <= 1e-5


@pytest.mark.slow
def test_smollm2_bfloat16_error(smollm2: Any) -> None:
    from transformers import LlamaForCausalLM

    from ligermodels import Tokenizer

    exact = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    ours = LigerLlama.from_hf(smollm2, dtype=torch.bfloat16)
    # A text's ratio differs by a tenth between kinds of CPUs, and so the mean is one of 12 texts.
    text = (EXAMPLES / "persuasion-heldout.txt").read_text()
    tokens = torch.tensor(Tokenizer.from_hf(smollm2).encode(text))
    ids = tokens[: 12 * 128].view(12, 128)
    with torch.no_grad():
        logits = [exact(ids).logits, theirs(ids).logits, ours.head.logits(ours(ids))]
    ratios = [relative(c, a) / relative(b, a) for a, b, c in zip(*logits)]
    check_ratios("logits", ratios)
