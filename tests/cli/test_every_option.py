"""Every option of every command changes what reaches the library, or what is printed."""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import re
from dataclasses import Field, dataclass, fields
from inspect import signature
from types import SimpleNamespace
from typing import Any, get_args, get_origin
from unittest.mock import MagicMock

import pytest

from ligermodels import LigerLlama, cli
from ligermodels.cli import check_family, convert, evaluate, families, finetune, generate, inspect
from ligermodels.training.config import subjects
from ligermodels.training.evaluate import FileLoss
from ligermodels.training.losses import LOSSES
from ligermodels.training.options import flat_name, types_of


@dataclass
class Report:
    ok: bool = True


OUTLOOK = SimpleNamespace(
    rates="", plan=None, budget=1, least_bytes=1, largest_batch=1, largest_seq=1
)
LOSS = FileLoss(loss=1.0, targets=3, tokens=4, seconds=1.0)
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
    "training.data:local_files": lambda files, library, **options: files,
    "training.evaluate:file_loss": LOSS,
    "training.finetune:pick_device": lambda device=None: device or "cpu",
    "training.model:outlook": OUTLOOK,
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
ROOMS = "adapters checks converters generation heads models text training".split()


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__.split(".")[-1])
def test_every_option_has_an_effect(module, checkpoint, monkeypatch, subtests, tmp_path):
    arguments, values = COMMANDS[module]
    known = {"--" + flat_name(x).replace("_", "-") for x in fields(module.Arguments)}
    positional = {"--model", "--prompt", "--source", "--target", "--family", "--import"}
    given = {name.replace("--no-", "--") for name in values}
    assert known - positional == given, "an option is missing in the table, or no longer there"
    monkeypatch.setitem(RECORDED, "converters.hub:resolve", lambda *_, **options: checkpoint)
    monkeypatch.chdir(tmp_path)

    # A module that is first imported below would keep the recorded functions for good.
    for room in ROOMS:
        folder = importlib.import_module(f"ligermodels.{room}").__path__
        for found in pkgutil.iter_modules(folder):
            importlib.import_module(f"ligermodels.{room}.{found.name}")

    signatures = {}

    def effect(*options: str) -> dict[str, str]:
        """Return what was printed, and the calls of each recorded function, as text."""
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
                if name not in signatures:
                    signatures[re.sub(r"\W", "_", name)] = signature(getattr(owner, attribute))
                patch.setattr(owner, attribute, function)
            patch.setattr(builtins, "print", log.print)
            assert cli.main([*arguments.split(), *options]) == 0
        calls: dict[str, str] = {}
        for called in log.mock_calls:
            text = re.sub(r"id='\d+'|0x[0-9a-f]+|<MagicMock [^>]*>", "", repr(called))
            calls[called[0]] = calls.get(called[0], "") + text
        calls.pop("print.__hash__", None)  # Libraries keep what they have seen, once a process.
        return calls

    for option, value in values.items():
        needed = [NEEDED[option]] if option in NEEDED else []
        with subtests.test(option):
            without = effect(*needed)
            assert effect(*needed) == without, "the record is not the same each time"
            given = effect(*needed, option, *([value] if value else []))
            assert given != without
            if option == "--revision":
                continue  # With it a folder is resolved, which the other functions get.
            # Every function that has an argument of this name gets it, and not the first alone.
            for name in given.keys() & without.keys():
                known = getattr(LigerLlama, name.partition("().")[2], None)
                of = signature(known) if known else signatures.get(name)
                argument = option.removeprefix("--").replace("-", "_")
                if of is not None and argument in of.parameters:
                    assert given[name] != without[name], name


@pytest.mark.parametrize("loss", LOSSES)
def test_every_option_of_finetune_sets_its_field(loss):
    """All are given at once, each with another value than its default."""
    words, wanted = ["MODEL", "--loss", loss], {"model": "MODEL", "loss": loss}
    for kind in subjects(loss).values():
        types = types_of(kind)
        for each in fields(kind):
            name = flat_name(each)
            if name in ("model", "resume"):
                continue
            option, value = name.replace("_", "-"), another_value(each, types[name])
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            else:
                values = value if isinstance(value, list) else [value]
                words += [f"--{option}", *map(str, values)]
            wanted[name] = value
    assert finetune.parse_arguments(words).options == wanted


def another_value(each: Field[Any], kind: Any) -> Any:
    """Return a value of an option that differs from its default and keeps its limits."""
    choices = each.metadata["choices"]
    item, *_ = get_args(kind) or (kind,)
    if item is bool:
        return not each.default
    if choices is not None:
        value = next(choice for choice in choices if choice != each.default)
    elif item is str:
        value = "64MiB" if each.name == "budget" else "other"
    else:
        value = (each.default or 1) + 1 if item is int else (each.default or 0.5) / 2
    return [value] if get_origin(kind) is list else value
