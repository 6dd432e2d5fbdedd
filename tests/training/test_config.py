"""The options of a run: their types and limits, and which ones may change on resume."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from ligermodels.errors import ConfigError
from ligermodels.training import config
from ligermodels.training.config import (
    FREE_ON_RESUME,
    FinetuneConfig,
)
from ligermodels.training.options import types_of


def make(**changes):
    return FinetuneConfig(**({"model": "m", "train_files": ["t"], "output_dir": "o"} | changes))


def test_values_that_make_no_sense_are_refused(subtests):
    for changes, message in (
        ({"seq_len": 1}, "seq_len: must be at least 2, not 1"),
        ({"learning_rate": 0.0}, "learning_rate: must be more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate: must be more than 0"),
        ({"eval_fraction": 1.0}, "eval_fraction: must be less than 1"),
        ({"min_lr_rate": 2.0}, "min_lr_rate: must be at most 1"),
        ({"precision": "fp8"}, "precision: must be one of float32, bf16-mixed, bf16"),
        ({"batch_size": "four"}, "batch_size: must be a whole number, not 'four'"),
        ({"max_steps": 2.5}, "max_steps: must be a whole number, not 2.5"),
        ({"num_train_epochs": "two"}, "num_train_epochs: must be a number, not 'two'"),
        ({"memory": "some"}, "memory='some': expected a number of bytes"),
        ({"memory": "auto", "activation_checkpointing": True}, "memory: choose one of the two"),
        ({"memory": 10**9, "activation_checkpointing": True}, "memory: choose one of the two"),
        ({"train_files": []}, "train_files: at least one file"),
        ({"train_files": 3}, "train_files: must be a list of paths, not 3"),
        ({"data_weights": True}, "data_weights: must be a list of numbers, not [True]"),
        ({"train_files": [None]}, "train_files: must be a list of paths"),
        ({"train_files": {"a": 1}}, "train_files: must be a list of paths"),
        ({"train_files": None}, "train_files: must be a list of paths"),
        ({"model": None}, "model: must be a text, not None"),
        ({"output_dir": 3}, "output_dir: must be a text, not 3"),
        ({"separator": 3}, "separator: must be a text, not 3"),
        ({"compile": "yes"}, "compile: must be True or False, not 'yes'"),
        ({"seq_len": None}, "seq_len: must be a whole number, not None"),
        ({"seq_len": True}, "seq_len: must be a whole number, not True"),
        ({"learning_rate": True}, "learning_rate: must be a number, not True"),
        ({"memory": []}, "memory: must be a text"),
        ({"seed": 2**63}, "seed: must fit into 64 bits"),
        ({"seed": 10**5000}, "seed: must fit into 64 bits"),
        ({"max_steps": 10**10}, "max_steps: must be at most 1000000000, not 10000000000"),
        ({"batch_size": 2**21}, "batch_size: must be at most 1048576"),
        (
            {"batch_size": 2**11, "gradient_accumulation_steps": 2**11},
            "batch_size and gradient_accumulation_steps: their product must be at most 1048576",
        ),
        (
            {"lora": "r=4", "context_parallel": 2},
            "context_parallel: this cannot be combined with lora",
        ),
        ({"loss": "dpo", "context_parallel": 2}, "context_parallel: this is only for the loss sft"),
        ({"num_generations": 4}, "num_generations: this is only for --loss grpo"),
        ({"max_completion_length": 9}, "max_completion_length: this is only for --loss grpo"),
        ({"loss": "dpo", "temperature": 0.5}, "temperature: this is only for --loss grpo"),
        (
            {"loss": "dpo", "label_smoothing": 0.1},
            "label_smoothing: this is only for the loss types robust, exo_pair, aot, aot_unpaired",
        ),
        (
            {"loss": "cpo", "loss_type": "hinge", "label_smoothing": 0.1},
            "label_smoothing: this is only for the loss types sigmoid",
        ),
        ({"lora": "r=4", "freeze": ["norm"]}, "lora and freeze: set only one of them"),
        ({"load_in": "4bit"}, "load_in: this needs adapters; set lora"),
        ({"resume": True, "overwrite_output_dir": True}, "resume and overwrite_output_dir"),
    ):
        with subtests.test(message):
            with pytest.raises(ConfigError) as error:
                make(**changes)
            assert message in str(error.value)


def test_the_type_of_an_optional_value_is_that_of_the_value():
    types = types_of(FinetuneConfig)
    assert types["model"] is str and types["precision"] is str
    assert types["seq_len"] is int and types["max_steps"] is int
    assert types["learning_rate"] is float and types["resume"] is bool
    assert types["train_files"] == types["eval_files"] == list[str]


def test_paths_become_strings_and_one_value_a_list():
    config = make(model=Path("m"), train_files=Path("a.txt"), eval_files=("b", Path("c")))
    assert (config.model, config.train_files, config.eval_files) == ("m", ["a.txt"], ["b", "c"])
    assert make(data_weights=2, report_to="wandb").data_weights == [2]
    assert make(data_weights=0.5).data_weights == [0.5]


def test_memory_is_a_text_and_may_be_a_number():
    assert make(memory=10**9).memory == "1000000000"
    assert make(memory="off", activation_checkpointing=True).memory == "off"
    for text in ("auto", "off", "40GiB"):
        assert make(memory=text).memory == text


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


def test_every_option_is_read_by_the_run():
    """As `config.NAME`, or by its name where `objectives.given` takes the options of a loss."""
    read = set()
    for file in Path(config.__file__).parent.glob("*.py"):
        if file.name == "config.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if ast.unparse(node.value) in ("config", "self.config"):
                    read.add(node.attr)
            elif isinstance(node, ast.Constant) and file.name in ("objectives.py", "online.py"):
                read.add(node.value)
    assert not {each.name for each in fields(FinetuneConfig)} - read
