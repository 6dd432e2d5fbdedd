"""GRPO on a tiny model: the reward rises, runs resume exactly, and samples are on policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ligermodels.adapters.reference import token_log_probs
from ligermodels.errors import ConfigError, DataError, LigerError
from ligermodels.training.grpo import GRPOObjective, load_reward
from tests.training import tiny_run
from tests.training.test_losses import trainer_of
from tests.training.tiny_run import forget, make_checkpoint

REWARDS = """
def vowels(prompts, completions, completion_ids, wanted, **_):
    assert len(prompts) == len(completions) == len(completion_ids) == len(wanted)
    return [sum(c in wanted[0] for c in text) / max(1, len(text)) for text in completions]

def some(completions, **_):
    return [None if i % 4 == 0 else float(i) for i in range(len(completions))]

def odd(completions, **_):
    return [float("nan") if i == 2 else 1.0 for i in range(len(completions))]


def few(completions, **_):
    return [1.0]

def ranked(completions, **_):
    return [float(i) for i in range(len(completions))]


def sparse(prompts, note, bonus, **_):
    assert len(note) == len(prompts) and bonus == [None] * len(prompts), (note, bonus)
    return [len(x or "") + i / 8 for i, x in enumerate(note)]

def broken(**_):
    raise KeyError("x")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grpo")
    make_checkpoint(path / "model")
    records = [{"prompt": f"say {i}:", "wanted": "aeiou" * 9} for i in range(8)]
    (path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    (path / "rewards.py").write_text(REWARDS)
    return path


SETTINGS = {
    "num_generations": 4,
    "max_completion_length": 6,
    "seq_len": 64,
    "temperature": 0.8,
}


def run(folder: Path, out: Path, function: str = "vowels", **options):
    pairs = folder / "pairs.jsonl"
    settings = {"loss": "grpo", "reward_function": f"{folder / 'rewards.py'}:{function}"}
    settings |= {"max_steps": 4, "batch_size": 8, "gradient_accumulation_steps": 2}
    settings |= {"learning_rate": 1e-2, "eval_files": pairs, "eval_steps": 4, "warmup_steps": 0}
    given = {"device": None, **settings, **SETTINGS, **options}
    return tiny_run.run(folder / "model", given.pop("train_files", pairs), out, **given)


def test_the_reward_rises_and_a_run_resumes_exactly(folder: Path, tmp_path: Path) -> None:
    options = {"max_steps": 8, "eval_steps": 8, "save_steps": 4, "save_total_limit": 9, "seed": 1}
    result = run(folder, tmp_path, **options)
    assert result.shown == ("eval_reward", "reward")
    assert result.eval_after["eval_reward"] > result.eval_before["eval_reward"] + 0.1
    keys = {"reward", "reward_std", "entropy", "completions/mean_length", "clip_ratio/low_mean"}
    assert keys <= result.metrics[1].keys()
    differences = [m.get("sampling/sampling_logp_difference/mean", 1.0) for m in result.metrics[1:]]
    assert 0 < max(differences[:-1]) < 1e-5  # the last one is an evaluation
    trained = result.model.state_dict()
    forget(tmp_path, 8)
    resumed = run(folder, tmp_path, **options, resume=True)
    assert resumed.metrics[-1] == result.metrics[-1]
    assert all(w.equal(trained[name]) for name, w in resumed.model.state_dict().items())


@pytest.mark.parametrize(
    "adapter",
    [{"lora_r": 2}, {}, {"lora_r": 2, "load_in": "4bit", "modules_to_save": ["norm"]}],
)
def test_the_reference_is_the_first_model(folder: Path, tmp_path: Path, adapter: dict) -> None:
    metrics = run(
        folder, tmp_path, "ranked", max_steps=2, beta=0.1, eval_files=None, **adapter
    ).metrics
    first, *_, last = (entry["kl"] for entry in metrics if "kl" in entry)
    assert abs(first) < 1e-6 and last > 1e-5


@pytest.mark.gpu
def test_a_gpu_samples_what_the_trainer_scores(folder: Path, tmp_path: Path) -> None:
    """The log-probabilities of the graph are the trainer's, and a seed has its samples."""
    options = {"device": "cuda", "precision": "float32", "max_completion_length": 20}
    results = [run(folder, tmp_path / name, **options) for name in ("one", "two")]
    for entry in results[0].metrics:
        assert entry.get("sampling/sampling_logp_difference/mean", 0.0) < 1e-3
    one, two = (result.eval_before["eval_reward"] for result in results)
    assert one == two


def grpo_trainer(folder: Path, size: int, count: int, **options):
    reward = f"{folder / 'rewards.py'}:{options.pop('function', 'vowels')}"
    trainer = trainer_of(folder, "grpo", size, count, reward_function=reward, **SETTINGS | options)
    trainer.objective.load(trainer.model)
    return trainer


def test_micro_batches_equal_one_batch(folder: Path) -> None:
    for kind in ("dapo", "dr_grpo", "sapo"):  # each has another normalizer
        losses = []
        for size, count in ((8, 1), (2, 4)):
            trainer = grpo_trainer(folder, size, count, loss_type=kind, beta=0.1, epsilon_high=2.0)
            objective = trainer.objective
            torch.manual_seed(0)
            # The samples depend on the size of the batches that are sampled, so they are fixed.
            whole = grpo_trainer(folder, 8, 1, loss_type=kind, beta=0.1, epsilon_high=2.0)
            batches, _ = whole.objective.begin(whole.call, whole.micro_batches(0))
            (batch,) = batches
            parts = [part_of(batch, slice(i, i + size)) for i in range(0, 8, size)]
            normalizers = trainer._normalizers(parts)
            losses.append(
                sum(objective.loss(trainer.call, p, **normalizers).loss for p in parts).item()
            )
        assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6), kind


def part_of(batch, rows: slice):
    parts = {name: x[rows] for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    parts["num_targets"] = int((parts["labels"] != -100).sum())
    return type(batch)(**vars(batch) | parts)


def test_samples_are_scored_at_their_temperature(folder: Path) -> None:
    trainer = grpo_trainer(folder, 8, 1)
    assert isinstance(trainer.objective, GRPOObjective)
    (batch,), metrics = trainer.objective.begin(trainer.call, trainer.micro_batches(0))
    assert batch.input_ids.shape == (8, 64) and batch.advantages.shape == (8,)
    assert trainer.objective.largest_batch([trainer.rows]) == (8, 64)
    assert batch.mask.sum(1).max() <= 6
    call = trainer.objective._tempered(trainer.call)
    found = 0.0 - call(batch, reduction="none").loss
    logits = trainer.model.head.logits(
        trainer.model(batch.input_ids, position_ids=batch.position_ids)
    )
    every = torch.log_softmax(logits / 0.8, -1)[:, :-1]
    expected = every.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found[batch.mask], expected[batch.mask[:, :-1]])
    torch.testing.assert_close(batch.sampling_log_probs[batch.mask], found[batch.mask])
    assert not batch.sampling_log_probs[~batch.mask].any()
    plain = token_log_probs(trainer.model, batch.input_ids, batch.labels)
    assert not torch.allclose(found[batch.mask], plain[batch.mask], atol=1e-3)
    # Advantages of a group have the mean 0.
    assert batch.advantages.view(2, 4).sum(1).abs().max() < 1e-4
    assert float(metrics["completions/mean_length"].value) == batch.mask.sum(1).float().mean()


def test_rewards_that_are_missing_or_wrong(folder: Path) -> None:
    trainer = grpo_trainer(folder, 8, 1, function="some")
    (batch,), metrics = trainer.objective.begin(trainer.call, trainer.micro_batches(0))
    assert batch.advantages[::4].eq(0).all() and batch.advantages.isfinite().all()
    assert float(metrics["reward"].value) == pytest.approx((1 + 2 + 3 + 5 + 6 + 7) / 6)
    for function, fault in (
        ("few", "it returned 1 rewards for 8"),
        ("broken", "KeyError: 'x'"),
        ("odd", r"the reward of a completion of 'say \d:' is nan"),
    ):
        trainer = grpo_trainer(folder, 8, 1, function=function)
        with pytest.raises(LigerError, match=fault):
            trainer.objective.begin(trainer.call, trainer.micro_batches(0))


def test_a_key_of_any_record_is_a_column_of_each_step(folder: Path, tmp_path: Path) -> None:
    """As in a table: whether a step has a prompt with this key depends on the order of the rows."""
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    records = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "note": "x"}]
    train.write_text("\n".join(map(json.dumps, records)))
    held.write_text(json.dumps({"prompt": "d", "bonus": None}))
    sizes = {"batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3}
    run(folder, tmp_path / "run", "sparse", train_files=[train], eval_files=[held], **sizes)
    train.write_text(json.dumps({"prompt": "a" * 90}))
    with pytest.raises(DataError, match="no prompt fits into 58 tokens; use longer rows"):
        run(folder, tmp_path / "never", train_files=[train], eval_files=None, eval_fraction=0)


def test_another_reward_is_noticed(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    given = {"reward_function": f"{file}:vowels", "max_steps": 1, "eval_steps": 1}
    run(folder, tmp_path / "run", **given)
    file.write_text(REWARDS.replace("max(1,", "max(2,"))
    said = r"rewards.py:vowels: this is not .* reward_function changed; restore it"
    with pytest.raises(LigerError, match=said):
        run(folder, tmp_path / "run", **given, resume=True)


def test_a_batch_that_only_keeps_ranks_in_step_has_no_rewards(folder: Path, recwarn) -> None:
    """The function may need completions; none are counted here."""
    trainer = grpo_trainer(folder, 8, 1)
    extra = [batch.uncounted() for batch in trainer.micro_batches(0)]
    (batch,), metrics = trainer.objective.begin(trainer.call, extra)
    assert batch.num_targets == 0 and batch.advantages.eq(0).all()
    assert all(mean.count == 0 for mean in metrics.values())
    assert not [each for each in recwarn if "std" in str(each.message)]


def test_functions_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    assert load_reward("operator:add")[0](1, 2) == 3
    (tmp_path / "bad.py").write_text("1 +")
    for name, fault in (
        ("vowels", "is not FILE.py:NAME"),
        (f"{folder / 'rewards.py'}:consonants", "has no function 'consonants'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (f"{tmp_path / 'bad.py'}:f", "SyntaxError"),
        (f"{tmp_path / 'none.py'}:f", "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=fault):
            load_reward(name)
