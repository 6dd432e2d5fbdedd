"""The options of a run: their types and limits, in Python and in a YAML file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from ligermodels.cli.finetune import ProcessOptions
from ligermodels.errors import ConfigError
from ligermodels.training.config import (
    FREE_ON_RESUME,
    FinetuneConfig,
    config_text,
    option_names,
    read_config,
    subjects,
)
from ligermodels.training.losses import DPO, GRPO, LOSSES, SFT, Loss
from ligermodels.training.objectives import Objective
from ligermodels.training.options import flat_name, helps, option, types_of

NEEDED = {"grpo": {"reward_function": "f.py:f"}, "distillation": {"teacher": "t"}}
SIZES = {"batch_size": 8, "seq_len": 512}
DPO_ = {"loss": "dpo"}
GRPO_ = {"loss": "grpo", "reward_function": "f.py:f", "batch_size": 8}


def make(**changes):
    return FinetuneConfig.from_options(
        **({"model": "m", "train_files": ["t"], "output_dir": "o"} | changes)
    )


def test_the_learning_rate_is_that_of_trl():
    trl = pytest.importorskip("trl")
    kinds = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "grpo": "GRPO", "reward": "Reward"}
    for loss, name in kinds.items():
        theirs = getattr(trl, f"{name}Config").__dataclass_fields__["learning_rate"].default
        assert (
            make(loss=loss, batch_size=8, **NEEDED.get(loss, {})).schedule.learning_rate == theirs
        )
    assert make(loss="dpo", learning_rate=3e-7).schedule.learning_rate == 3e-7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_number_is_finite(loss, value):
    for kind in subjects(loss).values():
        for name, of in types_of(kind).items():
            if of in (float, list[float]):
                with pytest.raises(ConfigError, match=f"{name}: must be a finite number, not -?"):
                    kind.taken({name: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seq_len": 1}, "seq_len: must be at least 2, not 1"),
        ({"eval_fraction": 1.0}, "eval_fraction: must be less than 1"),
        ({"seed": 10**5000}, "seed: must fit into 64 bits"),
        ({"precision": "fp8"}, "precision: must be one of float32, bf16-mixed, bf16"),
        ({"max_steps": 2.5}, "max_steps: must be a whole number, not 2.5"),
        ({"train_files": {"a": 1}}, "train_files: must be a text, not {'a': 1}"),
        ({"train_files": []}, "train_files: missing"),
        ({"model": None}, "model: missing"),
        ({"lr": 1}, "lr is no option; did you mean 'learning_rate'?"),
        ({"loss": "dop"}, "loss: must be one of sft, dpo"),
        ({"memory": "some"}, "memory='some': expected a number of bytes"),
        ({"memory": 10**9, "activation_checkpointing": True}, "memory: choose one of the two"),
        ({"resume": True, "overwrite_output_dir": True}, "resume and overwrite_output_dir"),
        ({"lora_r": 4, "context_parallel": 2}, "lora_r and context_parallel: adapters take"),
        ({"lora_r": 4, "freeze": ["norm"]}, "lora_r and freeze: adapters freeze the model"),
        ({"lora_alpha": 4.0}, "lora_alpha: this needs lora_r"),
        ({"hub_private_repo": True}, "hub_private_repo: this needs push_to_hub"),
        ({"sample_chat": True}, "sample_chat: this needs sample_prompts"),
        ({"num_train_epochs": 1e300}, "num_train_epochs: must be at most 1000000000.0, not 1e+300"),
        ({"data_weights": [1, 2]}, "data_weights: there are 2, but train_files has 1"),
        (DPO_ | {"context_parallel": 2}, "cannot be combined with the loss dpo"),
        (GRPO_ | {"expert_parallel": 2}, "combined with the loss grpo, which needs whole models"),
        (DPO_ | {"stream": True}, "stream: this is for packed documents, not for dpo"),
        (DPO_ | {"label_smoothing": 0.1}, "this is only for the loss_type robust, exo_pair"),
        (DPO_ | {"discopop_tau": 0.1}, "discopop_tau: this is only for the loss_type"),
        ({"loss": "distillation"}, "teacher: distillation needs one"),
        ({"loss": "grpo"}, "reward_function: grpo needs one"),
        (GRPO_ | {"batch_size": 3}, "num_generations: must divide the completions of a step"),
        (GRPO_ | {"loss_type": "cispo"}, "epsilon_high: cispo needs it"),
    ],
)
def test_values_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError) as error:
        make(**changes)
    assert message in str(error.value)


def test_paths_become_strings_and_one_value_a_list():
    config = make(model=Path("m"), train_files=Path("a.txt"), eval_files=("b", Path("c")))
    assert (config.model.path, config.data.train_files, config.data.eval_files) == (
        "m",
        ["a.txt"],
        ["b", "c"],
    )
    assert make(data_weights=2, report_to="wandb").data.data_weights == [2]
    assert make(data_weights=0.5).data.data_weights == [0.5]


def test_memory_is_a_text_and_may_be_a_number():
    assert make(memory=10**9).memory.budget == "1000000000"
    assert make(memory="off", activation_checkpointing=True).memory.budget == "off"
    for text in ("auto", "off", "40GiB"):
        assert make(memory=text).memory.budget == text


def test_options_that_change_training_are_fixed_on_resume():
    assert {
        "model",
        "train_files",
        "output_dir",
        "eval_steps",
        "save_steps",
        "resume",
        "memory",
    } <= FREE_ON_RESUME
    fixed = {"separator", "seq_len", "max_steps", "learning_rate", "seed", "precision"}
    assert not fixed & FREE_ON_RESUME


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_owns_its_options_and_no_name_is_there_twice(loss: str) -> None:
    names = option_names(loss)
    assert max(Counter([*names, "loss"]).values()) == 1
    config = make(loss=loss, **NEEDED.get(loss, {}), **SIZES)
    assert type(config.loss) is LOSSES[loss]
    assert FinetuneConfig.from_options(**config.options()) == config
    for name in {flat_name(each) for kind in LOSSES.values() for each in fields(kind)} - {*names}:
        with pytest.raises(ConfigError, match=f"{name}: this is only for the loss "):
            make(loss=loss, **{name: 1})


def test_every_option_has_a_help() -> None:
    for loss in LOSSES:
        for kind in subjects(loss).values():
            for name, text in helps(kind).items():
                assert len(text) > 10 and "\n" not in text, name


def test_a_loss_of_ones_own_is_found_by_its_name() -> None:
    @dataclass(kw_only=True)
    class Margin(Loss, name="margin"):
        """A loss.

        Attributes:
            margin: how far
                it goes.
        """

        margin: float = option(0.5, at_least=0)

        def objective(self, config: FinetuneConfig) -> Objective:
            return Objective(config)

    try:
        assert make(loss="margin", margin=2).loss == Margin(margin=2)
        assert helps(Margin) == {"margin": "how far it goes"}
        with pytest.raises(ConfigError, match="margin: must be at least 0"):
            make(loss="margin", margin=-1)
    finally:
        del LOSSES["margin"]


@pytest.fixture
def read(tmp_path):
    def read(text, **options):
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return read_config(file, **options)

    return read


def test_values_have_the_types_of_their_options(read):
    text = """# a comment
model: some/model
data:
  train-files: [a.jsonl, "b c.txt"]
  separator: ""
  eval_files: null
schedule: {learning_rate: 2e-5, seed: 010, name: linear}
adam_epsilon: 1.e-8
weight_decay: .1
memory: off
compile: true
revision: 2024-01-01
loss:
  name: dpo
  beta: 3
"""
    assert read(text) == {
        "model": "some/model",
        "train_files": ["a.jsonl", "b c.txt"],
        "separator": "",
        "eval_files": None,
        "learning_rate": 2e-5,
        "seed": 10,
        "schedule": "linear",
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "memory": "off",
        "compile": True,
        "revision": "2024-01-01",
        "loss": "dpo",
        "beta": 3,
    }
    assert read("") == read("# nothing\n") == {}
    assert read("gpus: 2", also=[ProcessOptions]) == {"gpus": 2}


def test_what_is_wrong_in_a_file_is_named_with_its_line(read, subtests):
    for text, message in (
        ("model: a\nlearning_rat: 1", r"run.yaml:2: learning_rat is no .*mean 'learning_rate'"),
        ("data:\n  micro_batch_size: 1", r"run.yaml:2: micro_batch_size is no .*'batch_size'"),
        ("loss:\n  name: sft\n  beta: 1", r"run.yaml:3: beta: this is only for the loss dpo"),
        ("gpus: 2", r"gpus is no option"),
        ("seed: 1\nschedule:\n  seed: 2", r"run.yaml:3: seed: the key is there twice"),
        ("- a", r"run.yaml: the file must hold options"),
        ("seed: [1", r"run.yaml:1: the file is not YAML: "),
    ):
        with subtests.test(text), pytest.raises(ConfigError, match=message):
            read(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: the file is missing"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "odd.yaml").write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match=r"odd\.yaml: the file is not YAML"):
        read_config(tmp_path / "odd.yaml")


@pytest.mark.parametrize("loss", [SFT.name, DPO.name, GRPO.name])
def test_what_is_written_is_read_again(read, loss):
    odd = ["off", "ä b.txt", "1", "x: y", "#", "\udc80", "🙂" * 60]
    config = make(
        loss=loss,
        model="2e-5",
        train_files=odd,
        separator="",
        **{"learning_rate": 3e-7, **NEEDED.get(loss, {}), **SIZES},
    )
    text = config_text(config.options(), {"gpus": 2})
    assert read(text, also=[ProcessOptions]) == config.options() | {"gpus": 2}
    assert "your own)\n  learning_rate: 3e-07\n" in text
