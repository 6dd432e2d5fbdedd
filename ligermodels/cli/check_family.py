"""Compare a family with transformers, on tiny random models.

Check a model family, for example one of your own (--import MODULE). Tiny random models are made
from its config, and once more for each boolean of the config. The command compares logits, loss,
gradients, padding, generation and the export with transformers, if it is installed and knows the
model_type. It also checks packed documents, recomputation and torch.compile. The exit code is 1 if
a check fails.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass

from ligermodels.cli.options import CommonOptions
from ligermodels.training.options import option


@dataclass(kw_only=True)
class Arguments(CommonOptions):
    """The options of `check-family`.

    Attributes:
        family: a model_type ('ligermodels families' lists them), or the local folder or hub id of a
            checkpoint, of which only config.json is read
        revision: branch, tag or commit of a hub checkpoint
        compile: check torch.compile
        device: where the models compute, for example cuda
    """

    family: str = option(MISSING, positional=True)
    revision: str | None = option(None)
    compile: bool = option(True)
    device: str = option("cpu")


def run(given: Arguments) -> None:
    """Print the table of checks."""
    from ligermodels.checks.check_family import CHECKS, check_family
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
    device = pick_device(given.device)
    report = check_family(family, config, compile=given.compile, device=device)
    print("relative errors in float32, or counts:")
    for check, (_, meaning) in CHECKS.items():
        print(f"  {check:<12}{meaning}")
    print(f"\n{report}")
    if not report.ok:
        raise SystemExit(1)
