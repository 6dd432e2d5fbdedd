"""A shard that has all classes gives what no shard gives. Several ranks: tests/parallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ligermodels import kernels
from ligermodels.kernels.linear_cross_entropy import chunk_plan
from ligermodels.kernels.linear_cross_entropy.functions import make_head
from ligermodels.kernels.linear_cross_entropy.vocab_shard import ShardedRows, VocabShard
from ligermodels.kernels.loss_options import CrossEntropyOptions, LossOptions
from tests.kernels.scratch import peak_scratch

VOCAB, WIDTH, ROWS = 37, 16, 11
OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 2.0, "logit_scale": 3.0, "z_loss": 0.1, "chunk_size": 4},
    {"label_smoothing": 0.1, "class_weights": torch.linspace(0.1, 2, VOCAB)},
    {
        "reduction": "none",
        "return_token_stats": ("log_probs", "entropy", "correct", "sum_sq_probs", "mean_logits"),
        "softcap": 4.0,
    },
    {"return_token_stats": ("entropy",)},
]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[VocabShard]:
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield VocabShard(dist.group.WORLD, 0, VOCAB)
    dist.destroy_process_group()


def check(shard: VocabShard, device: str = "cpu") -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, VOCAB, (ROWS,))
    targets[3] = -100
    made = torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH), torch.randn(VOCAB)
    for options in OPTIONS:
        options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
        results = []
        for here in (None, shard):
            hidden, weight, bias = (x.to(device, copy=True).requires_grad_() for x in made)
            out = kernels.linear_cross_entropy(
                hidden, weight, targets.to(device), bias, vocab_shard=here, **options
            )
            floats = [x for x in out if x is not None and x.requires_grad]
            torch.stack([x.sum() for x in floats]).sum().backward()
            results.append([*out, hidden.grad, weight.grad, bias.grad])
        for expected, found in zip(*results):
            assert (expected is None) == (found is None)
            if expected is not None:
                torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_a_shard_of_all_classes_changes_nothing(shard: VocabShard) -> None:
    check(shard)


def test_a_compiler_traces_collectives_that_wait(
    shard: VocabShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check(shard)


def test_the_likeliest_classes_of_a_split_vocabulary_are_refused(shard: VocabShard) -> None:
    hidden, weight, targets = torch.zeros(2, 4), torch.zeros(VOCAB, 4), torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"top_k=2, .* split over ranks; head.logits has all"):
        kernels.linear_cross_entropy(hidden, weight, targets, vocab_shard=shard, top_k=2)


@pytest.mark.parametrize(
    "budget, options",
    [
        (1_200_000, {}),
        (2_000_000, {"label_smoothing": 0.1, "softcap": 5.0}),
        (1_200_000, {"return_token_stats": True}),
        (2_000_000, {"skip_ignored": True}),
    ],
    ids=["plain", "smoothing", "stats", "skipped"],
)
def test_logits_and_their_copies_stay_within_the_budget(
    shard: VocabShard, options: dict[str, Any], budget: int
) -> None:
    shard = VocabShard(shard.group, 0, 3000)
    hidden = torch.randn(300, WIDTH).bfloat16().requires_grad_()
    weight = torch.randn(shard.vocab, WIDTH).bfloat16().requires_grad_()
    targets = torch.arange(300)  # all logits take 1.8 MB

    def forward() -> torch.Tensor:
        return kernels.linear_cross_entropy(
            hidden, weight, targets, max_scratch_bytes=budget, vocab_shard=shard, **options
        ).loss

    assert max(peak_scratch(forward, (hidden, weight))) <= budget


def test_ranks_with_fewer_classes_have_the_plan_of_the_others(
    shard: VocabShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would exchange other chunks, and wait for each other forever."""
    monkeypatch.setattr(chunk_plan, "MIN_ACCUMULATED_ROWS", 8)
    rows, width, vocab = 500, 256, 400
    hidden, targets = torch.zeros(rows, width).bfloat16(), torch.zeros(rows, dtype=torch.int64)
    budgets = range(500_000, 800_000, 20_000)
    kinds = set()
    for budget in budgets:
        plans = []
        for classes in (vocab, vocab // 2):
            weight = torch.zeros(classes, width).bfloat16().requires_grad_()
            options = LossOptions.of(max_scratch_bytes=budget, weight_grad_in_forward=True)
            head = make_head(
                *(hidden, weight, targets, None, options),
                one_loss=True,
                shard=VocabShard(shard.group, 0, vocab),
            )
            plans.append(head.args.plan)
        assert plans[0] == plans[1]
        kinds.add(plans[0].vocab_block is None)
    assert kinds == {True, False}


@pytest.mark.gpu
def test_nccl_exchanges_on_a_stream_of_its_own(tmp_path: Path) -> None:
    """The chunks are long enough for a stream that does not wait to read what is not there yet."""
    dist.init_process_group("nccl", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        check(VocabShard(dist.group.WORLD, 0, VOCAB), "cuda")
        hidden = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(32768, 512, device="cuda", dtype=torch.bfloat16)
        targets = torch.randint(0, len(weight), (len(hidden),), device="cuda")
        losses = [
            kernels.linear_cross_entropy(
                hidden, weight, targets, chunk_size=1024, reduction="none", vocab_shard=shard
            ).loss
            for shard in (None, *[VocabShard(dist.group.WORLD, 0, len(weight))] * 3)
        ]
    finally:
        dist.destroy_process_group()
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
def test_the_kernels_give_the_same(shard: VocabShard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    check(shard)


@pytest.mark.interpreter
def test_an_ignored_class_is_no_number_of_a_rank(
    shard: VocabShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    second = VocabShard(shard.group, 20, VOCAB)  # the last 17 classes
    logits, targets = torch.randn(4, 17), torch.full((4,), 25)
    marks = []
    for ignore_index in (-100, 5, 0):  # 25 is class 5 of this rank
        options = CrossEntropyOptions(ignore_index)
        rows = ShardedRows(logits, targets, None, options, second)
        marks.append(rows.losses(logits, None)[0])
    assert marks[0].equal(marks[1]) and marks[0].equal(marks[2])
