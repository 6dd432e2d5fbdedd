"""LigerLlama beside transformers' Llama: bfloat16, PEFT's wrappers, the real checkpoint.

tests/models/test_parity.py compares each family with transformers, feature by feature.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from ligermodels import LigerLlama, Tokenizer
from tests.models.pairs import (
    gradients,
    native_gradients,
    relative,
    step,
    tiny_pair,
    tokens,
)
from tests.models.parity import BFLOAT16_MEAN, BFLOAT16_WORST


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_gradients_in_low_precision_beside_transformers(how: str) -> None:
    theirs, ours = tiny_pair()
    low, ours_low = copy.deepcopy(theirs), copy.deepcopy(ours)
    if how == "bfloat16":
        # `to` rounds rope's frequencies; `from_pretrained(dtype=...)` does not.
        frequencies = low.model.rotary_emb.inv_freq.clone()
        low, ours_low = low.to(torch.bfloat16), ours_low.to(torch.bfloat16)
        low.model.rotary_emb.inv_freq = frequencies
    ratios = []
    for seed in range(8):
        ids, labels = tokens(2, 32, seed=seed)
        step(theirs, ids, labels=labels)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            step(low, ids, labels=labels)
            step(ours_low, ids, labels=labels)
        reference, found = native_gradients(theirs, ours), gradients(ours_low)
        assert {grad.dtype for grad in found.values()} == {ours_low.norm.weight.dtype}

        def distance(low: dict[str, Tensor], reference: dict[str, Tensor] = reference) -> float:
            return math.hypot(*(relative(low[name], reference[name]) for name in reference))

        ratios.append(distance(found) / distance(native_gradients(low, ours)))
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert mean <= BFLOAT16_MEAN and max(ratios) <= BFLOAT16_WORST, ratios


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_real_checkpoint_on_text(trained: bool, smollm2: Path) -> None:
    """Compare with the loss of transformers' logits in float64; each night, all gradients, too.

    On a CPU, PyTorch's float32 log_softmax over 49152 columns has an error of 1e-5. It makes some
    of transformers' own gradients wrong by more than 1e-4.
    """
    theirs = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ours, tokenizer = LigerLlama.from_hf(smollm2, dtype=torch.float32), Tokenizer.from_hf(smollm2)
    first = tokenizer.encode("Gravity is the force by which a planet draws objects to its center.")
    pad, second = tokenizer.pad_token_id, tokenizer.encode("The quick brown fox.")
    ids = torch.tensor([[*first, pad, pad, *second]])
    labels = ids.clone()
    labels[0, :4] = -100
    with torch.set_grad_enabled(trained):
        logits, loss = theirs(ids).logits, ours.loss(ids, labels)
    expected = F.cross_entropy(logits[0, :-1].double(), labels[0, 1:])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        assert relative(ours.head.logits(ours(ids)), logits) <= 1e-5
    if not trained:
        return
    expected.backward()
    loss.backward()
    found, reference = gradients(ours), native_gradients(theirs, ours)
    assert found.keys() == reference.keys()
    for name, grad in found.items():
        assert relative(grad, reference[name]) <= 1e-4, name
