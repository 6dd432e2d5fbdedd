"""The command `ligermodels check-family`."""

from __future__ import annotations

import argparse
import json
import os

from ligermodels.cli.options import number

HELP = "compare a family with transformers, on tiny random models"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the family or config, and the output format."""
    command.description = (
        "Check a model family, for example one of your own (--import MODULE). Tiny random models "
        "are made from its config, and once more for each boolean of the config. The command "
        "compares logits, loss, gradients, padding, generation and the export with transformers, "
        "if it is installed and knows the model_type. It also checks packed documents, "
        "recomputation and torch.compile. The exit code is 1 if a check fails."
    )
    add = command.add_argument
    add(
        "family",
        metavar="FAMILY",
        help="a model_type ('ligermodels families' lists them), or the local folder or hub id of a "
        "checkpoint, of which only config.json is read",
    )
    add("--revision", help="branch, tag or commit of a hub checkpoint")
    add("--no-compile", action="store_true", help="leave torch.compile out")
    add(
        "--seed",
        type=number(int, at_least=0),
        default=0,
        metavar="N",
        help="seed of weights and inputs",
    )
    add("--device", default="cpu", help="where the models compute, for example cuda")
    add("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> None:
    """Print the table of checks."""
    from dataclasses import asdict

    from ligermodels.checks.check_family import MEANINGS, check_family
    from ligermodels.converters.hub import resolve
    from ligermodels.models.auto import families, family_of
    from ligermodels.training.finetune import pick_device

    config = None
    if given.family in families() and not os.path.isdir(given.family):
        family = families()[given.family]
    else:
        folder = resolve(given.family, given.revision, weights=False)
        family = family_of(folder)
        config = family.config_class.from_hf(folder)
    options = {"seed": given.seed, "device": pick_device(given.device)}
    report = check_family(family, config, compile=not given.no_compile, **options)
    if given.json:
        print(json.dumps({**asdict(report), "ok": report.ok}, indent=2))
    else:
        print(report)
        print("\nrelative errors in float32, or counts:")
        for check, meaning in MEANINGS.items():
            print(f"  {check:<12}{meaning}")
    if not report.ok:
        raise SystemExit(1)
