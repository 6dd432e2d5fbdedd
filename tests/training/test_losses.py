"""Runs with each loss on a tiny model: they learn, resume exactly, and count exactly."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels import AutoLiger
from ligermodels.adapters.reference import token_log_probs
from ligermodels.errors import CheckpointError, ConfigError, SaveError
from ligermodels.losses import cpo_loss, dpo_loss, kto_kl, kto_loss, orpo_loss
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.preferences import stored_log_probs
from ligermodels.training.trainer import Trainer
from tests.training import tiny_run
from tests.training.tiny_run import forget, make_checkpoint

# The rows of a tiny head are computed at once, because tests/kernels compares blocks of them.
pytestmark = pytest.mark.usefixtures("rows_at_once")
OFFLINE = ["dpo", "kto", "orpo", "cpo", "simpo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint and pairs: the better answer repeats the prompt."""
    path = tmp_path_factory.mktemp("preference")
    make_checkpoint(path / "model")
    words = "cat dog bird fish".split()
    records = [
        {
            "prompt": f"{a} {i}:",
            "chosen": f" {a}" * (1 + i % 3),
            "rejected": f" {b}",
            "completion": f" {a}",  # for sft
        }
        for i in range(6)
        for a, b in zip(words, words[1:] + words[:1])
    ]
    (path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    return path


def run(folder: Path, out: Path, loss: str, **options):
    settings = {"batch_size": 4, "gradient_accumulation_steps": 2, "device": None}
    settings |= {"eval_fraction": 0.2, "eval_steps": 6, "seq_len": 1024, "loss": loss}
    return tiny_run.run(folder / "model", folder / "pairs.jsonl", out, **settings | options)


@pytest.mark.parametrize(
    "loss", ["dpo", "kto", *(pytest.param(x, marks=pytest.mark.long) for x in OFFLINE[2:])]
)
def test_a_run_learns_and_resumes_exactly(folder: Path, tmp_path: Path, loss: str) -> None:
    result = run(folder, tmp_path / "a", loss, save_steps=2, save_total_limit=9)
    assert result.eval_after["eval_loss"] < result.eval_before["eval_loss"]
    key, _ = result.shown
    assert key in result.eval_before and key in result.eval_after
    first, last = (result.metrics[i] for i in (1, -2))
    assert last["loss"] < first["loss"]
    names = {"rewards/chosen", "rewards/rejected", "logps/chosen", "logits/chosen", "entropy"}
    assert names <= last.keys()
    if loss in ("dpo", "simpo"):  # the likelihood is most of the others' loss in so few steps
        assert last["rewards/margins"] > first["rewards/margins"]
        assert result.eval_after["eval_rewards/accuracies"] == 1
        assert "mean_token_accuracy" in last
    if loss == "kto":  # a step may have completions of one kind alone, and then no margin
        steps = [each for each in result.metrics if "rewards/chosen" in each]
        for start, each in (*(("", each) for each in steps), ("eval_", result.eval_after)):
            chosen, rejected, margin = (
                each[f"{start}rewards/{kind}"] for kind in ("chosen", "rejected", "margins")
            )
            assert margin == (pytest.approx(chosen - rejected) if chosen and rejected else 0)
        assert result.eval_after["eval_rewards/margins"] > 0
    trained = result.model.state_dict()
    # A run that was killed after step 2.
    for step in (4, 6):
        forget(tmp_path / "a", step)
    resumed = run(folder, tmp_path / "a", loss, save_steps=2, save_total_limit=9, resume=True)
    assert resumed.metrics[-1] == result.metrics[-1]
    for name, weight in resumed.model.state_dict().items():
        assert weight.equal(trained[name]), name
    made = AutoLiger.from_hf(result.model_dir).state_dict()
    assert all(weight.equal(trained[name]) for name, weight in made.items())


def trainer_of(folder: Path, loss: str, size: int, count: int, **options) -> Trainer:
    given = {"loss": loss, "batch_size": size, "gradient_accumulation_steps": count}
    given |= {"max_steps": 1, "seq_len": 1024, "separator": None, "learning_rate": 2e-5}
    base = folder / "model"
    config = tiny_run.options(base, folder / "pairs.jsonl", "o", **given | options)
    model, tokenizer = AutoLiger.from_hf(base), Tokenizer.from_hf(base)
    objective = config.loss.objective(config)
    objective.open(tokenizer)
    rows = objective.rows([objective.read(config.data.train_files, tokenizer)])
    trainer = Trainer(model, config, rows, rows, torch.device("cpu"), objective)
    with torch.no_grad():  # so that the reference differs from the policy
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return trainer


def with_reference(trainer: Trainer, folder: Path, out: Path) -> Trainer:
    policy = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(AutoLiger.from_hf(folder / "model").state_dict())
    trainer.objective.load(trainer.model)
    trainer.objective.prepare(trainer.model, trainer.call, [trainer.rows], out)
    trainer.model.load_state_dict(policy)
    return trainer


@pytest.mark.parametrize("loss", OFFLINE)
def test_micro_batches_equal_one_batch(folder: Path, tmp_path: Path, loss: str) -> None:
    found, gradients = [], []
    for size, count in ((8, 1), (2, 4), (1, 8)):
        trainer = with_reference(trainer_of(folder, loss, size, count), folder, tmp_path)
        grads = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_, model=trainer.model, grads=grads: grads.extend(
                p.grad.clone() for p in model.parameters()
            )
        )
        step = trainer.step(0, trainer.micro_batches(0))
        found.append({k: v for k, v in step.items() if k not in ("grad_norm", "flops")})
        gradients.append(grads)
    assert found[0].keys() == found[1].keys()
    for other, grads in zip(found[1:], gradients[1:]):
        for key in found[0]:
            torch.testing.assert_close(other[key], found[0][key], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grads, gradients[0], rtol=1e-3, atol=1e-5)


def learned(trainer: Trainer, batch, chunk_size: int | None = None, **normalizers):
    """Return the loss, the metrics and the gradients of a batch, and its operations."""
    trainer.model.head.loss_options["chunk_size"] = chunk_size
    trainer.optimizer.zero_grad()
    with FlopCounterMode(display=False) as counter:
        loss, metrics = trainer.objective.loss(trainer.call, batch, **normalizers)
        loss.backward()
    del trainer.model.head.loss_options["chunk_size"]
    values = {name: mean.value for name, mean in metrics.items()}
    return (
        loss,
        values,
        [p.grad.clone() for p in trainer.model.parameters()],
    ), counter.get_total_flops()


@pytest.mark.parametrize("loss", ["dpo", "kto", "simpo", "sft", "aot"])
def test_a_loss_takes_three_products_if_groups_fit(
    folder: Path, tmp_path: Path, loss: str, monkeypatch
) -> None:
    """The chunks do not change it, nor does the way of four products for all rows at once."""
    options = {"loss_type": "dft", "seq_len": 64} if loss == "sft" else {}
    if loss == "aot":
        loss, options = "dpo", {"loss_type": "aot"}
    trainer = with_reference(trainer_of(folder, loss, 6, 1, **options), folder, tmp_path)
    batches, _ = trainer.objective.begin(trainer.call, trainer.micro_batches(0))
    (batch,) = batches
    normalizers = trainer._normalizers(batches)
    product = 2 * batch.num_targets * 64 * 258  # width, vocabulary
    # torch.compile gets no function of a batch, and so takes the way of four products.
    config = trainer.objective.config
    compiled = replace(config, model=replace(config.model, compile=True))
    found = []
    # 40 tokens are some groups, but not all rows, which aot needs.
    for chunk_size, saved in ((None, product), (40, 0 if "aot" in options.values() else product)):
        operations = []
        for each in (config, compiled):
            monkeypatch.setattr(trainer.objective, "config", each)
            values, counted = learned(trainer, batch, chunk_size, **normalizers)
            found.append(values)
            operations.append(counted)
        assert operations[0] == operations[1] - saved
    for values in found[1:]:
        torch.testing.assert_close(values, found[0], rtol=1e-4, atol=1e-6)


def test_a_step_has_the_loss_of_its_formula(folder: Path, tmp_path: Path) -> None:
    for loss, options in (
        ("sft", {"loss_type": "dft", "seq_len": 64}),
        ("dpo", {"loss_type": "ipo", "beta": 0.3}),
        ("dpo", {"loss_type": "robust", "label_smoothing": 0.2}),
        ("dpo", {"f_divergence_type": "js_divergence", "ld_alpha": 0.5, "use_weighting": True}),
        ("dpo", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}),
        ("dpo", {"loss_type": "discopop", "discopop_tau": 0.2}),
        ("kto", {"beta": 0.5, "undesirable_weight": 1.5}),
        ("orpo", {"beta": 0.5}),
        ("cpo", {"loss_type": "hinge"}),
        ("simpo", {"simpo_gamma": 1.1, "beta": 2.0}),
    ):
        trainer = with_reference(trainer_of(folder, loss, 3, 1, **options), folder, tmp_path)
        (batch,) = trainer.micro_batches(0)
        inputs = batch.input_ids, batch.labels
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.8)  # A flatter distribution, so that the KL is more than 0.
            log_probs = token_log_probs(trainer.model, *inputs, position_ids=batch.position_ids)
        if loss == "sft":
            valid = log_probs[log_probs != 0]
            assert len(valid) == batch.num_targets
            expected = (-valid * valid.exp()).mean()
        elif loss in ("dpo", "kto"):
            reference = AutoLiger.from_hf(folder / "model")
            with torch.no_grad():
                ref = token_log_probs(reference, *inputs, position_ids=batch.position_ids)
            given = log_probs, ref, batch.mask
            if loss == "dpo":
                asked = {"reduction": "none", "return_token_stats": ("sum_sq_probs",)}
                sums = trainer.call(batch, **asked).token_sum_sq_probs
                sums = torch.where(batch.mask, sums, 1.0).log()
                expected = dpo_loss(*given, log_sum_sq_probs=sums, **options).loss
            else:  # The second half of the rows are other completions, for the KL alone.
                first, second = zip(*(x.chunk(2) for x in given))
                labels = torch.tensor([group.label for group in batch.groups])
                kl = kto_kl(*second, normalizer=len(labels))
                assert kl > 0.01
                expected = kto_loss(*first, labels, kl, **options).loss
        elif loss == "orpo":
            # The likelihood covers the chosen rows up to their padding.
            every = torch.nn.functional.pad(batch.labels[:, 1:] != -100, (0, 1))
            assert every[:3].sum() > batch.mask[:3].sum()
            expected = orpo_loss(log_probs, batch.mask, nll_mask=every, **options).loss
        else:
            more = {"loss_type": "simpo", "cpo_alpha": 0} if loss == "simpo" else {}
            expected = cpo_loss(log_probs, batch.mask, **options, **more).loss
        torch.testing.assert_close(trainer.step(0, [batch])["loss"], expected)


def test_options_of_dpo_that_exclude_each_other_are_refused(folder: Path, tmp_path: Path) -> None:
    for wrong, message in (
        ({"f_divergence_type": "forward_kl", "loss_type": "apo_zero"}, "only defined with"),
        ({"use_weighting": True, "loss_type": "aot"}, "no weight for each pair"),
        ({"loss_type": "exo_pair"}, "label_smoothing: exo_pair needs more than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(folder, tmp_path / "never", "dpo", **wrong)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo"])
def test_a_memory_plan_is_for_the_padded_rows(folder: Path, loss: str) -> None:
    trainer = trainer_of(folder, loss, 2, 1)
    shape = trainer.rows.batch(range(2)).input_ids.shape
    assert trainer.objective.largest_batch([trainer.rows]) == shape == (4, 64)


@pytest.mark.parametrize("loss", ["sft", "dpo", "kto", "orpo"])
def test_what_layers_add_to_the_loss_is_kept(folder: Path, tmp_path: Path, loss: str) -> None:
    """The micro-batches of a step add their shares of it."""
    options = {"loss_type": "focal"} if loss == "sft" else {}
    trainer = with_reference(trainer_of(folder, loss, 2, 3, **options), folder, tmp_path)
    batches, _ = trainer.objective.begin(trainer.call, trainer.micro_batches(0))
    normalizers = trainer._normalizers(batches)
    call = trainer.call

    def total(auxiliary: float | None) -> float:
        def answer(batch, **options):
            extra = None if auxiliary is None else torch.tensor(auxiliary)
            return call(batch, **options)._replace(auxiliary_loss=extra)

        made = [trainer.objective.loss(answer, batch, **normalizers) for batch in batches]
        return sum(part.loss.item() for part in made)

    assert total(0.5) == pytest.approx(total(None) + 0.5, rel=1e-5)


def test_the_perplexity_is_that_of_the_next_token(folder: Path) -> None:
    """What layers add, and a loss_type's weights, belong to the training loss alone."""
    plain, focal = (trainer_of(folder, "sft", 2, 1, **o) for o in ({}, {"loss_type": "focal"}))
    want = plain.evaluate()
    assert want["eval_perplexity"] == pytest.approx(math.exp(want["eval_loss"]))
    assert focal.evaluate() == want
    for layer in plain.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: (
            *forward(*args, **kwargs),
            torch.tensor(0.5),
        )
    batch = plain.micro_batches(0)[0]
    assert plain.call(batch).auxiliary_loss == 1.0
    assert plain.evaluate() == want


def test_computed_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "data"
    values = torch.randn(5)
    calls = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return values

    for _ in range(2):
        assert stored_log_probs(path, 5, compute).equal(values)
    assert calls == [1] and [*path.parent.iterdir()] == [path]


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    stored_log_probs(path, 3, lambda: torch.ones(3))
    with pytest.raises(CheckpointError, match="remove the file, and they are computed again"):
        stored_log_probs(path, 4, lambda: torch.ones(4))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=str(path)):
        stored_log_probs(path, 3, lambda: torch.ones(3))
    (tmp_path / "file").touch()
    with pytest.raises(SaveError):
        stored_log_probs(tmp_path / "file" / "x", 1, lambda: torch.ones(1))
