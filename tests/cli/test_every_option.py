"""Every option of every command changes what reaches the library, or what is printed."""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import re
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from ligermodels import LigerLlama, cli
from ligermodels.cli import check_family, convert, evaluate, families, generate, inspect
from ligermodels.cli.options import Parser


@dataclass
class Report:
    ok: bool = True


OUTLOOK = SimpleNamespace(
    rates="", plan=None, budget=1, least_bytes=1, largest_batch=1, largest_seq=1
)
LOSS = SimpleNamespace(
    perplexity=2.0, loss=1.0, targets=3, tokens=4, truncated=0, untargeted=0, seconds=1.0
)
# What the functions return whose arguments are recorded.
RECORDED = {
    "cli.evaluate:_lm_eval": None,
    "converters.save_dir:read_one_version": lambda folder, load: load(folder),
    "converters.checkpoint_files:files_left_out": [],
    "converters.checkpoint_files:is_adapter": False,
    "converters.export:replaced_names": [],
    "converters.verify:compare": Report(),
    "generation.generate:stream_text": ["a", " b"],
    "generation.generation_config:checked_generation_config": {},
    "checks.check_family:check_family": Report(),
    "models.auto:AutoLiger.from_hf": None,
    "models.auto:family_of": LigerLlama,
    "models.auto:tokenizer_folder": "folder",
    "heads.medusa_file:load_heads": "heads",
    "heads.medusa_file:read_heads": None,
    "text.tokenizer:Tokenizer.from_hf": None,
    "training.data_sources:local_files": lambda files, **options: files,
    "training.evaluate:file_loss": LOSS,
    "training.finetune:pick_device": "cpu",
    "training.memory:outlook": OUTLOOK,
}
LOADING = {"--revision": "other", "--dtype": "float16", "--allow-nonfinite": ""}
# Each command, its arguments, and a value of each option; "" for an option without one.
COMMANDS = {
    evaluate: (
        "evaluate MODEL --files a.txt --tasks task",
        LOADING
        | {"--files": "b.txt", "--tasks": "other", "--seq-len": "7", "--batch-size": "3"}
        | {"--separator": "***", "--num-fewshot": "2", "--limit": "5", "--task-folder": "folder"}
        | {"--device": "cuda", "--json": ""},
    ),
    generate: (
        "generate MODEL PROMPT",
        LOADING
        | {"--chat": "", "--system": "brief", "--max-new-tokens": "3", "--temperature": "0.5"}
        | {"--top-k": "4", "--top-p": "0.5", "--repetition-penalty": "1.5", "--seed": "1"}
        | {"--no-heads": "", "--no-stream": "", "--device": "cuda"},
    ),
    convert: (
        "convert SOURCE TARGET",
        LOADING | {"--verify": "", "--max-shard-size": "1MB", "--overwrite": ""},
    ),
    check_family: (
        "check-family MODEL",
        {"--revision": "other", "--no-compile": "", "--seed": "3", "--device": "cuda"}
        | {"--json": ""},
    ),
    inspect: (
        "inspect MODEL --batch 2 --seq 8 --budget 2GiB",
        {"--revision": "other", "--batch": "3", "--seq": "9", "--budget": "1GiB"}
        | {"--gpu": "H200", "--precision": "float32", "--json": ""},
    ),
    families: ("families", {"--json": ""}),
}
NEEDED = {"--system": "--chat"}


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__.split(".")[-1])
def test_every_option_has_an_effect(module, checkpoint, monkeypatch, subtests, tmp_path):
    arguments, values = COMMANDS[module]
    command = Parser()
    module.add_arguments(command)
    known = {x.option_strings[-1] for x in command._actions if x.option_strings}
    assert known - {"--help"} == {*values}, "an option is missing in the table, or no longer there"
    monkeypatch.setitem(RECORDED, "converters.hub:resolve", lambda *_, **options: checkpoint)
    monkeypatch.chdir(tmp_path)

    # A module that is first imported below would keep the recorded functions for good.
    for room in ("converters", "models", "generation", "text", "training", "integrations"):
        folder = importlib.import_module(f"ligermodels.{room}").__path__
        for found in pkgutil.iter_modules(folder):
            if room != "integrations" or found.name == "check_family":
                importlib.import_module(f"ligermodels.{room}.{found.name}")

    def effect(*options: str) -> str:
        """Return what was printed, and the calls of the recorded functions, as text."""
        log = MagicMock()
        log.cli_evaluate__lm_eval.return_value.return_value = {"task": {"accuracy": 0.5}}
        model = log.models_auto_AutoLiger_from_hf.return_value
        model.embed_tokens.weight.device = "cpu"
        with monkeypatch.context() as patch:
            for name, result in RECORDED.items():
                function = getattr(log, re.sub(r"\W", "_", name))
                if callable(result) and not isinstance(result, type):
                    function.side_effect = result
                elif result is not None:
                    function.return_value = result
                place, _, attribute = name.partition(":")
                owner = importlib.import_module(f"ligermodels.{place}")
                if "." in attribute:
                    owner, attribute = getattr(owner, attribute.split(".")[0]), "from_hf"
                patch.setattr(owner, attribute, function)
            patch.setattr(builtins, "print", log.print)
            assert cli.main([*arguments.split(), *options]) == 0
        return re.sub(r"id='\d+'|0x[0-9a-f]+|<MagicMock [^>]*>", "", repr(log.mock_calls))

    for option, value in values.items():
        needed = [NEEDED[option]] if option in NEEDED else []
        with subtests.test(option):
            assert effect(*needed) == effect(*needed), "the record is not the same each time"
            assert effect(*needed, option, *([value] if value else [])) != effect(*needed)
