"""The answers of the loss head to TRL's questions, beside formulas on float64 logits."""

from __future__ import annotations

import pytest
import torch

from ligermodels.integrations.hf_model import FusedHead
from ligermodels.layers import LossHead

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), ALL])
def test_fields(outputs: tuple[str, ...], shifted: bool) -> None:
    torch.manual_seed(0)
    head = LossHead(8, 31, logit_scale=0.7, softcap=2.0).double()
    hidden = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 31, (2, 6))
    labels[0, :3] = labels[1, 4] = -100
    fused = FusedHead()
    fused.temperature, fused.outputs = 1.3, outputs
    given = (None, labels) if shifted else (labels, None)
    made = fused(head, hidden, *given, num_items_in_batch=torch.tensor(5))

    rows, targets = (hidden, labels) if shifted else (hidden[:, :-1], labels[:, 1:])
    logits = 2 * torch.tanh(0.7 * rows @ head.weight.T / 2) / 1.3
    mask = targets != -100
    every = logits.log_softmax(-1)
    expected = {
        "log_probs": every.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1),
        "entropy": -(every.exp() * every).sum(-1),
        "log_sum_sq_probs": every.exp().square().sum(-1).log(),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == targets,
    }
    assert torch.equal(made.label_mask, mask)
    for name in ALL:
        if name not in outputs:
            assert getattr(made, name) is None
            continue
        want = expected[name].masked_fill(~mask, 0)
        torch.testing.assert_close(made[name].to(want.dtype), want, rtol=1e-5, atol=1e-6)
    loss = -expected["log_probs"].masked_fill(~mask, 0).sum() / 5
    torch.testing.assert_close(made.loss, loss, rtol=1e-5, atol=0, check_dtype=False)
    (got,) = torch.autograd.grad(made.loss, hidden)
    (want,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
