"""The losses on a GPU: the numbers of the CPU, without waiting for the GPU; and short runs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import medusa
from ligermodels import AutoLiger
from ligermodels.heads.medusa_file import load_heads
from ligermodels.losses import cpo_loss, dpo_loss, info_nce, kto_loss, orpo_loss, sft_loss
from ligermodels.losses.policy import GRPO_LOSS_TYPES, LEVELS
from ligermodels.losses.preference import DPO_LOSS_TYPES
from tests.gpu.synchronisation import no_synchronisation
from tests.losses.batches import (
    gradients,
    masks,
    policy_loss,
    random_tokens,
    some_advantages,
)
from tests.training.tiny_run import make_checkpoint, make_text, run

pytestmark = pytest.mark.gpu


def losses_of(tokens, label, advantages):
    """Yield every loss of some tokens."""
    pairs = tokens.log_probs, tokens.ref, tokens.mask
    for name in DPO_LOSS_TYPES:
        options = {"label_smoothing": 0.1, "ld_alpha": 0.5}
        if "aot" not in name:
            options |= {"use_weighting": True, "log_sum_sq_probs": tokens.sum_sq}
        yield dpo_loss(*pairs, loss_type=name, **options).loss
    yield kto_loss(*pairs, label, 0.1, desirable_weight=2.0).loss
    yield orpo_loss(tokens.log_probs, tokens.mask).loss
    yield cpo_loss(tokens.log_probs, tokens.mask, loss_type="simpo").loss
    yield sft_loss(tokens.log_probs, tokens.mask, loss_type="dft").loss
    masked = {"top_entropy_quantile": 0.4, "off_policy_mask_threshold": 0.01, "delta": 1.15}
    for name, level in product(GRPO_LOSS_TYPES, LEVELS):
        options = {"loss_type": name, "importance_sampling_level": level, "epsilon_high": 1.1}
        for more in ({}, {"beta": 0.3, "entropy_coef": 0.2, **masked}):
            yield policy_loss(tokens, advantages, **options, **more).loss


def test_losses_equal_those_of_the_cpu() -> None:
    tokens = random_tokens(next(masks(6))[1]).to(torch.float32)
    label, advantages = torch.arange(6) % 2 == 0, some_advantages(6, torch.float32)
    there = type(tokens)(*(x.detach().cuda() for x in tokens))
    there.log_probs.requires_grad_()
    expected = list(losses_of(tokens, label, advantages))
    label, advantages = label.cuda(), advantages.cuda()
    torch.cuda.synchronize()
    with no_synchronisation():
        found = list(losses_of(there, label, advantages))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            gradients(one, there.log_probs)[0].cpu(),
            gradients(other, tokens.log_probs)[0],
            rtol=1e-3,
            atol=1e-5,
        )


def test_info_nce() -> None:
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(2, 64, 32), dim=-1)
    expected = info_nce(*vectors.double(), symmetric=True).loss
    found = info_nce(*vectors.cuda(), symmetric=True).loss
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["teacher", "medusa", "tied medusa"])
def test_a_short_run_with_another_model(kind: str, tmp_path: Path) -> None:
    """In mixed precision, with a plan for what is left of the memory beside a teacher."""
    make_checkpoint(tmp_path / "model")
    make_checkpoint(tmp_path / "teacher", hidden_size=128)
    make_text(tmp_path / "text.txt")
    changes: dict[str, Any] = {"loss": medusa.Medusa.name, "medusa_heads": 2, "memory": "off"}
    changes["medusa_tied"] = kind == "tied medusa"
    if kind == "teacher":
        changes = {
            "loss": "distillation",
            "teacher": str(tmp_path / "teacher"),
            "beta": 0.0,
            "distill_weight": 0.5,
        }
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    result = run(folder, text, tmp_path / "out", device="cuda", **changes)
    key = result.shown[0]
    assert result.eval_after[key] < result.eval_before[key]
    if kind != "teacher":
        model = AutoLiger.from_hf(result.model_dir, dtype=torch.float32, device="cuda")
        heads = load_heads(model, result.model_dir)
        options = {"max_new_tokens": 16, "eos_token_id": []}
        greedy = model.generate([1, 2, 3], **options)
        assert torch.equal(model.generate([1, 2, 3], heads=heads, **options), greedy)
