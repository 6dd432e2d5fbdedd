"""Options in a YAML file: what is read, and that a run's own file gives the same run."""

from __future__ import annotations

import pytest

from ligermodels.errors import ConfigError
from ligermodels.training.config_file import config_text, read_config


@pytest.fixture
def read(tmp_path):
    def read(text, **options):
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return read_config(file, **options)

    return read


def test_values_have_the_types_of_yaml_1_2(read):
    text = """
        # a comment
        model: some/model
        train-files: [a.jsonl, "b c.txt"]
        learning_rate: 2e-5
        adam_epsilon: 1.e-8
        weight_decay: .1
        seed: 010
        memory: off
        precision: bf16
        compile: true
        eval_files: null
        separator: ""
        revision: 2024-01-01
        """
    assert read("\n".join(line.strip() for line in text.splitlines())) == {
        "model": "some/model",
        "train_files": ["a.jsonl", "b c.txt"],
        "learning_rate": 2e-5,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "seed": 10,
        "memory": "off",
        "precision": "bf16",
        "compile": True,
        "eval_files": None,
        "separator": "",
        "revision": "2024-01-01",
    }
    assert read("") == read("# nothing\n") == {}
    assert read("gpus: 2", also=["gpus"]) == {"gpus": 2}


def test_what_is_wrong_is_named_with_its_line(read, subtests):
    for text, message in (
        ("model: a\nlearning_rat: 1", r"run.yaml:2: 'learning_rat' is no .*mean 'learning_rate'"),
        ("lr: 1", r"run.yaml:1: 'lr' is no option; did you mean 'learning_rate'"),
        ("micro_batch_size: 1", r"'micro_batch_size' is no option; did you mean 'batch_size'"),
        ("dataset: a", r"'dataset' is no option; did you mean 'train_files'"),
        ("gpus: 2", r"'gpus' is no option"),
        ("seed: 1\nseed: 2", r"run.yaml:2: seed: the key is there twice"),
        ("lora: {r: 1, r: 2}", r"run.yaml:1: .*a key is there twice"),
        ("- a", r"run.yaml: the file must hold options"),
        ("seed: [1", r"run.yaml:1: the file is not YAML: "),
        ("seed: !!bool maybe", r"run.yaml: the file is not YAML: "),
        ("seed: !!timestamp soon", r"run.yaml: the file is not YAML: "),
        ('seed: !!float ""', r"run.yaml: the file is not YAML: "),
        ("model: !!python/name:os.system x", r"run.yaml:1: the file is not YAML: "),
    ):
        with subtests.test(text), pytest.raises(ConfigError, match=message):
            read(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: the file is missing"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "odd.yaml").write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match=r"odd\.yaml: the file cannot be read"):
        read_config(tmp_path / "odd.yaml")


def test_what_is_written_is_read_again(read):
    settings = {
        "model": "2e-5",
        "train_files": ["off", "ä b.txt", "1", "x: y", "#", "\udc80", "🙂" * 60],
        "separator": "",
        "learning_rate": 3e-7,
        "compile": False,
        "eval_files": None,
        "max_shard_size": 5 * 10**9,
        "gpus": 2,
    }
    text = config_text(settings)
    assert read(text, also=["gpus"]) == settings
    assert "\n# peak learning rate\nlearning_rate: 3.0e-07\n" in text
