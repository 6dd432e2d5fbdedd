"""A loss head whose projection is another module, which the head calls chunk by chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligermodels.adapters import LoraLinear
from ligermodels.layers import LossHead
from ligermodels.layers import loss_head as module
from tests.kernels.scratch import peak_scratch
from tests.layers.heads import HIDDEN, VOCAB, Counting, build, data
from tests.models.pairs import relative
from tests.pairwise import pairwise


def test_a_swapped_head_is_called_chunk_by_chunk() -> None:
    head, _, _ = build("replaced")
    hidden, targets = data()
    loss = head(hidden, targets, chunk_size=10).loss
    assert head.proj.rows == [10, 10, 7]
    loss.backward()
    assert sorted(head.proj.rows) == sorted(2 * [10, 10, 7])  # backward calls it again
    head.proj.rows.clear()
    head(hidden, targets, skip_ignored=True, chunk_size=10)
    assert head.proj.rows == [10, 10, 4]  # the rows that count


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout, LoraLinear])
def test_a_captured_step_draws_its_random_numbers_again(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    head, linear = LossHead(HIDDEN, VOCAB), nn.Linear(HIDDEN, VOCAB)
    if kind is LoraLinear:
        head.proj = LoraLinear(linear, rank=2, dropout=0.5)
        nn.init.normal_(head.proj.lora_b)
    else:
        head.proj = nn.Sequential(kind(0.5), linear)
    hidden, targets = data()
    grads = []
    for captured in (False, True):
        monkeypatch.setattr(module, "_is_captured", lambda _, captured=captured: captured)
        torch.manual_seed(0)
        loss = head(hidden, targets, chunk_size=10).loss
        grads.append(torch.autograd.grad(loss, [hidden, *head.parameters()]))
    assert all(map(torch.equal, *grads))


def test_too_small_a_budget_names_the_least() -> None:
    head, weight, _ = build("replaced")
    hidden, targets = data()
    with pytest.raises(ValueError, match="at least") as error:
        head(hidden, targets, max_scratch_bytes=1)
    least = int(str(error.value).split()[-1])
    assert least > 3 * weight.nbytes
    with pytest.raises(ValueError, match=f"at least {least}$"):
        head(hidden, targets, max_scratch_bytes=least - 1)
    head(hidden, targets, max_scratch_bytes=least)
    assert set(head.proj.rows) == {1}
    # Without a gradient of hidden, autograd does not join the gradients of its rows.
    head(hidden.detach(), targets, max_scratch_bytes=least - hidden.nbytes)
    with pytest.raises(ValueError, match=f"at least {least - hidden.nbytes}$"):
        head(hidden.detach(), targets, max_scratch_bytes=least - hidden.nbytes - 1)
    # One chunk needs no sum of weight gradients, so a large projection needs no larger budget.
    head.proj.rows.clear()
    head(hidden[:1, :1], targets[:1, :1], max_scratch_bytes=3 * weight.nbytes)
    assert head.proj.rows == [1]


@pairwise(
    budget=[500_000, 1_500_000, 10_000_000],
    loss=[("mean", False), ("mean", True), ("none", False), ("none", True)],
    skip_ignored=[False, True],
    dtype=[torch.float32, torch.bfloat16],
    trained=[False, True],
)
def test_scratch_stays_in_the_budget(
    budget: int, loss: tuple[str, bool], skip_ignored: bool, dtype: torch.dtype, trained: bool
) -> None:
    reduction, stats = loss
    options: dict[str, Any] = {"reduction": reduction, "return_token_stats": stats}
    options |= {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 0.1}
    options |= {"skip_ignored": skip_ignored, "max_scratch_bytes": budget}
    head = LossHead(32, 1000, **options)
    head.proj = Counting(32, 1000, bias=False, dtype=dtype)
    head.proj.weight.requires_grad_(trained)
    hidden = torch.randn(128, 32).to(dtype).requires_grad_()
    targets = torch.arange(128)
    targets[::5] = -100

    def forward() -> Tensor:
        out = head(hidden, targets)
        if stats and reduction == "none":
            return torch.stack((out.loss, out.token_entropy))
        return out.loss

    scratch = peak_scratch(forward, (hidden, head.proj.weight))
    for phase, most in zip(("forward", "backward"), scratch):
        assert most <= budget, f"{phase}: {most} of {budget}"
    if budget == 10_000_000:  # it has room for all rows at once
        assert max(head.proj.rows) == ((targets != -100).sum() if skip_ignored else len(targets))


@pytest.mark.parametrize(
    "reduction, cut, backend",
    [
        ("mean", {"max_scratch_bytes": 36_000}, "eager"),
        pytest.param("mean", {"max_scratch_bytes": 36_000}, "aot_eager", marks=pytest.mark.long),
        pytest.param("none", {"chunk_size": 14}, "aot_eager", marks=pytest.mark.long),
    ],
)
def test_several_chunks_with_sizes_that_are_symbols(
    reduction: str, cut: dict[str, int], backend: str
) -> None:
    head, weight, _ = build("replaced")
    head.proj.forward = nn.Linear.forward.__get__(head.proj)  # Counting cannot be traced
    hidden, targets = data()
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend=backend, dynamic=True)
    results = []
    for function in (head, compiled):
        out = function(hidden, targets, reduction=reduction, z_loss=0.1, **cut).loss
        results.append((out, *torch.autograd.grad(out.sum(), [hidden, weight])))
    for eager, ours in zip(*results):
        assert relative(ours, eager) <= 1e-6
