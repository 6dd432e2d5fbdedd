"""Tests of the parts of a step: schedule, decay groups, the exact normalizer, evaluation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels import AutoLiger, LigerLlama, LigerQwen3Moe, Qwen3MoeConfig
from ligermodels.layers import Experts, Router
from ligermodels.training import processes
from ligermodels.training.config import SCHEDULES, FinetuneConfig, ScheduleOptions
from ligermodels.training.data import Document
from ligermodels.training.objectives import Objective
from ligermodels.training.optimizers import parameter_groups
from ligermodels.training.packing import PackedRows
from ligermodels.training.schedules import learning_rate
from ligermodels.training.trainer import (
    StepFlops,
    Trainer,
)
from tests.rounding import ADAM_EPSILON
from tests.training.tiny_run import make_checkpoint, tiny_config


def make_rows(count=24, seq_len=32, seed=0):
    """Make documents of unequal lengths; in half of them only the last tokens are targets."""
    rng = np.random.default_rng(seed)
    documents = []
    for i in range(count):
        length = int(rng.integers(4, 30))
        loss_mask = np.arange(length) >= (1 if i % 2 else length - 2)
        ids = rng.integers(0, 258, length).astype(np.int32)
        documents.append(Document(ids, loss_mask, divisible=False))
    return PackedRows([documents], seq_len)


class Routed(LigerLlama):
    """Llama with experts, whose balance and z-loss are large parts of the loss."""

    router_losses = 0.5, 0.1

    def make_block(self, layer_index):
        block = super().make_block(layer_index)
        block.mlp = Experts(Router(64, 6, 2), 64, 24)
        return block


def make_trainer(rows, eval_rows=None, kind=LigerLlama, **options):
    torch.manual_seed(0)
    model = kind(tiny_config())
    config = FinetuneConfig.from_options(
        model="m", train_files=["t"], output_dir="o", adam_epsilon=ADAM_EPSILON, **options
    )
    return Trainer(model, config, rows, eval_rows, torch.device("cpu"), Objective(config))


def test_the_head_skips_the_rows_of_prompts(monkeypatch):
    """If many targets are ignored, the head gets the number of the others; the loss is equal."""
    rows = make_rows()
    given = []

    def spy(head, inputs, options):
        given.append((options.get("max_valid"), int((inputs[1] != -100).sum())))

    results = []
    for spares in (True, False):
        trainer = make_trainer(rows, rows, batch_size=8, gradient_accumulation_steps=2, max_steps=2)
        trainer.model.head.register_forward_pre_hook(spy, with_kwargs=True)
        if not spares:
            monkeypatch.setattr(trainer, "head_options", lambda batch: {})
        batches = trainer.micro_batches(0)
        assert all(0 < batch.num_targets < 0.9 * batch.labels.numel() for batch in batches)
        given.clear()
        made = trainer.step(0, batches)
        loss, norm = made["loss"], made["grad_norm"]
        results.append((loss, norm, trainer.evaluate()["eval_loss"]))
        assert [number if spares else None for _, number in given] == [told for told, _ in given]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_the_head_takes_all_rows_where_skipping_does_not_pay():
    rows = make_rows()
    (batch,) = make_trainer(rows, batch_size=8).micro_batches(0)
    assert make_trainer(rows).head_options(batch) != {}
    assert make_trainer(rows, compile=True).head_options(batch) == {}
    full = dataclasses.replace(batch, num_targets=batch.labels.numel())
    assert make_trainer(rows).head_options(full) == {}


def test_the_number_of_steps_covers_the_epochs():
    def steps(**options):
        return make_trainer(make_rows(seq_len=31), **options).total_steps

    count = len(make_rows(seq_len=31))
    assert steps(batch_size=4) == -(-count // 4)
    assert steps(batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2) == -(-count // 2)
    assert steps(batch_size=4, num_train_epochs=0.01) == 1
    assert steps(max_steps=7) == 7


def test_accumulating_with_the_exact_normalizer_equals_one_big_batch():
    rows = make_rows()
    losses, weights = [], []
    for size, count in ((8, 1), (4, 2), (1, 8)):
        trainer = make_trainer(
            rows, batch_size=size, gradient_accumulation_steps=count, max_steps=3
        )
        batches = trainer.micro_batches(0)
        if count > 1:  # If all had as many targets, a mean of means would also pass.
            assert len({batch.num_targets for batch in batches}) > 1
        made = trainer.step(0, batches)
        loss, norm = made["loss"], made["grad_norm"]
        losses.append((loss.item(), norm.item()))
        weights.append(trainer.model.state_dict())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
    for other in weights[1:]:
        for name, value in weights[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_the_balance_of_experts_is_that_of_the_step(loss):
    """Micro-batches add up, also where the loss is computed from rows, and the loads are logged."""
    rows, found = make_rows(), []
    for size, count in ((4, 1), (1, 4)):
        options = {"batch_size": size, "gradient_accumulation_steps": count, "loss_type": loss}
        trainer = make_trainer(rows, kind=Routed, max_steps=2, **options)
        made = trainer.step(0, trainer.micro_batches(0))
        assert made["dropped_tokens"] == 0 and 0 < made["router_entropy"] < math.log(6)
        assert made["expert_load_max"] > 1 > made["expert_load_min"] >= 0
        names = ("loss", "grad_norm", "expert_load_max", "expert_load_min", "router_entropy")
        found.append([float(made[name]) for name in names])
        trainer.model.router_losses = 0.0, 0.0
        assert trainer.step(0, trainer.micro_batches(0))["loss"] < made["loss"] - 0.5
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_packed_step_equals_its_documents_one_by_one():
    rows = make_rows(count=6)
    trainer = make_trainer(rows, batch_size=len(rows), max_steps=1)
    (batch,) = trainer.micro_batches(0)
    total, count = 0.0, 0
    for piece in (p for i in range(len(rows)) for p in rows.documents(i)):
        ids = torch.from_numpy(piece.ids).long()[None]
        labels = torch.where(torch.from_numpy(piece.loss_mask), ids, -100)
        total += trainer.model(ids, labels=labels, reduction="sum").loss.item()
        count += piece.num_targets
    assert batch.num_targets == count
    loss = trainer.step(0, [batch])["loss"]
    assert loss.item() == pytest.approx(total / count, rel=1e-5)


def test_a_step_does_not_depend_on_the_callers_generators():
    rows = make_rows()
    found = []
    for noise in (1, 2):
        trainer = make_trainer(rows, batch_size=2, max_steps=4)
        trainer.model.embed_tokens.register_forward_hook(
            lambda module, _, output: torch.nn.functional.dropout(output, 0.5, module.training)
        )
        torch.manual_seed(noise)
        found.append(trainer.step(2, trainer.micro_batches(2))["loss"])
    assert torch.equal(*found)
    assert not torch.equal(found[0], trainer.step(3, trainer.micro_batches(2))["loss"])


def test_gradients_are_clipped_to_the_norm():
    rows = make_rows()
    trainer = make_trainer(rows, batch_size=2, max_steps=1, max_grad_norm=1e-3)
    before = []
    hook = trainer.optimizer.register_step_pre_hook(
        lambda *_: before.append([p.grad.clone() for p in trainer.model.parameters()])
    )
    norm = trainer.step(0, trainer.micro_batches(0))["grad_norm"]
    hook.remove()
    assert norm > 1e-3
    assert torch.linalg.vector_norm(
        torch.cat([g.flatten() for g in before[0]])
    ).item() == pytest.approx(1e-3, rel=1e-3)


def test_evaluation_is_the_mean_over_all_targets_whatever_the_batches():
    rows = make_rows(count=10)
    found = [
        make_trainer(rows, rows, batch_size=size, max_steps=1).evaluate() for size in (1, 3, 10)
    ]
    assert [each["targets"] for each in found] == [rows.num_targets] * 3
    for each in found:
        assert each["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-6)
        assert each["eval_perplexity"] == pytest.approx(math.exp(each["eval_loss"]))
    few = make_trainer(rows, rows, batch_size=2, max_steps=1, max_eval_rows=1).evaluate()
    assert few["targets"] == rows.batch([0]).num_targets


def test_what_a_rank_repeats_counts_for_nothing(monkeypatch):
    """Two ranks share out three batches: both get two, and together they count each once."""
    rows = make_rows()
    assert len(rows) >= 6
    options = {"batch_size": 2, "max_eval_rows": 6, "gradient_accumulation_steps": 3}

    def counts(number, of):
        monkeypatch.setattr(processes, "rank", lambda: number)
        monkeypatch.setattr(processes, "num_ranks", lambda: of)
        trainer = make_trainer(rows, rows, max_steps=1, **options)
        trainer.batches_per_step = 3
        found = trainer.evaluate()
        targets = sum(batch.num_targets for batch in trainer.micro_batches(0))
        return found["targets"], found["eval_loss"] * found["targets"], targets

    for expected, *found in zip(counts(0, 1), counts(0, 2), counts(1, 2)):
        assert sum(found) == pytest.approx(expected, rel=1e-5)


def beside_transformers(folder, rows, steps, rate):
    """Return the losses of our steps, and of the same steps by transformers."""
    transformers = pytest.importorskip("transformers")
    ours = AutoLiger.from_hf(folder, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = FinetuneConfig.from_options(
        model="m",
        train_files=["t"],
        output_dir="o",
        batch_size=2,
        max_steps=steps,
        learning_rate=rate,
        adam_epsilon=ADAM_EPSILON,
    )
    trainer = Trainer(ours, config, rows, None, torch.device("cpu"), Objective(config))
    optimizer = torch.optim.AdamW(
        parameter_groups(theirs.parameters(), config.optimizer.weight_decay),
        betas=(config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        eps=config.optimizer.adam_epsilon,
    )
    losses = []
    for step in range(steps):
        (batch,) = trainer.micro_batches(step)
        made = trainer.step(step, [batch])
        loss, now = made["loss"], made["learning_rate"]
        # each row holds one document, so causal attention is enough
        logits = theirs(batch.input_ids).logits[:, :-1].flatten(0, 1)
        other = torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten())
        other.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.optimizer.max_grad_norm)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = now
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), other.item()))
    return losses


def test_fifty_steps_follow_transformers(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny")
    ids = np.random.default_rng(0).integers(0, 40, 2000).astype(np.int32)
    rows = PackedRows([[Document(ids, np.ones(2000, dtype=bool))]], seq_len=33)
    losses = beside_transformers(folder, rows, steps=50, rate=1e-2)
    assert losses[-1][0] < losses[0][0] - 1
    assert max(abs(ours - theirs) for ours, theirs in losses) < 1e-4


def rates_of(total, **options):
    schedule = ScheduleOptions(**options)
    return [learning_rate(schedule, step, total) for step in range(total)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_and_ends_where_it_says(schedule):
    rates = rates_of(110, name=schedule, learning_rate=2.0, warmup_steps=10)
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == 2.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    last = {"constant": 2.0, "inverse_sqrt": 2.0 * (10 / 110) ** 0.5}.get(schedule, 0.2)
    assert rates[-1] == pytest.approx(last)
    middle = {"cosine": 1.1, "linear": 1.1, "inverse_sqrt": 2.0 * (10 / 60) ** 0.5}
    assert rates[59] == pytest.approx(middle.get(schedule, 2.0))


def test_a_single_step_without_a_warm_up_has_the_last_rate():
    rates = rates_of(1, learning_rate=2.0, min_lr_rate=0.5)
    assert rates == [pytest.approx(1.0)]


def test_wsd_keeps_the_peak_for_four_fifths():
    rates = rates_of(100, name="wsd", learning_rate=1.0, min_lr_rate=0, warmup_steps=0)
    assert rates[:80] == [1.0] * 80 and rates[89] == pytest.approx(0.5)


def rows(*lengths, seq_len=64):
    documents = [
        Document(np.arange(n, dtype=np.int32) + 1, np.arange(n) > 0, divisible=False)
        for n in lengths
    ]
    return PackedRows([documents], seq_len)


def with_experts():
    sizes = {"vocab_size": 258, "hidden_size": 64, "moe_intermediate_size": 384, "head_dim": 16}
    return LigerQwen3Moe(Qwen3MoeConfig.small(**sizes))


@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        (lambda: LigerLlama(tiny_config()), ()),
        (lambda: LigerLlama(tiny_config()), ("layers.0",)),
        (with_experts, ()),
    ],
)
def test_linears_and_head_are_those_that_torch_counts(model, frozen):
    model = model()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    flops = StepFlops.of(model)
    batch = rows(64).batch([0])
    with FlopCounterMode(display=False) as counter:
        model(batch.input_ids, labels=batch.labels).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(v for op, v in counted.items() if "mm" in str(op) and "bmm" not in str(op))
    # The head computes a row more than there are targets; the attention is not counted here.
    expected = flops.per_token * 64 + flops.per_target * 63
    assert expected == pytest.approx(products, rel=0.03)


def test_attention_counts_the_pairs_of_each_document():
    batch = rows(10, 20, 5, seq_len=32).batch([0, 1])
    pairs = 10 * 11 // 2 + 20 * 21 // 2 + 5 * 6 // 2
    assert StepFlops(0, 0, ((1, None), (1, None))).count(batch) == 2 * pairs
    near = 10 * 11 // 2 + (55 + 10 * 10) + 5 * 6 // 2
    assert StepFlops(0, 0, ((1, None), (1, 10))).count(batch) == pairs + near
    assert StepFlops(1, 0, ()).count(batch) == 35
    assert StepFlops(0, 1, ()).count(batch) == 32
    assert StepFlops(1, 1, ((1, None),)).count(batch.uncounted()) == 0


@pytest.mark.parametrize("length", [8, 20])
def test_only_packed_rows_tell_the_model_of_documents(length):
    ids = np.arange(20, dtype=np.int32)
    documents = [Document(ids[: length - i], np.arange(length - i) > 0, True) for i in range(4)]
    trainer = make_trainer(PackedRows([documents], 20), batch_size=2)
    batch, model = trainer.rows.batch([0, 1]), trainer.model
    assert batch.is_packed == (length == 8)
    given = []
    model.register_forward_pre_hook(lambda *args: given.append(args[2]), with_kwargs=True)
    losses = [
        trainer.call(each, reduction="sum").loss
        for each in (batch, dataclasses.replace(batch, is_packed=True, cu_seqlens=None))
    ]
    names = {"cu_seqlens", "max_seqlen", "position_ids"}
    told = {"cu_seqlens", "max_seqlen"} if length == 8 else set()
    assert [names & {*inputs} for inputs in given] == [told, {"position_ids"}]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("length", [8, 20])
def test_a_module_that_requires_positions_gets_them(length):
    class Mine(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.model = LigerLlama(config)

        def forward(self, input_ids, *, position_ids, **inputs):
            assert position_ids.shape == input_ids.shape
            return self.model(input_ids, position_ids=position_ids, **inputs)

    ids = np.arange(20, dtype=np.int32)
    documents = [Document(ids[:length], np.arange(length) > 0, True)] * 4
    trainer = make_trainer(PackedRows([documents], 20), kind=Mine, batch_size=2)
    batch = trainer.rows.batch([0, 1])
    assert batch.is_packed == (length == 8)
    trainer.call(batch)


def test_padding_does_not_change_a_rope_that_depends_on_the_length():
    class Dynamic(LigerLlama):
        def __init__(self, config):
            rope = {"rope_type": "dynamic", "factor": 8.0}
            super().__init__(
                dataclasses.replace(config, rope_scaling=rope, max_position_embeddings=16)
            )

    documents = [Document(np.arange(n, dtype=np.int32), np.arange(n) > 0, True) for n in (40, 24)]
    trainer = make_trainer(PackedRows([documents], 40), kind=Dynamic)
    batch = next(b for b in map(trainer.rows.batch, ([0], [1])) if b.num_tokens == 24)
    alone = trainer.model(batch.input_ids[:, :24], labels=batch.labels[:, :24], reduction="sum")
    torch.testing.assert_close(trainer.call(batch, reduction="sum").loss, alone.loss)
