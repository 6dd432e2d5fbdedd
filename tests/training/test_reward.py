"""Reward models: the loss is that of TRL, and what is exported opens in transformers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from ligermodels.errors import DataError
from ligermodels.heads.classifier import LigerClassifier
from ligermodels.training.packing import row_order
from tests.training.tiny_run import forget, make_text, run, same

RATE = {"learning_rate": 3e-3, "max_steps": 12, "loss": "reward", "batch_size": 4}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs in which the one with a cat is preferred."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    texts = make_text(file.with_suffix(".txt")).read_text().split("\n\n")
    records = [
        {"prompt": text, "chosen": " cat" * (1 + i % 3), "rejected": " dog", "margin": 0.1}
        for i, text in enumerate(texts)
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    return file


def scores(model, ids):
    with torch.no_grad():
        return model.eval()(ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize("lora", [{}, {"lora_r": 4}])
def test_a_reward_model_learns_resumes_and_opens_in_transformers(checkpoint, pairs, tmp_path, lora):
    transformers = pytest.importorskip("transformers")
    given = {**RATE, **lora, "save_steps": 6, "group_by_length": True}
    done = run(checkpoint, pairs, tmp_path / "run", **given)
    assert done.eval_after["eval_accuracy"] == 1.0 and done.shown[1] == "accuracy"
    forget(done.output_dir, 12)
    again = run(checkpoint, pairs, tmp_path / "run", resume=True, **given)
    ours, theirs = (LigerClassifier.from_hf(each.model_dir) for each in (done, again))
    assert same(ours.state_dict(), theirs.state_dict())
    hf = transformers.AutoModelForSequenceClassification.from_pretrained(done.model_dir)
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    assert hf.config.num_labels == 1
    torch.testing.assert_close(scores(ours, ids), scores(hf, ids), rtol=1e-5, atol=1e-6)


def test_a_margin_is_a_finite_number_or_null(checkpoint, tmp_path):
    pair = {"prompt": "a", "chosen": " b", "rejected": " c"}
    kept = [{**pair, "margin": x} for x in (None, 2, 0.5)]
    file = tmp_path / "pairs.jsonl"
    for odd in (float("nan"), "2", True):
        file.write_text("\n".join(map(json.dumps, [*kept, {**pair, "margin": odd}])))
        with pytest.raises(DataError, match=r'pairs.jsonl:4: "margin" must be a finite number'):
            run(checkpoint, file, tmp_path / "run", **RATE)
    losses = []
    for each in (kept, [{**pair, "margin": x} for x in (0, 2, 0.5)]):  # null is no margin
        file.write_text("\n".join(map(json.dumps, each)))
        given = {**RATE, "eval_fraction": 0, "max_steps": 1, "overwrite_output_dir": True}
        losses.append(run(checkpoint, file, tmp_path / "run", **given).loss)
    assert losses[0] == losses[1]


def test_the_first_loss_is_that_of_trl(checkpoint, pairs, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    changes = {"max_steps": 1, "eval_files": pairs, "center_rewards_coefficient": 0.1}
    done = run(checkpoint, pairs, tmp_path / "run", **RATE | changes)
    start = done.output_dir / "start"
    tokenizer = AutoTokenizer.from_pretrained(start)
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    trainer = trl.RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(start),
        trl.RewardConfig(
            output_dir=str(tmp_path / "trl"),
            center_rewards_coefficient=0.1,
            report_to=[],
            use_cpu=True,
            per_device_eval_batch_size=len(records),
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(records),
        eval_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    found = trainer.evaluate()
    assert done.eval_before["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)
    assert done.eval_before["eval_accuracy"] == pytest.approx(found["eval_accuracy"])


@pytest.mark.parametrize(("count", "batch"), [(1000, 4), (100, 4), (7, 3)])
def test_groups_of_about_the_same_length_are_those_of_transformers(count, batch, monkeypatch):
    lengths = torch.randint(1, 99, (count,), generator=torch.Generator().manual_seed(0)).numpy()
    plain = [*map(row_order(count, 0), range(2 * count))]
    lengths[plain[0]] = lengths[plain[count]] = 99  # with which an epoch of theirs begins
    order = [*map(row_order(count, 0, lengths=lengths, near=batch), range(2 * count))]
    for epoch in (slice(count), slice(count, None)):
        monkeypatch.setattr(torch, "randperm", lambda *_, at=epoch, **k: torch.tensor(plain[at]))
        assert order[epoch] == get_length_grouped_indices(lengths.tolist(), batch)
    assert order[:count] != order[count:]
